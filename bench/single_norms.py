"""How well estimates of single norms do: every norm run exactly, estimated, and chosen as in a large model.

Of each model's default prompts the first so many. Columns: norms; for each variant the Spearman correlation of the
exact loss changes with first-order estimates alone (`first`) and with the second-order ones of the table `causal`
(`second`); the largest change; and of the ten largest changes over all norms and variants, how many belong to the norms
that would be run exactly in a large model (`recall_K`: the K with the largest estimates), for three K.

    python bench/single_norms.py lm-layernorm "$LN_PROBE_MGM" ../shared/checkpoints/capp_gpt --out FILE.csv
    python bench/single_norms.py gpt2-shape --prompts 4     # random weights, as in bench/whole.py
    python bench/single_norms.py "$LN_PROBE_GGUF" --prompts 4 --tokens 64
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import torch
import typer
import whole
from harness import keep
from scipy.stats import spearmanr

import ln_probe
from ln_probe.analyses.probes.edited_runs import EditedRuns
from ln_probe.analyses.probes.leading import with_largest
from ln_probe.hooks.scales import mean_sigmas
from ln_probe.hooks.sites import find_sites
from ln_probe.hooks.text import CALIBRATION, MEASURED, default_tokens
from ln_probe.hooks.variants import edits_of_norms

LARGEST, SIZES = 10, (6, 8, 12)
COLUMNS = ("model", "norms", "prompts", "variant", "first", "second", "largest", *(f"recall_{k}" for k in SIZES))


def measured(name: str, model: object, prompts: int, length: int | None) -> list[tuple[object, ...]]:
    """The rows of one model."""
    sites = find_sites(model)
    other = default_tokens(model, CALIBRATION)
    means = mean_sigmas(model, sites, other)
    runs = EditedRuns(model, sites, means, exact=[s.name for s in sites], uniform=False, single_norm_prompts=prompts)
    runs.rows = [r for r in runs.rows if not r.is_group]
    exact, first, second = (defaultdict[tuple[str, str], float](float) for _ in range(3))
    tokens, every = 0, []
    for number, whole_prompt in enumerate(default_tokens(model, MEASURED)[:prompts]):
        prompt = whole_prompt[:length]
        rows = runs.measure(number, prompt).set_index(["sites", "variant"])
        terms = runs._estimates(runs.rows, prompt, means)
        every.append(terms)
        tokens += len(prompt) - 1
        for (site, variant), found in terms.items():
            exact[site, variant] += rows["nll"][site, variant] - rows["nll"][site, "intact"]
            first[site, variant] += found[0]
            second[site, variant] += sum(found)
    order = with_largest(every, len(sites))
    top = sorted(exact, key=lambda key: -abs(exact[key]))[:LARGEST]
    recall = [sum(site in order[:k] for site, _ in top) for k in SIZES]
    found_rows: list[tuple[object, ...]] = []
    for variant in edits_of_norms():
        keys = [k for k in exact if k[1] == variant.name and runs.rows and exact[k]]
        if len(keys) > 2:
            rho = [spearmanr([exact[k] for k in keys], [of[k] for k in keys]).statistic for of in (first, second)]
            largest = max((exact[k] / tokens for k in keys), key=abs)
            figures = (*(f"{r:.2f}" for r in rho), f"{largest:.2g}", *recall)
            found_rows.append((name, len(sites), prompts, variant.name, *figures))
    return found_rows


def main(
    models: list[str],
    prompts: int = 12,
    tokens: Annotated[int | None, typer.Option(help="the first so many of each prompt (default: all)")] = None,
    out: Annotated[Path | None, typer.Option(help="a CSV file; rows of other models in it are kept")] = None,
) -> None:
    torch.set_num_threads(1)
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            place = whole.checkpoint(Path(folder), 12) if name == "gpt2-shape" else name
            model = ln_probe.load_model(str(place), allow_pickle="mgm" in str(place))
            rows = measured(_label(name), model, prompts, tokens)
        print(*(" ".join(map(str, row)) for row in rows), sep="\n", flush=True)
        keep(out, COLUMNS, rows)


def _label(name: str) -> str:
    known = {"general_model": "MGM", "capp_gpt": "CAPP-GPT", "gpt2-shape": "GPT-2 small's shape, random weights"}
    known["SmolLM2-135M-Instruct.Q4_1.gguf"] = "SmolLM2-135M"
    return known.get(Path(name).name, Path(name).name)


if __name__ == "__main__":
    typer.run(main)
