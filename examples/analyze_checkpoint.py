"""Analyze a model and look at what its norms do for attention.

    python examples/analyze_checkpoint.py [MODEL]

MODEL is a bundled name (the default), a Hugging Face folder, a .gguf file or a hub name.
"""

from __future__ import annotations

import sys

import torch

import ln_probe


def main(name: str) -> None:
    model = ln_probe.load_model(name)
    report = ln_probe.analyze(model, max_tokens=96, progress=False)

    print(f"{report!r}\n")
    for sentence in report.findings():
        print(f"- {sentence}")

    print("\nEvery norm, term by term:")
    columns = ["site", "reads", "mean_share", "angle_to_ones_deg", "sigma_mean_tail", "norm_before_cv_tail"]
    print(report.layernorms[columns].to_string(index=False, float_format="%.4g"))

    print("\nThe median head of each layer, by variant:")
    heads = report.heads[report.heads["space"] == "head"]
    measures = ["unselectable_fraction", "margin_median", "attainable_median", "pattern_max_median", "entropy_ratio"]
    print(heads.groupby(["layer", "variant"], sort=False)[measures].median().to_string(float_format="%.4g"))

    print("\nThe geometry alone, for any set of vectors:")
    keys = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    geometry = ln_probe.key_geometry(keys, query_set=3.0)  # queries no longer than 3
    hard = [i for i, v in enumerate(geometry.verdict) if v == "unselectable"]
    print(f"{len(hard)} of {len(keys)} random keys in 8 dimensions are in the hull of the others")
    print(f"key {hard[0]} is a mixture of {(geometry.weights(hard[0]) > 0).sum()} other keys")
    geometry.certify()  # every verdict, margin and weight, checked by code that shares nothing with the solvers


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["lm-layernorm"]))
