"""The experiments of the laboratory by name; `ln-probe lab list | run` is a thin shell around this file.

An experiment is a module with a function `run(request: Request) -> Results`, and a line in EXPERIMENTS.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_probe.analyses.text import PARTIAL, write_atomically

if TYPE_CHECKING:
    from ln_probe.analyses.lab.results import Results

EXPERIMENT_FILE = "experiment.json"  # marks a folder as an experiment's


@dataclass(frozen=True)
class Experiment:
    """One entry of the registry.

    Attributes:
        path: module and function below this package that run it: `function(request) -> Results`.
        summary: a line for `lab list`. source: the publication it repeats.
        duration: with the default seeds and with `--quick`, as text; on one core unless it says otherwise.
        seeds, quick_seeds: how many by default.
        needs_text: whether the user has to give text files.
    """

    path: str
    source: str
    duration: tuple[str, str]
    seeds: int = 3
    quick_seeds: int = 1
    needs_text: bool = False
    summary: str = ""


@dataclass(frozen=True)
class Request:
    """What a user asked for.

    Attributes:
        out: the experiment's folder.
        seeds: seeds to run (0, 1, …).
        quick: the size that takes minutes instead of the published one.
        texts, tokenizer: text files, and a tokenizer's folder, for experiments on text.
        jobs: processes that train side by side.
        progress: show progress bars.
        device: to train on; measurements are made on the CPU.
    """

    out: Path
    seeds: tuple[int, ...]
    quick: bool = False
    texts: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    jobs: int = 1
    progress: bool = True
    device: str = "cpu"


BRODY, WANG, YANG = "Brody, Alon & Yahav 2023", "Wang & E 2024, section 6", "Yang, Cadilhac & Chiang 2025"
EXPERIMENTS = {
    "majority": Experiment(
        "majority.majority.run", f"{BRODY}, section 4.1", ("3 hours", "1 minute"), seeds=10,
        summary="majority of a bag of tokens: {layernorm, scaling_only} x {radius sqrt(d), 1/sqrt(d)}, and no scaling"),
    "random_keys": Experiment(
        "majority.random_keys.run", f"{BRODY}, figures 1c and 1d", ("5 minutes", "1 minute"), quick_seeds=2,
        summary="heat maps of unselectable random keys: n x d, with and without LayerNorm, and as one head sees them"),
    "language_model": Experiment(
        "language_model.published.run", f"{BRODY}, section 4.2",
        ("20 minutes", "2 minutes"), quick_seeds=2, needs_text=True,
        summary="unselectable keys of language models trained with and without scaling, at a size a CPU trains"),
    "encoder": Experiment(
        "language_model.encoder.run", f"{BRODY}, section 4.2, with encoders",
        ("about 25 minutes (24 runs of 1 minute)", "2 minutes"), needs_text=True,
        summary="encoders of BERT's shape on masked text, without scaling, without projection"),
    "language_model_full": Experiment(
        "language_model.published.run_full", f"{BRODY}, section 4.2",
        ("90 minutes", "3 minutes"), seeds=1, needs_text=True,
        summary="the same with GPT-2's vocabulary and windows of 1024 (--tokenizer: GPT-2's)"),
    "language_model_bundled": Experiment(
        "language_model.two_by_two.run", "the shape and schedule of the bundled models",
        ("about 4 hours (8 runs of half an hour)", "2 minutes"), needs_text=True,
        summary="the models that ship with ln_probe, with more seeds: held-out loss and unselectable keys"),
    "fresh_seeds": Experiment(
        "language_model.two_by_two.run_fresh", "the shape and schedule of the bundled models, smaller",
        ("about 40 minutes (40 runs of 1 minute)", "2 minutes"), seeds=10, needs_text=True,
        summary="pre-registered 2 x 2 over seeds 10 to 19: scaling and projection before attention"),
    "fresh_seeds_long": Experiment(
        "language_model.two_by_two.run_long", "the shape and schedule of the bundled models, smaller",
        ("about 10 minutes of a GPU with --jobs 12 --device cuda (40 runs)", "2 minutes"), seeds=10, needs_text=True,
        summary="the same over seeds 20 to 29, trained as long as the bundled models"),
    "depth": Experiment(
        "crasp.depth.run", f"{YANG}, Knee-Deep in C-RASP",
        ("about 2 hours with --jobs 2 (156 runs of 30-100 seconds)", "2 minutes"),
        summary="which L_k (k alternating blocks) each depth learns, under four norms, and the theory's prediction"),
    "depth_deep": Experiment(
        "crasp.depth.run_deep", f"{YANG}, Knee-Deep in C-RASP",
        ("about 2.5 hours (45 runs of 2-5 minutes)", "2 minutes"),
        summary="depths 4 to 10 on L6 to L12, without positions and with rotary and ALiBi"),
    "approximation": Experiment(
        "approximation.approximation.run", WANG,
        ("about 50 minutes with --jobs 2 (402 runs of 15 seconds)", "2 minutes"),
        summary="relative attention on sums of inputs: trained and least-squares errors, with a norm and without"),
    "approximation_text": Experiment(
        "approximation.text_models.run", f"{WANG} (1a and 3b)",
        ("15 minutes (54 runs of 5-40 seconds)", "1 minute"), needs_text=True,
        summary="layers against heads, and attention with the dot product or without, on text"),
    "longer_inputs": Experiment(
        "approximation.approximation.run_longer", f"{WANG} (4a and 4b)",
        ("2 minutes (36 runs of 3 seconds)", "20 seconds"),
        summary="logarithmic, linear and T5 positions fitted to 1000 inputs and put on up to 8000"),
    "adaptive_memory": Experiment(
        "approximation.approximation.run_adaptive", "Wang & E 2024, adaptive memory (no experiment of it alone)",
        ("10 minutes (36 runs of 15 seconds)", "1 minute"),
        summary="a memory whose place the last input chooses: heads, FFN and dot product"),
    "compiler": Experiment(
        "crasp.compiler.run", f"{YANG}, Knee-Deep in C-RASP; Yang & Chiang 2024, Counting Like Transformers",
        ("20 minutes", "2 minutes"), seeds=1,
        summary="C-RASP programs as transformer weights against the interpreter, and which operations need a norm"),
    "counting": Experiment(
        "counting.counting.run", "Merrill et al. 2020; Weiss, Goldberg & Yahav 2018",
        ("about 80 minutes with --jobs 2 (189 runs, 15 s to 4 min)", "2 minutes"),
        summary="LSTM, GRU, RNNs, QRNNs and a transformer on counter languages, with LayerNorm terms in the cell"),
    "counting_traces": Experiment(
        "counting.traces.run", "Weiss, Goldberg & Yahav 2018",
        ("about 90 minutes (45 runs of 1-5 minutes)", "1 minute"),
        summary="cell states over a^n b^n (c^n): the dimension that counts, with a norm in the cell"),
    "counters": Experiment(
        "counting.counters.run", "Weiss, Goldberg & Yahav 2018, section 3", ("4 minutes", "30 seconds"), seeds=1,
        summary="counters by hand in float32: LSTM, ReLU-RNN and GRU on a^n b^n, with each norm (no training)"),
    "remove_norm": Experiment(
        "language_model.remove_norm.run", "Heimersheim 2024; Baroni et al. 2025",
        ("about 30 minutes (6 runs of 5 minutes)", "1 minute"), needs_text=True,
        summary="the bundled lm-layernorm fine-tuned while its norms become constants"),
    "saturated_states": Experiment(
        "counting.saturated_states.run", "Merrill et al. 2020, sections 2 and 3",
        ("10 minutes", "10 seconds"), seeds=5,
        summary="distinct states of saturated cells over length (no training)"),
    "rational_recurrence": Experiment(
        "counting.rational_recurrence.run", "Merrill et al. 2020", ("3 minutes", "15 seconds"), seeds=5,
        summary="QRNNs as weighted automata, and how many states an automaton for a cell needs (no training)"),
    "anbk": Experiment(
        "counting.counting.run_anbk", "code released with Merrill et al. 2020",
        ("about 10 minutes (12 runs)", "1 minute"),
        summary="an LSTM that tags a^n b^2n by an absolute value or a threshold of its count, tested on longer words"),
}  # fmt: skip


def run(name: str, request: Request, *, command: str, ln_probe_version: str) -> Results:
    """Run an experiment, or go on with it, and write its tables into `request.out`.

    Raises:
        KeyError: no such experiment.
        FileExistsError: `request.out` holds something else.
        ValueError: no seeds; text files missing where they are needed, or given where they are not.
    """
    experiment = EXPERIMENTS[name]
    if not request.seeds:
        raise ValueError("no seeds: at least 1 is needed")
    if experiment.needs_text and not request.texts:
        raise ValueError(f"{name} trains on text that you give: add --text FILE (UTF-8), several if you like")
    if not experiment.needs_text and (given := [*request.texts, *([request.tokenizer] if request.tokenizer else [])]):
        raise ValueError(f"{name} takes no text and no tokenizer: leave out {given[0]}")
    claim(request.out, EXPERIMENT_FILE, {"experiment": name, "quick": request.quick}, "experiment")
    began = time.perf_counter()
    from ln_probe.analyses.lab.results import write_results

    module, _, function = experiment.path.rpartition(".")
    results: Results = getattr(importlib.import_module(f"{__package__}.{module}"), function)(request)
    write_results(
        results, request.out, experiment=name, command=command, ln_probe_version=ln_probe_version,
        seconds=time.perf_counter() - began,
    )  # fmt: skip
    return results


def claim(folder: Path, mark: str, identity: Mapping[str, Any], what: str) -> None:
    """Make a folder that of the experiment or run that its file `mark` identifies.

    Raises:
        FileExistsError: it holds something else.
    """
    wanted, path = json.loads(json.dumps(identity)), folder / mark  # as a file would hold it
    if path.exists():
        existing = json.loads(path.read_text(encoding="utf-8"))
        if wrong := sorted(k for k in {*wanted, *existing} if existing.get(k) != wanted.get(k)):
            different = ", ".join(wrong)
            raise FileExistsError(f"{folder} holds another {what} (not the same: {different}): choose another folder")
        return
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: choose another folder")
    if folder.exists() and any(p.suffix != PARTIAL for p in folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty and holds no {what}: choose another folder")
    write_atomically(path, (json.dumps(wanted, indent=1) + "\n").encode())
