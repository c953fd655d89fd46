"""Prompts that go through the model together, and what the processor does beside a GPU's passes: the same tables."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import cases, make_bridge, make_hooked
from same_findings import BRACKETED

import ln_probe
from ln_probe import passes
from ln_probe.analyses.geometry.newton import WEIGHT_GAP
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import Needs, Observer, Probe, View
from ln_probe.analyses.schema import Column, Table
from ln_probe.hooks.capture import ActivationError, looks_ahead, stream, stream_together
from ln_probe.hooks.sites import facts_of, find_sites
from ln_probe.measure import ProbeFailedWarning
from ln_probe.observers import BackgroundWorker
from ln_probe.passes import Passes

LENGTHS = (12, 10, 11, 2, 12, 12)  # the fourth is far shorter: it goes alone
PROBES = ("decomposition", "selectability", "uniformity", "sinks", "causal")


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 50, n).tolist() for n in lengths]


def assert_alike(one: pd.DataFrame, other: pd.DataFrame, name: str, relative: float) -> None:
    assert list(one.columns) == list(other.columns)
    assert len(one) == len(other), name
    for column in one.columns.drop("reconstruction_error", errors="ignore"):  # which is rounding itself
        a, b = one[column], other[column]
        if column in BRACKETED.get(name, ()):  # found to WEIGHT_GAP, by steps that rounding can change
            np.testing.assert_allclose(b, a, rtol=0, atol=WEIGHT_GAP)
        elif pd.api.types.is_float_dtype(a):
            np.testing.assert_allclose(b, a, rtol=relative, atol=relative * np.nan_to_num(a.abs().max()))
        else:
            assert a.equals(b), f"{name}.{column}"


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Lengths of the prompts of every pass that was made."""
    seen: list[list[int]] = []
    whole = passes.stream_together

    def counted(model: Any, rows: Any, *more: Any, **options: Any) -> None:
        seen.append([len(r) for r in rows])
        whole(model, rows, *more, **options)

    monkeypatch.setattr(passes, "stream_together", counted)
    return seen


KINDS = ["gpt2", "neox", "llama", "qwen3", "neo", "bloom", "gptj", "olmo2"]  # gemma3: norms of its keys, and windows


@pytest.mark.parametrize("arch", cases("gemma3", slow=KINDS))
def test_together_is_alone(arch: str, passed: list[list[int]]) -> None:
    model = make_bridge(arch, torch.float64)
    alone = ln_probe.analyze(model, prompts(), probes=PROBES, keys="all", progress=False, batch_size=1)
    assert {len(p) for p in passed} == {1}
    passed.clear()
    together = ln_probe.analyze(model, prompts(), probes=PROBES, keys="all", progress=False, batch_size=4)
    assert passed == [[12, 10, 11], [2], [12, 12]] * 2
    for name, table in alone.tables.items():
        assert_alike(table, together.tables[name], name, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "expected"), [
    ("hooked, in single precision", 2, [[12, 10], [11], [2], [12, 12]]),
    ("bert, which looks ahead", 4, [[12], [10], [11], [2], [12, 12]]),
])  # fmt: skip
def test_together_in_single_precision_and_where_no_prompt_may_be_padded(
    kind: str, size: int, expected: list[list[int]], passed: list[list[int]]
) -> None:
    model = make_hooked() if kind.startswith("hooked") else make_bridge("bert", torch.float64)
    alone, together = (
        ln_probe.analyze(model, prompts(), probes=PROBES[:4], keys="all", progress=False, batch_size=n).tables
        for n in (1, size)
    )
    assert passed[len(LENGTHS) * 2 :] == expected * 2
    for name, table in alone.items():
        assert_alike(table, together[name], name, 1e-6)


@pytest.mark.parametrize("arch", cases("gemma3", "bloom", "bert", slow=[k for k in KINDS if k != "bloom"]))
def test_who_looks_ahead(arch: str) -> None:
    model = make_bridge(arch)
    assert looks_ahead(model, facts_of(model).read) == (arch == "bert")


def test_who_looks_ahead_without_norms_and_with_a_vocabulary_of_two() -> None:
    for direction in ("causal", "bidirectional"):
        model = make_hooked(normalization_type=None, d_vocab=2, attention_dir=direction)
        assert looks_ahead(model, facts_of(model).read) == (direction == "bidirectional")


@pytest.mark.parametrize("arch", cases("qwen3", "bloom", slow=["olmo2"]))
def test_what_is_seen_of_a_prompt(arch: str) -> None:
    """Norms inside attention too, whose rows are heads of positions; rotary tables; no padding."""
    model = make_bridge(arch, torch.float64)
    rows = [torch.tensor(p) for p in prompts()[:4]]
    sites = find_sites(model)
    norms: dict[tuple[int, str], torch.Tensor] = {}
    attention: dict[tuple[int, int], Any] = {}
    stream_together(
        model,
        rows,
        sites,
        on_norm=lambda i, s, x, y: norms.update({(i, s.name): torch.stack([x, y])}),
        on_attention=lambda i, a: attention.update({(i, a.layer): a}),
    )
    for i, row in enumerate(rows):

        def norm(site: Any, x: torch.Tensor, y: torch.Tensor, i: int = i) -> None:
            torch.testing.assert_close(norms[i, site.name], torch.stack([x, y]), rtol=1e-12, atol=1e-12)

        def layer(seen: Any, i: int = i, length: int = len(row)) -> None:
            there = attention[i, seen.layer]
            for name in ("x", "y", "pattern"):
                torch.testing.assert_close(getattr(there, name), getattr(seen, name), rtol=1e-12, atol=1e-12)
            assert there.causal
            assert there.pattern.shape[-1] == length
            if seen.cos_sin is not None:
                torch.testing.assert_close(there.cos_sin, seen.cos_sin)

        stream(model, row, sites, on_norm=norm, on_attention=layer)
    assert len(attention) == (0 if arch == "olmo2" else 8)  # whose attention reads no norm


def test_angles_that_depend_on_the_length_are_not_padded(passed: list[list[int]]) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 11} | factors
    model = make_bridge("llama", torch.float64, rope_parameters=rope)
    ln_probe.analyze(model, prompts(), probes=("uniformity",), progress=False, batch_size=4)
    assert passed == [[12], [10], [11], [2], [12, 12]] * 2


def test_a_run_goes_on_with_fewer_prompts_at_once(tmp_path: Any) -> None:
    from ln_probe.batch.run import Run
    from ln_probe.batch.shards import ShardedCorpus
    from ln_probe.settings import Settings

    corpus = ShardedCorpus("prompts.jsonl", "prompts", 1, "0", 1)
    one, other = (Run(tmp_path, Settings(batch_size=n), corpus) for n in (None, 2))
    assert one.identity == other.identity


ROOM = 1 << 30
PATIENCE = 60.0  # seconds after which a test that waits for something gives up


def measured(model: Any, room: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, pd.DataFrame]:
    monkeypatch.setattr(Passes, "_gpu_memory", room)
    options = {"probes": PROBES, "batch_size": 1} | options
    return dict(ln_probe.analyze(model, prompts((7, 4, 8)), keys="all", progress=False, **options).tables)


def assert_equal(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame]) -> None:
    assert set(one) == set(other)
    for name, table in one.items():
        pd.testing.assert_frame_equal(table, other[name], obj=name)


def test_work_is_done_in_order_and_by_another_thread() -> None:
    done: list[tuple[int, str, bool]] = []

    def work(number: int) -> None:
        done.append((number, threading.current_thread().name, torch.is_grad_enabled()))

    with BackgroundWorker(100) as beside:
        for number in range(20):
            beside.do(partial(work, number), 30)
        beside.finish()
        assert len(done) == 20
        beside.do(partial(work, 20), 1000)  # more than there is room for, alone
    assert [number for number, _, _ in done] == list(range(21))
    assert {name for _, name, _ in done} == {done[0][1]} != {threading.current_thread().name}
    assert not any(grad for _, _, grad in done)
    with BackgroundWorker(0) as beside:  # without a GPU there is no other thread
        beside.do(partial(work, 21), 10**12)
        assert done[-1][:2] == (21, threading.current_thread().name)
        beside.finish()


def test_only_so_much_waits_as_there_is_room_for() -> None:
    go, waiting = threading.Event(), 0

    def work() -> None:
        nonlocal waiting
        assert go.wait(PATIENCE)
        waiting -= 40

    def give() -> None:
        nonlocal waiting
        for _ in range(6):
            beside.do(work, 40)
            waiting += 40
            most.append(waiting)

    most: list[int] = []
    with BackgroundWorker(100) as beside:
        giver = threading.Thread(target=give)
        giver.start()
        end = time.monotonic() + PATIENCE
        while len(most) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        giver.join(0.2)  # (time enough to give more, if there were room)
        assert most == [40, 80]  # the third has to wait
        go.set()
        giver.join(PATIENCE)
        assert len(most) == 6
    assert waiting == 0


@pytest.mark.parametrize("finish", [True, False])
def test_what_goes_wrong_there_is_raised_here(finish: bool) -> None:
    def fail() -> None:
        raise KeyError("there")

    def work() -> None:
        with BackgroundWorker(100) as beside:
            beside.do(fail)
            if finish:
                beside.finish()

    with pytest.raises(KeyError, match="there"):
        work()


def test_what_waits_when_it_is_broken_off_is_not_begun() -> None:
    done: list[bool] = []
    begin = threading.Event()
    behind: list[Future[None]] = []

    def first() -> None:  # ends when what is behind it has been called off
        assert begin.wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        while not all(later.cancelled() for later in behind) and time.monotonic() < end:
            time.sleep(0.01)
        done.append(True)

    def work() -> None:
        with BackgroundWorker(100) as beside:
            beside.do(first)
            for _ in range(5):
                beside.do(lambda: done.append(False))
            behind.extend([future for future, _ in beside._waiting][1:])
            assert len(behind) == 5
            begin.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert done == [True]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 2, "probes": PROBES[1:4]}])
def test_tables_are_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_hooked()
    assert_equal(measured(model, 0, monkeypatch, **options), measured(model, ROOM, monkeypatch, **options))


def test_what_is_looked_at_later_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later block may use the memory of what an earlier one read: here it is overwritten before anybody looks."""
    model = make_hooked()
    plain = measured(model, 0, monkeypatch, probes=PROBES[1:4])
    gone, seen = threading.Event(), []
    norm, mlp, attended = model.blocks[0].ln1, model.blocks[0].mlp, Passes.attended

    def overwrite(*_: Any) -> None:
        for tensor in seen:
            tensor.fill_(7.0)
        gone.set()

    def patient(*given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert gone.wait(PATIENCE)
        return attended(*given)

    monkeypatch.setattr(Passes, "attended", patient)
    handles = [
        norm.register_forward_hook(lambda _m, args, out: seen.extend([args[0], out])),
        model.blocks[0].attn.hook_pattern.register_forward_hook(lambda _m, _a, out: seen.append(out)),
        mlp.register_forward_pre_hook(overwrite),
    ]
    try:
        later = measured(model, ROOM, monkeypatch, probes=PROBES[1:4])
    finally:
        for handle in handles:
            handle.remove()
    assert_equal(plain, later)


def test_a_probe_that_fails_there_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Observer):
        def attention(self, prompt: int, attended: AttentionLayer) -> None:
            raise ZeroDivisionError(f"of prompt {prompt}")

    class Broken(Probe):
        name, summary, needs = "broken", "fails", Needs(attention=True)
        tables = (Table("broken", "Broken", "A row each.", ("prompt",), (Column("prompt", "int", "its number"),)),)

        def start(self, view: View) -> Observer:
            return Failing()

    monkeypatch.setattr(Passes, "_gpu_memory", ROOM)
    model = make_hooked()
    with pytest.warns(ProbeFailedWarning, match="of prompt 0"):
        found = ln_probe.analyze(
            model, prompts((7, 4, 8)), probes=("uniformity", Broken()), batch_size=1, progress=False
        )
    assert [f.probe for f in found.failures] == ["broken"]
    assert len(found.tables["heads"])


def test_a_pass_that_breaks_off_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_hooked()
    with torch.no_grad():
        model.blocks[1].mlp.W_out.fill_(float("inf"))
    before = set(threading.enumerate())
    with pytest.raises(ActivationError, match="holds NaN or infinite values"):
        measured(model, ROOM, monkeypatch)
    assert not {t for t in threading.enumerate() if t not in before and "beside" in t.name}
