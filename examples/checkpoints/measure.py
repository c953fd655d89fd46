"""Measure a checkpoint on 64 prompts, and compare checkpoints of the hub with predictions made before.

    python examples/checkpoints/measure.py NAME…             # writes tables/NAME/{causal,causal_prompts,values}.csv
    python examples/checkpoints/measure.py --check gpt2 …    # prints which predictions hold; writes checked/NAME

`values.csv` holds eight measures of a checkpoint. A prediction for another checkpoint is their mean over the measured
ones (`MEASURED`), plus and minus twice their standard deviation (of logarithms where scaling is frozen). Prompts are
chosen without looking: evenly spread over a corpus, or drawn by the model with a fixed seed.

Books and CAPP-GPT are read from ../shared (or LN_PROBE_SHARED), MGM from LN_PROBE_MGM, SmolLM2 from LN_PROBE_GGUF, as
in the tests; wikitext-2 from ../shared or, if it is not there, through `datasets`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import ln_probe
from ln_probe.analyses.probes.causal import Causal
from ln_probe.hooks.model import facts_of
from ln_probe.hooks.task import encode

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("LN_PROBE_SHARED", HERE.parents[2] / "shared"))
PROMPTS = 64
HELD_OUT = 0.05  # the end of every text of which the bundled models saw the beginning (`lab.text_task.VALID_SHARE`)
TEXTS = {  # SHA-256 of the texts, as the committed tables were measured on them
    "kjv.txt": "262804ea6774be16b1e593db24f9465f0417ea0148bba2fb5a3022c26ca1e56d",
    "shakespeare_complete_gut.txt": "a74b54d1ef1dc44be145d3c93068267ab7beba0c7045a7b6a844b83ed5d7054f",
    "moby_dick.txt": "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240",
    "wikitext2/test.txt": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}
BOOKS = ("kjv.txt", "shakespeare_complete_gut.txt", "moby_dick.txt")
WIKITEXT = "wikitext2/test.txt"
ORDER_SEED = 0
MEASURED = ("mgm", "capp-gpt-own", "smollm2-135m", "lm-layernorm-books")


@dataclass(frozen=True)
class Case:
    """A checkpoint, and what it is measured on.

    Attributes:
        model: a name that `load_model` reads, or that of a model whose folder a variable names.
        prompts: one of SOURCES.
        tokens: of each prompt, at most.
        revision: of the hub.
        optimal: whether loss-optimal constants are fitted; bundled models bring theirs.
    """

    model: str
    prompts: str
    tokens: int
    revision: str | None = None
    optimal: bool = False


def corpus(name: str) -> str:
    """Return a text that prompts are taken from.

    Raises:
        SystemExit: the text is missing, or it is another one.
    """
    path = SHARED / "corpora" / name
    if not path.is_file() and name == WIKITEXT:
        from datasets import load_dataset  # type: ignore[import-not-found,unused-ignore]

        return "".join(load_dataset("Salesforce/wikitext", "wikitext-2-v1", split="test")["text"])
    if not path.is_file():
        raise SystemExit(f"there is no {path}: put the text there (SHA-256 {TEXTS[name]}) or set LN_PROBE_SHARED")
    content = path.read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != TEXTS[name]:
        raise SystemExit(f"{path} is another text: SHA-256 {digest}, expected {TEXTS[name]}")
    return content.decode(errors="replace")


def books(model: Any, limit: int) -> list[list[int]]:
    """Return windows from the ends of the bundled models' three books, on which they were not trained.

    The books alternate, and the windows of a book are shuffled, so that any number of the first prompts is a sample of
    all three.

    Args:
        model: gives the tokenizer.
        limit: longest prompt, in tokens.
    """
    generator = np.random.default_rng(ORDER_SEED)
    by_book: list[list[list[int]]] = []
    for number, name in enumerate(BOOKS):
        text = corpus(name)
        held_out = text[int(len(text) * (1 - HELD_OUT)) :]
        count = PROMPTS // len(BOOKS) + (number < PROMPTS % len(BOOKS))
        starts = np.linspace(0, len(held_out) - 8 * limit, count).astype(int)
        windows = (re.sub(r"^\S*\s+", "", held_out[s : s + 8 * limit]) for s in generator.permutation(starts))
        by_book.append([encode(facts_of(model), window)[:limit].tolist() for window in windows])
    return [row for rows in zip_longest(*by_book) for row in rows if row is not None]


def wikitext(model: Any, limit: int) -> list[list[int]]:
    """Return passages of wikitext-2's test part, evenly spread.

    Of each paragraph the longest run of whole sentences without an unknown word, if it has 80 words or more; without
    the corpus's own marks and spaces.

    Raises:
        ValueError: the model's tokenizer does not know the words of English text.
    """
    lines = corpus(WIKITEXT).splitlines()
    passages = [run for run in map(_known_sentences, lines) if len(run.split()) >= 80]
    chosen = np.linspace(0, len(passages) - 1, PROMPTS).astype(int)
    rows = [encode(facts_of(model), _plain_text(passages[i]))[:limit].tolist() for i in chosen]
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    if 2 * sum(row.count(unknown) for row in rows) > sum(map(len, rows)):
        raise ValueError("most words of wikitext-2 are unknown to the model's tokenizer: its vocabulary is another")
    return rows


def _known_sentences(paragraph: str) -> str:
    runs: list[list[str]] = [[]]
    for sentence in re.split(r"(?<= [.!?]) ", paragraph.strip()):
        if "<unk>" in sentence:
            runs.append([])
        else:
            runs[-1].append(sentence)
    return max((" ".join(run) for run in runs), key=len)


def _plain_text(tokens: str) -> str:
    """Return text as people write it, of wikitext's tokens."""
    text = re.sub(r" @(.)@ ", r"\1", tokens)
    text = re.sub(r'" ([^"]*?) "', r'"\1"', text)
    text = re.sub(r" ([,.;:!?)\]'%])", r"\1", text)
    text = re.sub(r"(\d): (\d)", r"\1:\2", text)
    return re.sub(r"([(\[$£]) ", r"\1", text)


def own(name: str, _model: Any, limit: int) -> list[list[int]]:
    """Return committed sequences that a model drew at temperature 1, up to its end token."""
    return [row[:limit] for row in json.loads((HERE / "tables" / "tokens" / f"{name}.json").read_text())]


SOURCES: dict[str, Callable[..., list[list[int]]]] = {
    "books": books,
    "wikitext": wikitext,
    "own, capp-gpt": partial(own, "capp-gpt-own"),
    "own, mgm": partial(own, "mgm"),
}
_LABS = ("lm-layernorm", "lm-scaling_only", "lm-projection_only", "lm-none")
# Commits of the main branches, as public repositories pin them (searched on 2026-11-28). Where no public source shows
# one, `--check` prints and records the commit that it has measured.
_HUB = {
    "gpt2": ("gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    "gpt2-medium": ("gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da"),
    "gpt2-small-without-norms": ("schaeff/gpt2-small_LNFree300", None),  # not pinned: no source
    "gpt2-medium-without-norms": ("schaeff/gpt2-medium_LNFree500", None),  # not pinned: no source
    "pythia-70m": ("EleutherAI/pythia-70m-deduped", "e93a9faa9c77e5d09219f6c868bfc7a1bd65593c"),
    "pythia-160m": ("EleutherAI/pythia-160m-deduped", "582159a2dfe3e712a8d47ae83dec95ae3bde8e7e"),
    "pythia-410m": ("EleutherAI/pythia-410m-deduped", "c4fc8d586d62df497f1f9b69d66d3ca419992d3e"),
    "pythia-1b": ("EleutherAI/pythia-1b-deduped", "7199d8fc61a6d565cd1f3c62bf11525b563e13b2"),
    "pythia-1.4b": ("EleutherAI/pythia-1.4b-deduped", "step143000"),  # not pinned: no source; the last step's branch
}
FOLDERS = {
    "capp-gpt": SHARED / "checkpoints" / "capp_gpt",
    "mgm": os.environ.get("LN_PROBE_MGM"),
    "smollm2-135m": os.environ.get("LN_PROBE_GGUF"),
    "minilm-l6": os.environ.get("LN_PROBE_MINILM"),
}
CASES = {
    "capp-gpt-own": Case("capp-gpt", "own, capp-gpt", 64, optimal=True),
    **{f"{name}-books": Case(name, "books", 128) for name in _LABS},
    **{f"{name}-wikitext": Case(name, "wikitext", 128) for name in _LABS},
    "mgm": Case("mgm", "own, mgm", 128),
    "smollm2-135m": Case("smollm2-135m", "wikitext", 32),
    **{name: Case(model, "wikitext", 128, revision) for name, (model, revision) in _HUB.items()},
}


def load(case: Case) -> Any:
    """Load the model of a case."""
    return ln_probe.load_model(FOLDERS.get(case.model) or case.model, revision=case.revision, allow_pickle=True)


def analyzed(name: str, *, optimal: bool) -> Any:
    """Return the report of a case: the loss without a term of each group of norms, keys, angles and sinks."""
    case = CASES[name]
    model = load(case)
    # The books are the default prompts of a bundled model, for which it brings loss-optimal constants.
    prompts = None if case.prompts == "books" else SOURCES[case.prompts](model, case.tokens)
    probes = [Causal(single_norms=False), "selectability", "uniformity", "sinks"]
    return ln_probe.analyze(model, prompts, probes=probes, progress=False, optimal=optimal)


def values(report: Any) -> dict[str, float]:
    """Return the measures that predictions are about; NaN where no norm has the term."""
    causal = report.tables["causal"].set_index(["sites", "variant"])["delta_loss"]
    measures = {
        f"{variant} at {sites}": float(causal.get((sites, variant), np.nan))
        for sites in ("attention", "all")
        for variant in ("no_scaling", "no_projection")
    }
    heads = report.tables["heads"].groupby("variant")[["unselectable", "uniform_angle_deg"]].mean()
    for variant in ("intact", "no_scaling"):
        measures[f"unselectable, {variant}"] = float(heads["unselectable"].get(variant, np.nan))
    random_angle = report.provenance.get("uniformity", {}).get("random_angle_deg", np.nan)
    measures["degrees closer to uniform than random"] = random_angle - float(heads.loc["intact", "uniform_angle_deg"])
    return measures | {"sink_rate": float(report.tables["sink_heads"]["sink_rate"].mean())}


def predictions() -> pd.DataFrame:
    """Return the thresholds of each measure: mean plus and minus twice the standard deviation over MEASURED."""
    tables = {name: pd.read_csv(HERE / "tables" / name / "values.csv") for name in MEASURED}
    small = tables["lm-layernorm-books"]  # its heads have 8 dimensions, the others' 16 and more
    tables["lm-layernorm-books"] = small[~small["measure"].str.startswith("unselectable")]
    known = pd.concat(tables.values())
    rows = []
    for measure, some in known.dropna().groupby("measure", sort=False)["value"]:
        in_logs = measure.startswith("no_scaling")
        scale = np.log(some) if in_logs else some
        ends = scale.mean() - 2 * scale.std(), scale.mean() + 2 * scale.std()
        low, high = np.exp(ends) if in_logs else ends
        rows.append({"measure": measure, "low": low, "high": high, "models": len(some)})
    return pd.DataFrame(rows)


def check(name: str, measured: dict[str, float], thresholds: pd.DataFrame) -> list[bool]:
    """Print for each prediction whether it holds for a case."""
    verdicts = []
    for row in thresholds.to_dict("records"):
        value = measured[row["measure"]]
        verdict = "not measured"
        if not np.isnan(value):
            verdicts.append(row["low"] <= value <= row["high"])
            verdict = "holds" if verdicts[-1] else "FAILS"
        print(f"{name}: {verdict}: {row['measure']} {value:.4g}, predicted {row['low']:.3g} to {row['high']:.3g}")
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", choices=CASES, nargs="+", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--check", action="store_true", help="compare with the predictions")
    parser.add_argument("--out", type=Path, help="the folder that NAME is written into")
    args = parser.parse_args()
    torch.set_num_threads(1)
    failures = 0
    for name in args.names:
        try:
            report = analyzed(name, optimal=not args.check and CASES[name].optimal)
        except (OSError, ValueError) as error:  # no hub, a revision that is gone, unusable prompts
            print(f"{name}: not measured: {error}", file=sys.stderr)
            failures += 1
            continue
        out = (args.out or HERE / ("checked" if args.check else "tables")) / name
        out.mkdir(parents=True, exist_ok=True)
        groups = report.tables["causal"].drop(columns="estimate")
        groups.to_csv(out / "causal.csv", index=False, float_format="%.6g")
        report.tables["causal_prompts"].to_csv(out / "causal_prompts.csv", index=False, float_format="%.6g")
        about = {key: report.provenance[key] for key in ("model", "prompts", "versions")}
        (out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        measured = values(report)
        table = pd.DataFrame({"measure": measured.keys(), "value": measured.values()})
        table.to_csv(out / "values.csv", index=False, float_format="%.6g")
        print(groups[groups["family"] == "primary"].to_string(index=False))
        if args.check:
            pinned = re.fullmatch("[0-9a-f]{40}", CASES[name].revision or "")
            print(f"{name}: revision {report.provenance['model']['commit']}{'' if pinned else ', not pinned before'}")
            failures += not all(check(name, measured, predictions()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
