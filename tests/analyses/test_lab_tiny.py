"""Experiments from end to end at a tiny size: what they report, measured again from the saved weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lab_models import is_interior, ran, write_words
from safetensors.torch import load_file
from scipy import stats

from ln_probe.analyses.lab import runs as laboratory
from ln_probe.analyses.lab import text_task
from ln_probe.analyses.lab.approximation import approximation, relative, text_models
from ln_probe.analyses.lab.counting import counting, tasks, traces
from ln_probe.analyses.lab.crasp import depth
from ln_probe.analyses.lab.experiments import EXPERIMENTS, Request
from ln_probe.analyses.lab.language_model import encoder, published, remove_norm, two_by_two
from ln_probe.analyses.lab.majority import majority
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.results import Results
from ln_probe.analyses.lab.runs import Run
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import TrainConfig, load_run, read_metrics, step_generator, train
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.hooks.edits import without

SEEDS = (0, 1)
SCHEDULE = {"steps": 3, "batch": 4, "warmup": 1, "evaluate_at": (), "save_at": (0,)}
WORDS = ("the lamp", "was lit", "and the ships", "came home", "before the ice.", "Again", "no one", "spoke;", "it was")
Tiny = Callable[..., tuple[Results, list[Run]]]


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("books")
    one = write_words(out / "one.txt", WORDS, 3000)
    return one, write_words(out / "other.txt", ("the sea.", "a whale", "sank", "under it"), 3000)


@pytest.fixture
def tiny(tmp_path: Path, books: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Run an experiment with another schedule, only the cells to keep, and other constants of its module."""

    def run(
        experiment: str,
        home: Any,
        *,
        keep: Callable[[dict[str, Any]], bool] = lambda keys: True,
        schedule: dict[str, Any] | None = None,
        request: dict[str, Any] | None = None,
        seeds: tuple[int, ...] = SEEDS,
        **constants: Any,
    ) -> tuple[Results, list[Run]]:
        runs: list[Run] = []

        def shrunk(*args: Any, **parts: Any) -> list[Run]:
            planned = [run for run in laboratory.planned(*args, **parts) if keep(dict(run.keys))]
            changed = SCHEDULE | (schedule or {})
            changed = {"evaluate_every": changed["steps"]} | changed
            runs.extend(replace(one, training=replace(one.training, **changed)) for one in planned)
            return list(runs)

        for name, value in {"planned": shrunk, **constants}.items():
            monkeypatch.setattr(home, name, value)
        texts = {"texts": books} if EXPERIMENTS[experiment].needs_text else {}
        results = ran(experiment, tmp_path / "out", seeds, **texts | (request or {}))
        assert_written(results, tmp_path / "out")
        assert all(read_metrics(run.folder)["seconds"].between(0, 600).all() for run in runs if run.finished)
        return results, runs

    return run


def assert_written(results: Results, out: Path) -> None:
    """Every table and figure is in the folder, as the results have it; the summary and short tables as CSV."""
    about = json.loads((out / "results.json").read_text())
    names = {"summary": "csv"} | {n: "parquet" if len(t) > 1000 else "csv" for n, t in results.tables.items()}
    assert sorted(about["tables"]) == sorted(f"{n}.{'csv' if n == 'summary' else end}" for n, end in names.items())
    assert about["diverged"] == list(results.diverged)
    assert 0 <= about["seconds"] < 600
    for name in about["tables"]:
        table = results.tables[name.partition(".")[0]]
        written = pd.read_csv(out / name) if name.endswith(".csv") else pd.read_parquet(out / name)
        assert list(written) == list(table)
        assert len(written) == len(table)
        numbers = table.select_dtypes("float")
        np.testing.assert_allclose(written[list(numbers)].to_numpy(float), numbers.to_numpy(), rtol=1e-11)
    assert about["figures"] == [f"{name}.png" for name in results.figures]
    for name in about["figures"]:
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def trained(run: Run, step: int | None = None) -> Any:
    """The model of a run, from its file alone."""
    model = run.spec.build()
    name = "model" if step is None else f"checkpoints/step-{step:07d}"
    model.load_state_dict(load_file(run.folder / f"{name}.safetensors"))
    return model.eval()


def assert_reported(table: pd.DataFrame, runs: Sequence[Run], measured: Callable[[Run], dict[str, float]]) -> None:
    """The last values of every run, and no others, are those measured."""
    last = table[table["step"] == table["step"].max()]
    count = 0
    for run in runs:
        rows = last[last["seed"] == run.seed]
        for key, value in run.keys.items():
            rows = rows[rows[key] == value]
        expected = measured(run)
        reported = rows.set_index("measure")["value"]
        for measure, value in expected.items():
            assert float(reported[measure]) == pytest.approx(value, rel=2e-4, abs=1e-7), (run.name, measure)
        count += len(expected)
    assert len(last[last["measure"].isin(expected)]) == count


def held_out(text: TextTask, count: int) -> torch.Tensor:
    """Windows that begin with the boundary, spread evenly over the held-out tokens."""
    begins = torch.linspace(0, len(text.valid_tokens) - text.n_ctx, count).long().tolist()
    rows = [[text.boundary, *text.valid_tokens[at : at + text.n_ctx - 1].tolist()] for at in begins]
    return torch.tensor(rows)


@torch.no_grad()
def next_token_loss(model: Any, windows: torch.Tensor) -> float:
    chances = model(windows).double().log_softmax(-1)
    lost = [-float(chances[i, t, windows[i, t + 1]]) for i, t in np.ndindex(len(windows), windows.shape[1] - 1)]
    return float(np.mean(lost))


def interior_share(keys: torch.Tensor) -> float:
    """The share of keys [set key d] inside the hull of the others of their set."""
    sets = keys.detach().double().numpy()
    return float(np.mean([is_interior(one, i) for one in sets for i in range(len(one))]))


@torch.no_grad()
def by_flips(model: Any, length: int) -> tuple[float, np.ndarray]:
    """An affine model's constant, and its weight of each input from the first on: each is flipped alone."""
    base, flipped = -torch.ones(1, length).double(), (2 * torch.eye(length) - 1).double()
    weights = ((model.double()(flipped) - model(base)) / 2).numpy()
    return float(model(base)) + weights.sum(), weights


SMALL_BAGS = majority.MajoritySize(classes=6, length=12, margin=2, examples=300)
SMALL_TEXT = published.Size(d_vocab=280, n_ctx=16, batch=2, steps=4, valid_windows=5, sentences=0, measured_at=(0,))
DEPTH = {"TRAIN_LENGTHS": (6, 8), "BINS": ((6, 8), (9, 10), (11, 12))}


@pytest.mark.parametrize(("experiment", "home", "options"), [
    ("majority", majority, {"SIZES": {8: SMALL_BAGS, 3: SMALL_BAGS}, "STEPS_SHOWN": (1, 3),
                            "schedule": {"evaluate_at": (1,), "batch": 20}, "request": {"quick": False}}),
    ("language_model", published, {"TINY": SMALL_TEXT, "schedule": {"steps": 4}}),
    ("approximation", approximation, {"EVALUATION_INPUTS": 64}),
    ("adaptive_memory", approximation, {"EVALUATION_INPUTS": 64}),
    ("depth", depth, {**DEPTH, "keep": lambda keys: keys["norm"] == "layernorm" and keys["k"] < 5}),
    ("depth_deep", depth, {**DEPTH, "keep": lambda keys: keys["depth"] == 4}),
])  # fmt: skip
def test_results_are_shaped_as_the_committed_ones(
    experiment: str, home: Any, options: dict[str, Any], tiny: Tiny
) -> None:
    results, runs = tiny(experiment, home, **options)
    where = Path(laboratory.__file__).parent / "published" / experiment
    settings = json.loads((where / "results.json").read_text())["settings"]
    assert {*results.settings} <= {*settings}
    assert {file.stem for file in where.iterdir() if file.suffix in (".csv", ".parquet")} <= {*results.tables}
    values = [table["value"] for table in results.tables.values() if "value" in table]
    assert values
    assert all(np.isfinite(each).all() for each in values)
    assert (results.summary["seeds"] == len(SEEDS)).all()
    assert [run.finished for run in runs] == [True] * len(runs)


def test_longer_inputs(tiny: Tiny) -> None:
    results, runs = tiny("longer_inputs", approximation, LENGTHS=(1000, 1250))
    errors = results.tables["errors"].set_index(["target", "kernel", "heads", "seed", "length", "measure"])["value"]
    assert len(errors) == len(runs) * 2 * 2
    for run in runs:
        model = replace(run.spec, length=1250).build()  # type: ignore[type-var]
        model.load_state_dict({k: v for k, v in trained(run).state_dict().items() if k != "phi"}, strict=False)
        constant, slopes = by_flips(model, 1250)
        weights = relative.lag_weights(str(run.keys["target"]), 1250)
        mse = constant**2 + ((slopes[::-1] - weights) ** 2).sum()
        place = (*run.keys.values(), run.seed, 1250)
        assert errors[(*place, "mse")] == pytest.approx(mse, rel=1e-3)
        assert errors[(*place, "relative_mse")] == pytest.approx(mse / (weights**2).sum(), rel=1e-3)


def test_approximation_text(tiny: Tiny) -> None:
    results, runs = tiny("approximation_text", text_models, D_VOCAB=280, N_CTX=16)
    windows = held_out(runs[0].task, 64)  # type: ignore[arg-type]
    assert len(runs) == 5 * len(SEEDS)
    assert_reported(results.tables["losses"], runs, lambda run: {"valid_loss": next_token_loss(trained(run), windows)})
    assert results.settings["training"]["seed"] == SEEDS[0]
    one = laboratory.curves(runs[:1])
    assert {*runs[0].keys.items(), ("seed", 0), ("step", 3)} <= {*one.iloc[0].items()}


def tagging(run: Run) -> dict[str, float]:
    """Accuracies of a tagger by the words of each length; of a network that predicts, how far it counts."""
    model = trained(run)
    if run.keys["task"] != "L5":
        return tasks.counted(model, 2, 3 * 9)
    shares = {}
    for n in tasks.TEST_LENGTHS:
        words, _ = tasks.sample_prefixes("L5", n, -(-90 // n), step_generator(10_000, n))
        answers = model(words).argmax(-1).tolist()
        right = [
            said == (abs(2 * sum(word[: t + 1]) - t - 1) < 5)
            for word, row in zip(words.tolist(), answers, strict=True)
            for t, said in enumerate(row)
        ]
        shares[f"accuracy_{n}"] = float(np.mean(right))
    return shares


SMALL_WORDS = {
    "TRAIN_LENGTH": 8, "TEST_LENGTHS": (8, 16), "PUBLISHED_LENGTHS": (8, 16, 32, 48, 64, 80), "EVALUATION_LABELS": 90,
    "QUICK_TRAINED_N": 9,
}  # fmt: skip


@pytest.fixture
def small_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL_WORDS.items():
        monkeypatch.setattr(tasks, name, value)


@pytest.mark.usefixtures("small_words")
def test_counting(tiny: Tiny) -> None:
    results, runs = tiny("counting", counting)
    assert len(runs) == 8 * len(SEEDS)
    for group in (True, False):
        part = [run for run in runs if (run.keys["task"] == "L5") == group]
        values = results.tables["values"]
        assert_reported(values[(values["task"] == "L5") == group], part, tagging)
    assert {"lengths", "norms_over_lengths", "exact"} == {*results.figures}


@pytest.mark.usefixtures("small_words")
def test_counting_traces(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """States by torch's kernels on every prefix; lines through phases by scipy."""
    results, runs = tiny("counting_traces", counting, schedule={"steps": 20, "evaluate_every": 10})
    networks, table = results.tables["networks"], results.tables["traces"]
    assert len(networks) == len(runs) == 3 * len(SEEDS)
    for run, row in zip(runs, networks.to_dict("records"), strict=True):
        assert {**run.keys, "seed": run.seed, "phase": "b"}.items() <= row.items()
        ends = ["exact_from", "exact_to", "accepted_to"]
        assert [row[k] for k in ends] == read_metrics(run.folder).iloc[-1][ends].tolist()
        own = table[(table["model"] == run.keys["model"]) & (table["norm"] == run.keys["norm"])]
        values = own[own["seed"] == run.seed].set_index("n")["value"]
        assert [len(values[n]) for n in (9, 27)] == [18, 54]
        if run.keys["norm"] == "none":
            model = trained(run).double()
            for n in (9, 27):
                word = model.embed(torch.tensor([[3] + [1] * n + [2] * n]))
                kernel = model.layers[0].weights
                with torch.no_grad():
                    ends = [kernel(word[:, : t + 2])[1] for t in range(2 * n)]
                states = [float((end[1] if isinstance(end, tuple) else end)[0, 0, row["dimension"]]) for end in ends]
                np.testing.assert_allclose(values[n], states, atol=1e-9)
        for name, phase in (("before", 0), ("in", 1)):
            x, y = np.arange(6, 10), values[9].to_numpy()[9 * phase + 5 : 9 * phase + 9]
            line = stats.linregress(x, y)
            off = np.abs(y - line.intercept - line.slope * x).max() / abs(line.slope)
            assert row[f"slope_{name}"] == pytest.approx(line.slope, rel=1e-6)
            assert row[f"r2_{name}"] == pytest.approx(line.rvalue**2, rel=1e-6)
            assert row[f"off_{name}"] == pytest.approx(off, rel=1e-6)
        assert row["counts"] == (row["dimensions_counting"] > 0 and max(row["off_before"], row["off_in"]) <= 0.5)
    # One dimension of two that counts, and what was reached last.
    ends = pd.DataFrame([(1, 2, 3), (4, 5, 6)], columns=["exact_from", "exact_to", "accepted_to"])
    monkeypatch.setattr(traces, "read_metrics", lambda folder: ends)
    monkeypatch.setattr(traces, "phases", lambda model, letters, n: np.outer([1, -1], range(n))[..., None] * [0, 1])
    (row,) = traces.followed(runs[0])[0].to_dict("records")
    found = [row[name] for name in ("dimension", "before", *traces.MEASURES)]
    assert found == pytest.approx([1, "a", 1, 1, -1, 1, 1, 4, 5, 6, 0, 0, 1])


TEXT = published.Size(d_vocab=280, n_ctx=16, batch=2, steps=4, valid_windows=5, sentences=2, measured_at=(0, 0.5))


def test_encoder(tiny: Tiny, books: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_task, "LONGEST", 16)
    size = encoder.Size(d_vocab=280, n_ctx=36, batch=2, steps=4, valid_windows=5, contexts=1, sentences=2)
    kept = ("layernorm", "projection_only", "identity")
    results, runs = tiny(
        "encoder", encoder, TINY=size, schedule={"steps": 4}, seeds=(1,), keep=lambda keys: keys["norm"] in kept,
    )  # fmt: skip
    task = runs[0].task
    assert len(runs) == 6
    windows, places, targets = task.held_out(5)

    @torch.no_grad()
    def masked(run: Run) -> dict[str, float]:
        model = trained(run)
        logits = model(windows).double()
        rows = [(logits[i, p], int(t)) for i in range(5) for p, t in zip(places[i], targets[i], strict=True)]
        lost = [-float(row.log_softmax(-1)[target]) for row, target in rows]
        right = [int(row.argmax()) == target for row, target in rows]
        return {"valid_loss": float(np.mean(lost)), "valid_accuracy": float(np.mean(right))}

    assert_reported(results.tables["curves"], runs, masked)
    seeds = results.tables["seeds"]
    passages = seeds[seeds["space"] == "passages"]
    assert len(passages) == 4 * 2  # norms that are tuned of both shapes, loss and accuracy
    assert (seeds[seeds["space"].isin(["-", "passages"])]["layer"] == -1).all(), "of a whole model"
    (run,) = (run for run in runs if run.keys == {"shape": "wide", "norm": "projection_only"})
    spec = encoder.ClassifierSpec(run.spec, run.folder / "model.safetensors", 2)
    folder = run.folder.parents[1] / "passages" / run.folder.name
    tuned, about = trained(replace(run, spec=spec, folder=folder)), json.loads((folder / "lab.json").read_text())
    assert (about["model"]["classes"], about["data"]["length"]) == (2, 32)
    passages_task = text_task.PassagesTask(books, task.text, 32, 100)
    for quick, sizes in ((True, (40, 16, 4)), (False, (150, 32, 15))):
        request = Request(run.folder, (1,), quick=quick, texts=books)
        (tuning,) = (each.training for each in encoder.passage_runs(request, [run], passages_task))
        assert (tuning.steps, tuning.batch, tuning.warmup) == sizes
    of_books, books_of = passages_task.held_out()
    with torch.no_grad():
        logits = tuned(of_books)
    rows = passages[(passages["norm"] == "projection_only") & (passages["shape"] == "wide")]
    rows = rows.set_index("measure")["value"]
    assert rows["valid_loss"] == pytest.approx(float(F.cross_entropy(logits, books_of)), rel=1e-4)
    assert rows["valid_accuracy"] == pytest.approx(float((logits.argmax(-1) == books_of).double().mean()))
    counts = torch.bincount(task.text.train_tokens, minlength=280).double() + 1
    unigram = float(-(counts / counts.sum()).log()[targets.flatten()].mean())
    assert results.settings["unigram_loss"] == pytest.approx(unigram)
    assert results.settings["passages"] == passages_task.identity
    run = next(run for run in runs if run.keys == {"shape": "narrow", "norm": "projection_only"})
    _, cache = trained(run).run_with_cache(task.text.held_out(1))
    keys = {"before the norm": cache["blocks.0.hook_resid_post"], "normalized": cache["blocks.1.hook_resid_pre"]}
    own = seeds[(seeds["shape"] == "narrow") & (seeds["norm"] == "projection_only") & (seeds["seed"] == run.seed)]
    for space, sets in keys.items():
        rows = own[(own["space"] == space) & (own["step"] == 4) & (own["layer"] == 1)]
        share = rows[rows["measure"] == "unselectable_fraction"]["value"].item()
        assert share == pytest.approx(interior_share(sets), abs=1e-9)


@pytest.mark.parametrize("experiment", ["fresh_seeds", "fresh_seeds_long", "language_model_bundled"])
def test_two_by_two(experiment: str, tiny: Tiny, books: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All four norms: losses, and shares of keys, intact and divided by mean sigmas, by linear programs."""
    bundled = experiment == "language_model_bundled"
    name, first = {"fresh_seeds": ("SHORT", 10), "fresh_seeds_long": ("LONG", 20)}.get(experiment, ("BUNDLED", 0))
    design = replace(getattr(two_by_two, name), contexts=1)
    shipped = remove_norm.start_folder()
    text = TextTask(books, 1024, 16, tokenizer=shipped, valid_windows=6) if bundled else TextTask(books, 280, 16)
    monkeypatch.setattr(two_by_two, "text", lambda request: text)
    sizes = {name: design} | ({} if bundled else {"D_VOCAB": 280, "N_CTX": 16})
    results, runs = tiny(experiment, two_by_two, request={"quick": not bundled}, **sizes)
    seeds = results.tables["seeds"]
    assert sorted(set(seeds["seed"])) == [first, first + 1]
    windows = held_out(text, text.valid_windows)
    values = seeds.set_index(["norm", "seed", "layer", "measure"])["value"]
    layers = design.shape["n_layers"]
    assert len(values) == 2 * (4 * (1 + 2 * layers + 2 * bundled) + 2 * 2 * layers)  # two norms scale
    models = {(run.keys["norm"], run.seed): trained(run) for run in runs if run.finished}
    if bundled:
        folders = {norm: shipped.with_name(f"lm-{norm}") for norm in NORM_KINDS}
        assert {seed for _, seed in models} == {1}
        models |= {(norm, 0): load_run(folder).eval() for norm, folder in folders.items()}
    for (norm, seed), model in models.items():
        assert values[norm, seed, -1, "valid_loss"] == pytest.approx(next_token_loss(model, windows), rel=1e-4)
    for norm in ("scaling_only", "layernorm"):
        model, block = models[norm, first + 1], models[norm, first + 1].blocks[1]
        _, cache = model.run_with_cache(held_out(text, 1))
        sigma = cache["blocks.1.ln1.hook_scale"].clone()
        sigma[:, 1:] = sigma[:, 1:].mean()
        stream = cache["blocks.1.hook_resid_pre"]
        kept = stream - stream.mean(-1, keepdim=True) if norm == "layernorm" else stream
        flat = kept / sigma * block.ln1.w + block.ln1.b
        heads = torch.einsum("bpd,hde->bhpe", flat, block.attn.W_K) + block.attn.b_K[:, None]
        for measure, keys in (
            ("unselectable_fraction", cache["blocks.1.attn.hook_k"].transpose(1, 2)),
            ("unselectable_without_scaling", heads),
        ):
            share = interior_share(keys.flatten(0, 1))
            assert values[norm, first + 1, 1, measure] == pytest.approx(share, abs=1e-9)
    if bundled:
        model = models["layernorm", 0]
        for term in ("scaling", "projection"):
            with torch.no_grad(), without(model, term, sites="all", tokens=windows[1::2]):
                cost = next_token_loss(model, windows[::2])
            cost -= next_token_loss(model, windows[::2])
            assert values["layernorm", 0, -1, f"delta_loss_no_{term}"] == pytest.approx(cost, abs=1e-4)


def test_remove_norm(tmp_path: Path, books: tuple[Path, Path]) -> None:
    """The models without norms that it writes, measured as ordinary lab models."""
    config = LabConfig(n_layers=2, d_model=16, n_heads=4, d_vocab=280, n_ctx=16)
    text = TextTask(books, 280, 16)
    train(text, config, TrainConfig(steps=30, batch=4), tmp_path / "start", progress=False)
    size = remove_norm.Size(14, 2, remove_norm.Schedule(2, 1, 1), valid_windows=5, contexts=4)
    request = Request(tmp_path / "out", SEEDS, texts=books, progress=False)
    results = remove_norm.run(request, size, tmp_path / "start")
    assert results.settings["text_is_that_of_the_start"]
    assert (results.settings["norms"], results.settings["start"]) == (5, str(tmp_path / "start"))
    again = remove_norm.run(request, size, tmp_path / "start")
    pd.testing.assert_frame_equal(again.tables["seeds"], results.tables["seeds"])
    values = results.tables["seeds"].set_index(["model", "seed", "measure"])["value"]
    assert values.index.is_unique
    assert len(values) == 3 * len(SEEDS) * 8
    start = TextTask(books, 280, 16, tokenizer=tmp_path / "start")
    assert remove_norm.FULL.valid_windows == start.valid_windows, "as many as the bundled start was measured on"
    removing = trained(
        Run({}, None, remove_norm.Start(tmp_path / "start"), TrainConfig(1, 1), tmp_path / "out/runs/removed-seed1")
    )  # type: ignore[arg-type]
    for norm in remove_norm.replaceable_norms(removing)[:1]:
        norm.stage.fill_(remove_norm.TWO_CONSTANTS)
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        remove_norm.plain(removing)
    for kind, where in (("removed", tmp_path / "out" / "models" / "removed-seed1"), ("before", tmp_path / "start")):
        model = load_run(where)
        assert model.cfg.norm == ("projection_only" if kind == "removed" else "layernorm")
        _, cache = model.run_with_cache(held_out(start, 4))
        patterns = torch.stack([cache[f"blocks.{i}.attn.hook_pattern"] for i in range(2)]).double()
        first = patterns[..., 1:, 0]
        seen = torch.arange(1, 17).double().log()[1:]
        entropy = -(patterns * patterns.clamp(min=1e-300).log()).sum(-1)[..., 1:]
        heads = torch.cat([cache[f"blocks.{i}.attn.hook_k"][:2].transpose(1, 2).flatten(0, 1) for i in range(2)])
        normed = torch.cat([cache[f"blocks.{i}.ln1.hook_normalized"][:2] for i in range(2)])
        expected = {
            "valid_loss": next_token_loss(model, held_out(start, 5)), "attention_on_first": float(first.mean()),
            "queries_on_sink": float((first > 0.3).double().mean()), "entropy_ratio": float((entropy / seen).mean()),
            "unselectable_head": interior_share(heads), "unselectable_normalized": interior_share(normed),
        }  # fmt: skip
        for measure, value in expected.items():
            assert values[kind, 1, measure] == pytest.approx(value, rel=2e-4, abs=1e-9), measure
