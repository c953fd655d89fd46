"""The long training behind the kept results, stage by stage, in one process that can be killed and started again.

    python -m ln_probe.analyses.lab.long_training --out DIR --text FILE…      # trains what is missing, in order
    python -m ln_probe.analyses.lab.long_training --out DIR --text FILE… --status

Each stage is a part of an experiment's grid with its seeds. Both were fixed before any of these runs was seen, and no
stage gets a seed more because of how it came out: that is the rule for adding seeds. An experiment's runs lie in
DIR/EXPERIMENT, as `ln-probe lab run EXPERIMENT --out DIR/EXPERIMENT` would have put them, and `--collect` of that
command makes tables of what is done. What was kept of earlier runs (`published/`) is not trained again.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ln_probe.analyses.lab.experiments import Request, claim, find
from ln_probe.analyses.lab.run_folder import DIVERGED_FILE, MODEL_FILE
from ln_probe.analyses.lab.runs import Run, train_all

Keys = Mapping[str, Any]
THREE, TEN = tuple(range(3)), tuple(range(10))
COUNTED = ("anbn", "anbncn")


@dataclass(frozen=True)
class Stage:
    """A part of an experiment's grid.

    Attributes:
        experiment: its name.
        seeds: that are trained.
        wanted: of a run's keys, whether it belongs here.
        minutes: of one core, measured step by step before the start (one busy core of an AMD EPYC).
        until: steps after which every run stops, ready to go on; None: to its end.
        why: what it is for.
        kept: its runs are done and in the kept results; it stays in the list to show what was fixed beforehand.
    """

    experiment: str
    seeds: tuple[int, ...]
    wanted: Callable[[Keys], bool]
    minutes: int
    why: str
    until: int | None = None
    kept: bool = False

    @property
    def span(self) -> str:
        """Its seeds in words: "0", "3-9", "3, 4, 9"."""
        first, last = self.seeds[0], self.seeds[-1]
        if self.seeds != tuple(range(first, last + 1)):
            return ", ".join(map(str, self.seeds))
        return str(first) if first == last else f"{first}-{last}"


def _counter(keys: Keys) -> bool:
    return keys["task"] in COUNTED and keys["model"] in ("lstm", "gru", "rnn_relu")


def _plain_tagger(keys: Keys) -> bool:
    return keys["task"] not in COUNTED and keys["norm"] == "none" and keys["model"] != "transformer"


def _depth(order: str, beyond: int, depths: Sequence[int]) -> Callable[[Keys], bool]:
    def wanted(keys: Keys) -> bool:
        square = keys["k"] - keys["depth"] == beyond and keys["depth"] in depths
        return bool(square and keys["norm_order"] == order and keys["positions"] == "none")

    return wanted


def _part_shrunk(keys: Keys) -> bool:
    return " for " in keys["radius"]


def _to_the_end(keys: Keys) -> bool:
    return (keys["norm"], keys["radius"]) in (
        ("layernorm", "sqrt(d)"),
        ("scaling_only", "1/sqrt(d)"),
        ("scaling_only", "sqrt(d)"),
    )


STAGES = (
    Stage(
        "counting",
        (0,),
        lambda k: _counter(k) and k["task"] == "anbn" and k["norm_site"] in ("none", "state"),
        27,
        "weights to trace the cell states of",
        kept=True,
    ),
    Stage(
        "approximation",
        THREE,
        lambda k: k["width"] == 0 and k["kernel"] in ("log", "linear"),
        72,
        "4a and 4b without an FFN, as published",
        kept=True,
    ),
    Stage("majority", TEN, _part_shrunk, 24, "scores or values alone at 1/sqrt(d)", until=5000, kept=True),
    Stage("depth", TEN[3:], _depth("post", 3, (1, 2)), 87, "scaling beyond the boundary, depths 1 and 2", kept=True),
    Stage("depth", THREE, lambda k: k["norm_order"] == "pre", 90, "pre-norm order, complete", kept=True),
    Stage("counting_budget", THREE, lambda k: k["task"] == "L5", 43, "QRNNs on L5 with ten times the updates"),
    Stage("majority", tuple(range(5)), _to_the_end, 61, "the published comparison to 17,000 steps", kept=True),
    Stage("depth", TEN[3:], _depth("post", 3, (3,)), 77, "scaling beyond the boundary, depth 3", kept=True),
    Stage("language_model_bundled", (1,), lambda k: True, 127, "a second seed of the bundled models", kept=True),
    Stage("counting", (0,), _counter, 39, "a^n b^n c^n, and norms on readout and gates: weights", kept=True),
    Stage("language_model_bundled", (2,), lambda k: True, 127, "a third seed of the bundled models", kept=True),
    Stage("depth", TEN[3:], _depth("post", 2, (1, 2, 3)), 164, "at the boundary, post-norm, ten seeds", kept=True),
    Stage("approximation", THREE, lambda k: k["kernel"] == "t5", 18, "T5's encoding", kept=True),
    Stage("majority", TEN[5:], _to_the_end, 61, "the published comparison to 17,000 steps, ten seeds", kept=True),
    Stage("counting_budget", THREE, lambda k: k["task"] == "anbnaS", 43, "QRNNs on a^n b^n a S*"),
    Stage("counting", (1, 2), _counter, 132, "weights of two more seeds", kept=True),
    Stage("depth", (3, 4, 5, 6, 9), _depth("pre", 3, (1, 2, 3)), 117, "beyond the boundary, pre-norm", kept=True),
    Stage("depth", (7, 8), _depth("pre", 3, (1, 2, 3)), 47, "beyond the boundary, pre-norm, ten seeds"),
    Stage("depth", TEN[3:], _depth("pre", 2, (1, 2, 3)), 164, "at the boundary, pre-norm, ten seeds"),
    Stage("depth_deep", THREE, lambda k: True, 98, "depths 4 to 6, rotary and ALiBi positions", kept=True),
    Stage("counting", TEN, _plain_tagger, 20, "networks without a norm to 2048 letters", kept=True),
    Stage("adaptive_memory", THREE, lambda k: True, 18, "a memory whose place depends on the input", kept=True),
    Stage("longer_inputs", THREE, lambda k: True, 3, "trained encodings on longer inputs", kept=True),
)


def stage_runs(stage: Stage, request: Request, kept: set[tuple[Any, ...]]) -> list[Run]:
    """The runs of a stage that no kept table holds."""
    module = importlib.import_module(find(stage.experiment).module)
    runs: list[Run] = module.make_runs(request)
    return [run for run in runs if stage.wanted(run.keys) and (*run.keys.values(), run.seed) not in kept]


def _kept(experiment: str) -> set[tuple[Any, ...]]:
    """Keys and seed of the depth runs whose final values are committed: only there do stages meet kept results."""
    if experiment != "depth":
        return set()
    from ln_probe.analyses.lab.depth.depth_task import KEYS
    from ln_probe.analyses.lab.keeping import table_at
    from ln_probe.analyses.lab.results import folder

    table = table_at(folder("depth"), "exact_match")
    return set(table[[*KEYS, "seed"]].drop_duplicates().itertuples(index=False, name=None))


def stages(out: Path, texts: tuple[Path, ...]) -> Iterator[tuple[Stage, list[Run]]]:
    """Every stage with its runs; those that are kept, and one whose texts are missing, are left out."""
    for stage in STAGES:
        if stage.kept:
            continue
        needs_text = find(stage.experiment).needs_text
        if needs_text and not texts:
            continue
        request = Request(out / stage.experiment, stage.seeds, texts=texts if needs_text else ())
        claim(stage.experiment, request)
        yield stage, stage_runs(stage, request, _kept(stage.experiment))


def _done(stage: Stage, run: Run) -> bool:
    from ln_probe.analyses.lab.run_folder import read_metrics

    if any((run.folder / name).exists() for name in (MODEL_FILE, DIVERGED_FILE)):
        return True
    return stage.until is not None and len(m := read_metrics(run.folder)) > 0 and int(m["step"].max()) >= stage.until


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the long training behind the kept results of the laboratory")
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs; the same one to go on")
    parser.add_argument("--text", type=Path, action="append", default=[], help="of the language models; several")
    parser.add_argument("--status", action="store_true", help="say what is done, train nothing")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    for number, (stage, runs) in enumerate(stages(args.out, tuple(args.text)), start=1):
        left = [run for run in runs if not _done(stage, run)]
        print(
            f"stage {number} of {sum(not s.kept for s in STAGES)}, {stage.experiment}, seeds {stage.span}: "
            f"{stage.why}; "
            f"{len(runs) - len(left)} of {len(runs)} runs done; all of them about {stage.minutes} min",
            flush=True,
        )
        if not args.status:
            for run in left:
                print(f"  {run.name}", flush=True)
                train_all([run], until=stage.until, progress=False)


if __name__ == "__main__":
    main()
