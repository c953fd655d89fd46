"""The experiments of the laboratory by name; `ln-probe lab list | run` is a thin shell around this file.

An experiment is a module with a function `run(request: Request) -> Results`, and a line in EXPERIMENTS.
"""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ln_probe.analyses.files import PARTIAL, write_atomically

if TYPE_CHECKING:
    from ln_probe.analyses.lab.results import Results

EXPERIMENT_FILE = "experiment.json"  # marks a folder as an experiment's


@dataclass(frozen=True)
class Experiment:
    """One entry of the registry.

    Attributes:
        module, function: what runs it.
        summary: a line for `lab list`.
        source: the publication it repeats.
        duration: with the default seeds and with `--quick`, as text; on one core unless it says otherwise.
        seeds, quick_seeds: how many by default.
        needs_text: whether the user has to give text files.
    """

    module: str
    summary: str
    source: str
    duration: tuple[str, str]
    seeds: int = 3
    quick_seeds: int = 1
    needs_text: bool = False
    function: str = "run"


@dataclass(frozen=True)
class Request:
    """What a user asked for.

    Attributes:
        out: the experiment's folder.
        seeds: seeds to run (0, 1, …).
        quick: the size that takes minutes instead of the published one.
        texts, tokenizer: text files, and a tokenizer's folder, for experiments on text.
        jobs: processes that train side by side.
        collect: train nothing: make tables of what runs have reached so far.
        progress: show progress bars.
        device: to train on; measurements are made on the CPU.
    """

    out: Path
    seeds: tuple[int, ...]
    quick: bool = False
    texts: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    jobs: int = 1
    collect: bool = False
    progress: bool = True
    device: str = "cpu"


EXPERIMENTS = {
    "majority": Experiment(
        "ln_probe.analyses.lab.majority.majority",
        "majority of a bag of tokens: {layernorm, scaling_only} x {radius sqrt(d), 1/sqrt(d)}, and no scaling",
        "Brody, Alon & Yahav 2023, section 4.1",
        seeds=10,
        quick_seeds=2,
        duration=("3 hours", "1 minute"),
    ),
    "majority_in_space": Experiment(
        "ln_probe.analyses.lab.majority.majority_in_space",
        "majority in 3 dimensions: keys and queries before and after each term, as points to look at from all sides",
        "Brody, Alon & Yahav 2023, figures 1a and 1b",
        seeds=5,
        duration=("15 minutes", "1 minute"),
    ),
    "random_keys": Experiment(
        "ln_probe.analyses.lab.majority.random_keys",
        "heat maps of unselectable random keys: n x d, with and without LayerNorm, and as one head sees them",
        "Brody, Alon & Yahav 2023, figures 1c and 1d",
        quick_seeds=2,
        duration=("5 minutes", "1 minute"),
    ),
    "language_model": Experiment(
        "ln_probe.analyses.lab.language_model.published_language_model",
        "unselectable keys of language models trained with and without scaling, at a size a CPU trains",
        "Brody, Alon & Yahav 2023, section 4.2",
        quick_seeds=2,
        duration=("20 minutes", "2 minutes"),
        needs_text=True,
    ),
    "encoder": Experiment(
        "ln_probe.analyses.lab.language_model.encoder",
        "encoders of BERT's shape on masked text, without scaling and without projection: loss and unselectable keys",
        "Brody, Alon & Yahav 2023, section 4.2, with encoders",
        duration=("about 25 minutes (24 runs of 1 minute)", "2 minutes"),
        needs_text=True,
    ),
    "encoder_passages": Experiment(
        "ln_probe.analyses.lab.language_model.encoder_passages",
        "these encoders fine-tuned to tell which of the texts a passage is from: what leaving out a term costs",
        "Brody, Alon & Yahav 2023, in place of SST-2",
        duration=("about 25 minutes (18 encoders of 1 minute, each fine-tuned in 15 seconds)", "2 minutes"),
        needs_text=True,
    ),
    "language_model_full": Experiment(
        "ln_probe.analyses.lab.language_model.published_language_model",
        "the same with GPT-2's vocabulary and windows of 1024 (--tokenizer: GPT-2's)",
        "Brody, Alon & Yahav 2023, section 4.2",
        seeds=1,
        duration=("90 minutes", "3 minutes"),
        needs_text=True,
        function="run_full",
    ),
    "language_model_bundled": Experiment(
        "ln_probe.analyses.lab.language_model.bundled_seeds",
        "the models that ship with ln_probe, with more seeds: held-out loss and unselectable keys",
        "the shape and schedule of the bundled models",
        duration=("about 4 hours (8 runs of half an hour)", "2 minutes"),
        needs_text=True,
    ),
    "fresh_seeds": Experiment(
        "ln_probe.analyses.lab.language_model.fresh_seeds",
        "pre-registered 2 x 2 over seeds 10 to 19: scaling and projection before attention, loss and unselectable keys",
        "the shape and schedule of the bundled models, smaller",
        seeds=10,
        duration=("about 40 minutes (40 runs of 1 minute)", "2 minutes"),
        needs_text=True,
    ),
    "fresh_seeds_long": Experiment(
        "ln_probe.analyses.lab.language_model.fresh_seeds",
        "the same over seeds 20 to 29, trained as long as the bundled models",
        "the shape and schedule of the bundled models, smaller",
        seeds=10,
        duration=("about 10 minutes of a GPU with --jobs 12 --device cuda (40 runs)", "2 minutes"),
        needs_text=True,
        function="run_long",
    ),
    "depth": Experiment(
        "ln_probe.analyses.lab.crasp.depth",
        "which L_k (k alternating blocks) each depth learns, under four norms, and the theory's prediction",
        "Yang, Cadilhac & Chiang 2025, Knee-Deep in C-RASP",
        duration=("about 2 hours with --jobs 2 (156 runs of 30-100 seconds)", "2 minutes"),
    ),
    "depth_deep": Experiment(
        "ln_probe.analyses.lab.crasp.depth",
        "depths 4 to 10 on L6 to L12, without positions and with rotary and ALiBi",
        "Yang, Cadilhac & Chiang 2025, Knee-Deep in C-RASP",
        duration=("about 2.5 hours (45 runs of 2-5 minutes)", "2 minutes"),
        function="run_deep",
    ),
    "approximation": Experiment(
        "ln_probe.analyses.lab.approximation.approximation",
        "relative attention on sums of inputs: trained error and the least-squares optimum, with a norm and without",
        "Wang & E 2024, section 6",
        duration=("about 50 minutes with --jobs 2 (402 runs of 15 seconds)", "2 minutes"),
    ),
    "approximation_text": Experiment(
        "ln_probe.analyses.lab.approximation.approximation_text",
        "layers against heads, and attention with the dot product or without, on text",
        "Wang & E 2024, section 6 (1a and 3b)",
        duration=("15 minutes (54 runs of 5-40 seconds)", "1 minute"),
        needs_text=True,
    ),
    "longer_inputs": Experiment(
        "ln_probe.analyses.lab.approximation.longer_inputs",
        "logarithmic, linear and T5 positions fitted to 1000 inputs and put on up to 8000, trained and least squares",
        "Wang & E 2024, section 6 (4a and 4b)",
        duration=("2 minutes (36 runs of 3 seconds)", "20 seconds"),
    ),
    "adaptive_memory": Experiment(
        "ln_probe.analyses.lab.approximation.adaptive_memory",
        "a memory whose place the last input chooses: heads, FFN and dot product, and the least possible error",
        "Wang & E 2024, adaptive memory (no experiment of it alone)",
        duration=("10 minutes (36 runs of 15 seconds)", "1 minute"),
    ),
    "compiler": Experiment(
        "ln_probe.analyses.lab.crasp.compiler",
        "C-RASP programs as transformer weights against the interpreter, and which operations need a norm",
        "Yang, Cadilhac & Chiang 2025, Knee-Deep in C-RASP; Yang & Chiang 2024, Counting Like Transformers",
        seeds=1,
        duration=("20 minutes", "2 minutes"),
    ),
    "counting": Experiment(
        "ln_probe.analyses.lab.counting.counting",
        "LSTM, GRU, RNNs, QRNNs and a transformer on counter languages, with each LayerNorm term inside the cell",
        "Merrill et al. 2020; Weiss, Goldberg & Yahav 2018",
        duration=("about 80 minutes with --jobs 2 (189 runs, 15 s to 4 min)", "2 minutes"),
    ),
    "counting_traces": Experiment(
        "ln_probe.analyses.lab.counting.counting_traces",
        "cell states over a^n b^n (c^n): the dimension that counts, and where a norm in the cell ends the count",
        "Weiss, Goldberg & Yahav 2018",
        duration=("about 90 minutes (45 runs of 1-5 minutes)", "1 minute"),
    ),
    "counters": Experiment(
        "ln_probe.analyses.lab.counting.counters",
        "counters by hand in float32: LSTM, ReLU-RNN and GRU on a^n b^n, and what each norm does to them (no training)",
        "Weiss, Goldberg & Yahav 2018, section 3",
        seeds=1,
        duration=("4 minutes", "30 seconds"),
    ),
    "remove_norm": Experiment(
        "ln_probe.analyses.lab.language_model.remove_norm",
        "the bundled lm-layernorm fine-tuned while its norms become constants, and the same with its norms kept",
        "Heimersheim 2024; Baroni et al. 2025",
        duration=("about 30 minutes (6 runs of 5 minutes)", "1 minute"),
        needs_text=True,
    ),
    "saturated_states": Experiment(
        "ln_probe.analyses.lab.counting.saturated_states",
        "distinct states of saturated cells over length: LSTM and ifo-pooling grow, the others do not (no training)",
        "Merrill et al. 2020, sections 2 and 3",
        seeds=5,
        duration=("10 minutes", "10 seconds"),
    ),
    "rational_recurrence": Experiment(
        "ln_probe.analyses.lab.counting.rational_recurrence",
        "QRNNs as weighted automata, and how many states an automaton for each saturated cell needs (no training)",
        "Merrill et al. 2020",
        seeds=5,
        duration=("3 minutes", "15 seconds"),
    ),
    "counting_budget": Experiment(
        "ln_probe.analyses.lab.counting.qrnn_budget",
        "single-layer QRNNs with ten times the updates: what they reach where they were trained, and beyond",
        "Merrill et al. 2020, section 5",
        duration=("about 2.5 hours (24 runs of 6 minutes)", "1 minute"),
    ),
    "sentences": Experiment(
        "ln_probe.analyses.lab.language_model.sentences",
        "a decoder without scaling and an encoder without norms, read on sentences: unselectable keys",
        "Brody, Alon & Yahav 2023, tables 3 and 4",
        duration=("about 5 minutes (12 runs of 15 to 20 seconds)", "2 minutes"),
        needs_text=True,
    ),
    "anbk": Experiment(
        "ln_probe.analyses.lab.counting.anbk",
        "an LSTM that tags a^n b^2n by an absolute value or a threshold of its count, tested on longer words",
        "code released with Merrill et al. 2020",
        duration=("about 10 minutes (12 runs)", "1 minute"),
    ),
}


class UnknownExperimentError(KeyError):
    def __str__(self) -> str:
        return str(self.args[0])


def find(name: str) -> Experiment:
    """The experiment called `name`.

    Raises:
        UnknownExperimentError: there is none (lists those there are).
    """
    if name not in EXPERIMENTS:
        raise UnknownExperimentError(f"unknown experiment {name!r}: known ones are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def run(name: str, request: Request, *, command: str, ln_probe_version: str) -> Results:
    """Run an experiment, or go on with it, and write what it found into `request.out`.

    Raises:
        UnknownExperimentError: no such experiment.
        FileExistsError: `request.out` holds something else.
        ValueError: no seeds; text files missing where they are needed, or given where they are not.
    """
    experiment = find(name)
    if not request.seeds:
        raise ValueError("no seeds: at least 1 is needed")
    if experiment.needs_text and not request.texts:
        raise ValueError(f"{name} trains on text that you give: add --text FILE (UTF-8), several if you like")
    if not experiment.needs_text and (given := [*request.texts, *([request.tokenizer] if request.tokenizer else [])]):
        raise ValueError(f"{name} takes no text and no tokenizer: leave out {given[0]}")
    claim(name, request)
    began = time.perf_counter()
    from ln_probe.analyses.lab.results import write_results

    results: Results = getattr(importlib.import_module(experiment.module), experiment.function)(request)
    write_results(
        results,
        request.out,
        experiment=name,
        command=command,
        ln_probe_version=ln_probe_version,
        seconds=time.perf_counter() - began,
    )
    return results


def claim(name: str, request: Request) -> None:
    """Make `request.out` this experiment's folder.

    Raises:
        FileExistsError: it holds something else.
    """
    path = request.out / EXPERIMENT_FILE
    wanted = {"experiment": name, "quick": request.quick}
    if path.exists():
        existing = json.loads(path.read_text(encoding="utf-8"))
        if existing != wanted:
            raise FileExistsError(f"{request.out} holds another experiment ({existing}): choose another --out")
        return
    if request.out.exists() and not request.out.is_dir():
        raise FileExistsError(f"{request.out} is a file: choose another --out")
    if request.out.exists() and any(p.suffix != PARTIAL for p in request.out.iterdir()):
        raise FileExistsError(f"{request.out} is not empty and holds no experiment: choose another --out")
    write_atomically(path, (json.dumps(wanted) + "\n").encode())
