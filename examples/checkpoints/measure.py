"""What a real checkpoint loses with a term switched off, on 64 prompts: the tables that the documentation is made of.

    python examples/checkpoints/measure.py NAME            # one of CASES; writes examples/checkpoints/tables/NAME
    python examples/checkpoints/measure.py gpt2 pythia-70m --check    # with a network: says which predictions hold

Corpora and CAPP-GPT are read from ../shared (or LN_PROBE_SHARED), MGM from LN_PROBE_MGM, SmolLM2 from LN_PROBE_GGUF, as
in the tests. Prompts are chosen without looking: evenly spread over a corpus, or drawn with a fixed seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ln_probe
from ln_probe.analyses.probes.causal import Causal
from ln_probe.hooks.model import run
from ln_probe.hooks.text import encode, special_tokens

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("LN_PROBE_SHARED", HERE.parents[2] / "shared"))
PROMPTS = 64
HELD_OUT = 0.05  # the end of every text of which the bundled models saw the beginning (`lab.text_task.VALID_SHARE`)
TEXTS = {  # SHA-256 of the texts, as the committed tables were measured on them
    "kjv.txt": "262804ea6774be16b1e593db24f9465f0417ea0148bba2fb5a3022c26ca1e56d",
    "shakespeare_complete_gut.txt": "a74b54d1ef1dc44be145d3c93068267ab7beba0c7045a7b6a844b83ed5d7054f",
    "moby_dick.txt": "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240",
    "wikitext2/test.txt": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    "wikitext2/valid.txt": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
}
BOOKS = {
    "kjv.txt": "King James Bible",
    "shakespeare_complete_gut.txt": "Shakespeare",
    "moby_dick.txt": "Moby Dick",
}
ORDER_SEED = 0


@dataclass(frozen=True)
class Case:
    """A checkpoint, and what it is measured on."""

    model: str
    prompts: str  # one of SOURCES
    tokens: int  # of each prompt, at most
    revision: str | None = None
    single: int = 12  # prompts on which norms are taken one by one
    optimal: bool = False  # fit loss-optimal constants; bundled models bring theirs


def corpus(name: str) -> str:
    """A text that prompts are taken from.

    Raises:
        SystemExit: there is none, or another.
    """
    path = SHARED / "corpora" / name
    if not path.is_file():
        raise SystemExit(
            f"there is no {path}: put the text there (SHA-256 {TEXTS[name]}), or name the folder that holds "
            f"corpora/{name} with LN_PROBE_SHARED"
        )
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != TEXTS[name]:
        raise SystemExit(
            f"{path} is another text: SHA-256 {found}, expected {TEXTS[name]}; other prompts, other figures"
        )
    return content.decode(errors="replace")


def books(model: Any, limit: int, *, others: bool = False) -> list[list[int]]:
    """In-domain for the bundled models: from the ends of their three books, which they were not trained on.

    As they were trained: the text as it stands, line breaks and numbers of verses included, from a word's beginning.
    The books alternate, and the windows of a book are shuffled, so that any number of the first prompts is a sample of
    all three (`book_of` says of which book each is).

    Args:
        model: gives the tokenizer.
        limit: longest prompt, in tokens.
        others: not the measured prompts but others of their kind, for constants (of books those halfway between).
    """
    generator = np.random.default_rng(ORDER_SEED)
    by_book: list[list[list[int]]] = []
    for number, name in enumerate(BOOKS):
        text = corpus(name)
        held = text[int(len(text) * (1 - HELD_OUT)) :]
        count = PROMPTS // len(BOOKS) + (number < PROMPTS % len(BOOKS))
        starts = np.linspace(0, len(held) - 8 * limit, count).astype(int)
        starts = (starts[:-1] + starts[1:]) // 2 if others else starts
        windows = (re.sub(r"^\S*\s+", "", held[s : s + 8 * limit]) for s in generator.permutation(starts))
        by_book.append([encode(model, window)[:limit].tolist() for window in windows])
    return [row for rows in zip_longest(*by_book) for row in rows if row is not None]


def book_of(prompt: int) -> str:
    """Return the title of the book that the prompt of this number is from, in the order of `books`."""
    return list(BOOKS.values())[prompt % len(BOOKS)]


def wikitext(model: Any, limit: int, *, others: bool = False) -> list[list[int]]:
    """Passages of wikitext-2's test part: whole sentences in a row without an unknown word, 80 words or more.

    Of each paragraph the longest run of such sentences; without the corpus's own marks and spaces; evenly spread.
    Arguments as of `books`; the others are of the validation part.
    """
    text = corpus("wikitext2/valid.txt" if others else "wikitext2/test.txt")
    runs = [_known_sentences(line) for line in text.splitlines()]
    long = [run for run in runs if len(run.split()) >= 80]
    chosen = np.linspace(0, len(long) - 1, PROMPTS).astype(int)
    return [encode(model, _written(long[i]))[:limit].tolist() for i in chosen]


def _known_sentences(paragraph: str) -> str:
    runs: list[list[str]] = [[]]
    for sentence in re.split(r"(?<= [.!?]) ", paragraph.strip()):
        if "<unk>" in sentence:
            runs.append([])
        else:
            runs[-1].append(sentence)
    return max((" ".join(run) for run in runs), key=len)


def _written(tokens: str) -> str:
    """Text as people write it, of wikitext's tokens."""
    text = re.sub(r" @(.)@ ", r"\1", tokens)
    text = re.sub(r'" ([^"]*?) "', r'"\1"', text)
    text = re.sub(r" ([,.;:!?)\]'%])", r"\1", text)
    text = re.sub(r"(\d): (\d)", r"\1:\2", text)
    return re.sub(r"([(\[$£]) ", r"\1", text)


def own(model: Any, limit: int, *, others: bool = False) -> list[list[int]]:
    """Sequences of the model's own, from its first token to its end token; those of one or two tokens are left out.

    Arguments as of `books`; the others are drawn with other seeds.
    """
    seeds = range(6, 10) if others else range(2, 6)
    rows = [r for seed in seeds for r in drawn(model, limit, seed)]
    return [r.tolist() for r in rows if len(r) > 2][:PROMPTS]


def drawn(model: Any, limit: int, seed: int, count: int = 32, least: int = 512) -> list[torch.Tensor]:
    """Sequences drawn at temperature 1, up to and with an end token: `count` at a time until there are `least` tokens.

    They begin with the model's first token, or with a token drawn evenly that neither ends nor pads.
    """
    generator = torch.Generator().manual_seed(seed)
    ends, first = special_tokens(model, "eos"), special_tokens(model, "bos")
    others = {*ends, *special_tokens(model, "pad")}
    allowed = torch.tensor([i for i in range(int(model.cfg.d_vocab)) if i not in others])
    found: list[torch.Tensor] = []
    for _ in range(4):
        if first and first[0] not in ends:
            rows = torch.full((count, 1), first[0])
        else:
            rows = allowed[torch.randint(len(allowed), (count, 1), generator=generator)]
        numbers, complete = torch.arange(count), {}
        while len(rows) and rows.shape[1] < limit:
            logits = run(model, rows, return_type="logits")[:, -1].float()
            rows = torch.cat([rows, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
            ended = torch.tensor([int(row[-1]) in ends for row in rows])
            complete |= dict(zip(numbers[ended].tolist(), rows[ended], strict=True))
            numbers, rows = numbers[~ended], rows[~ended]
        complete |= dict(zip(numbers.tolist(), rows, strict=True))
        found += [complete[number] for number in range(count)]
        if sum(map(len, found)) >= min(least, count * limit):
            break
    return found


SOURCES: dict[str, Callable[..., list[list[int]]]] = {
    "books": books,
    "wikitext": wikitext,
    "own": own,
}
_LABS = ("lm-layernorm", "lm-scaling_only", "lm-projection_only", "lm-none")
CASES = {
    "capp-gpt-own": Case("capp-gpt", "own", 64, optimal=True),
    **{f"{name}-books": Case(name, "books", 128) for name in _LABS},
    **{f"{name}-wikitext": Case(name, "wikitext", 128) for name in _LABS},
    "mgm": Case("mgm", "own", 128),
    "smollm2-135m": Case("smollm2-135m", "wikitext", 32, single=0),
    # For those who have a network; what is expected of them was written down first (predictions.json).
    "gpt2": Case("gpt2", "wikitext", 128, revision="607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    # (Commits of the main branches: of the last step, 143,000.)
    "pythia-70m": Case(
        "EleutherAI/pythia-70m-deduped", "wikitext", 128, revision="e93a9faa9c77e5d09219f6c868bfc7a1bd65593c"
    ),
    "pythia-160m": Case(
        "EleutherAI/pythia-160m-deduped", "wikitext", 128, revision="582159a2dfe3e712a8d47ae83dec95ae3bde8e7e"
    ),
    "gpt2-medium": Case("gpt2-medium", "wikitext", 128, revision="6dcaa7a952f72f9298047fd5137cd6e4f05f41da"),
    "pythia-410m": Case(
        "EleutherAI/pythia-410m-deduped", "wikitext", 128, revision="c4fc8d586d62df497f1f9b69d66d3ca419992d3e"
    ),
    "pythia-1b": Case(
        "EleutherAI/pythia-1b-deduped", "wikitext", 128, revision="7199d8fc61a6d565cd1f3c62bf11525b563e13b2"
    ),
    # (A branch that is not written to: the commit of its main branch could not be looked up.)
    "pythia-1.4b": Case("EleutherAI/pythia-1.4b-deduped", "wikitext", 128, revision="step143000"),
}


def load(case: Case) -> Any:
    folders = {
        "capp-gpt": SHARED / "checkpoints" / "capp_gpt",
        "mgm": os.environ.get("LN_PROBE_MGM"),
        "smollm2-135m": os.environ.get("LN_PROBE_GGUF"),
    }
    return ln_probe.load_model(folders.get(case.model) or case.model, revision=case.revision, allow_pickle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", choices=CASES, nargs="+", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--check", action="store_true", help="compare with predictions.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        measured(name, check=args.check)


def measured(name: str, *, check: bool = False) -> None:
    """Write the tables of one case; with `check` into `checked`, loss-optimal constants and geometry included."""
    case = CASES[name]
    model = load(case)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{case.prompts}.jsonl"
        rows = SOURCES[case.prompts](model, case.tokens)
        path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
        # (The books are the default prompts of a bundled model, for which it brings loss-optimal constants.)
        given = None if case.prompts == "books" else path
        report = ln_probe.analyze(
            model, given, probes=[Causal(case.single, every_norm=True)], progress=False, optimal=check or case.optimal
        )
    # (Next to the committed tables, from which the documents take their figures.)
    out = HERE / ("checked" if check else "tables") / name
    out.mkdir(parents=True, exist_ok=True)
    # (Every norm is run, so the estimates are left out.)
    report.causal.drop(columns="estimate").to_csv(out / "causal.csv", index=False, float_format="%.6g")
    report.tables["causal_prompts"].to_csv(out / "causal_prompts.csv", index=False, float_format="%.6g")
    about = {
        key: report.provenance[key] for key in ("model", "prompts", "calibration", "constants", "loss", "versions")
    }
    about |= {"command": f"python examples/checkpoints/measure.py {name}", "notes": list(report.notes)}
    about["model"] = {k: about["model"][k] for k in ("revision", "weights_sha256")} | {"name": case.model}
    (out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    print(report.causal[report.causal["sites"].isin(["attention", "mlp", "final", "all"])].to_string())
    if check:
        import checked
        import geometry

        heads, prompts = geometry.measured(name, model)
        table = geometry.rows_of(name, heads, prompts)
        table.to_csv(out / "geometry.csv", index=False, float_format="%.6g")
        checked.check(name, report.causal, table)


if __name__ == "__main__":
    main()
