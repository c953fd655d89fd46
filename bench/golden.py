"""Every number of the package on fixed inputs, committed, to compare a later state of the code with.

    python bench/golden.py [NAMES]            compare what the present code gives with bench/golden/NAME/TABLE.parquet
    python bench/golden.py --write [NAMES]    write these tables
    python bench/golden.py --list

A name is a case, or the beginning of several ("report", "lab-counting"); without names, all cases are run.
Cases that end in "-tl4" need TransformerLens 4; the others need 3.9. A table, a row or a column that no longer exists
is named as gone; a case whose functions no longer exist is not measurable. Nothing of that is an error.

Prompts are token ids and are committed (`tokens.json`): windows of lm-layernorm's held-out text, the beginnings of the
bundled passages in MiniLM's ids, sampled rows of MGM and CAPP-GPT, random ids. `tokens-mgm.json` and
`tokens-capp-gpt.json` hold the rows that `analyze(model)` and `norm_constants(model)` sample from these two models by
default ("measured" and "calibration"); the rows in examples/checkpoints/tables/tokens are others.

Needs LN_PROBE_MGM, LN_PROBE_MINILM and LN_PROBE_SHARED (as the tests do) for the cases that use them. Tables were
written with one thread, without oneDNN's products. On another processor, products round otherwise.
"""

from __future__ import annotations

import os

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

FOLDER = Path(__file__).with_suffix("")
TOKENS: dict[str, list[list[int]]] = json.loads((FOLDER / "tokens.json").read_text())
TL4 = version("transformer-lens").startswith("4")
PROBES = ["decomposition", "selectability", "uniformity", "causal", "head_effects", "sinks"]
Tables = dict[str, pd.DataFrame]

# --------------------------------------------------------------------------------------------------------- the models

_D = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 80, "vocab_size": 50,
    "max_position_embeddings": 32,
}  # fmt: skip
TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 50,
    }),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _D | {"rotary_pct": 0.5}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _D | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _D | {"num_key_value_heads": 2, "head_dim": 8}),
    "bert": ("BertForMaskedLM", "BertConfig", _D),
}  # fmt: skip


def tiny_folder(shape: str, folder: Path) -> Path:
    """Save a tiny Hugging Face model; a parameter's values depend on its name and shape alone."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_class, config_class, options = TINY[shape]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.3 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(parameter.shape))
            is_gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(torch.from_numpy(noise + is_gain))
    model.save_pretrained(folder)
    return folder


def load(name: str) -> Any:
    import ln_probe

    if name in TINY:
        with tempfile.TemporaryDirectory() as folder:
            return ln_probe.load_model(tiny_folder(name, Path(folder)))
    if name == "capp-gpt":
        return ln_probe.load_model(Path(os.environ["LN_PROBE_SHARED"]) / "checkpoints" / "capp_gpt")
    if name in ("mgm", "minilm"):
        return ln_probe.load_model(os.environ[f"LN_PROBE_{name.upper()}"], allow_pickle=name == "mgm")
    return ln_probe.load_model(name)


def rows_of(name: str) -> list[list[int]]:
    return TOKENS["tiny" if name in TINY else "lm" if name.startswith("lm-") else name]


# ---------------------------------------------------------------------------------------------------------- the cases


def report(name: str, rows: list[list[int]], probes: list[str]) -> Tables:
    """Every table of a report; of `keys`, the rows of the first prompt and of two heads."""
    import ln_probe

    tables = dict(ln_probe.analyze(load(name), prompts=rows, probes=probes, progress=False).tables)
    if {"prompt", "head"} <= set(tables.get("keys", ())):
        tables["keys"] = tables["keys"].query("prompt == 0 and head in (0, 3)")
    return tables


def headline() -> Tables:
    """What `freezing_cost` and `norm_constants` give for lm-layernorm."""
    import ln_probe

    model, rows = load("lm-layernorm"), TOKENS["lm-40"]
    cost = ln_probe.freezing_cost(model, prompts=rows)
    pooled = ln_probe.norm_constants(model, prompts=rows).pooled
    numbers = [{"number": name, "value": getattr(cost, name)} for name in ("estimate", "low", "high", "loss")]
    constants = [{"site": site, **pair_of(pooled[site])} for site in sorted(pooled)]
    return {"causal": cost.table, "numbers": pd.DataFrame(numbers), "pooled": pd.DataFrame(constants)}


def pair_of(constant: Any) -> dict[str, float]:
    """The constants of a norm at position 0 and elsewhere."""
    first, rest = (constant.first, constant.rest) if hasattr(constant, "first") else constant
    return {"first": float(first), "rest": float(rest)}


def edits() -> Tables:
    """Losses, logits and constants of lm-layernorm without each term, and with its norms' sigmas held."""
    from ln_probe import hooks

    model, rows = load("lm-layernorm"), TOKENS["lm"]
    prompts = [torch.tensor([row]) for row in rows]
    losses: list[dict[str, Any]] = []
    constants: list[dict[str, Any]] = []
    logits: list[dict[str, Any]] = []

    def measure(edit: str) -> None:
        with torch.no_grad():
            each = [float(model(prompt, return_type="loss")) for prompt in prompts]
            last = model(prompts[0], return_type="logits")[0, ::4].numpy().ravel()
        losses.extend({"edit": edit, "prompt": i, "loss": loss} for i, loss in enumerate(each))
        logits.append(pd.DataFrame({"edit": edit, "i": range(len(last)), "logit": last}))

    def edited(what: str, **options: Any) -> None:
        label = ", ".join([what, *(f"{k}={v}" for k, v in options.items())])
        measured = what != "projection" and options.get("scale", "frozen") in ("frozen", "uniform")
        given = options | ({"tokens": rows} if measured else {})  # the loss-optimal constants are those of the model
        try:
            with hooks.without(model, what, **given) as done:
                measure(label)
            for site, pair in getattr(done, "divisors", {}).items():
                constants.append({"edit": label, "site": site, **pair_of(pair)})
        except Exception as error:
            print(f"  without {label}: not measurable: {_short(error)}")

    measure("intact")
    for sites in ("attention", "all"):
        for what in ("scaling", "projection", "both"):
            edited(what, sites=sites)
        edited("scaling", sites=sites, scale="optimal")
    edited("scaling", sites="mlp", scale="uniform")
    edited("scaling", sites="final", scale=2.0)
    edited("both", heads=[(1, 0), (2, 3)])
    edited("scaling", only="keys")
    found = {"losses": pd.DataFrame(losses), "constants": pd.DataFrame(constants)}
    try:
        with hooks.linearized(model):
            measure("linearized")
            model.zero_grad()
            model(prompts[1], return_type="loss").backward()
        gradients = [(n, float(p.grad.norm())) for n, p in model.named_parameters() if p.grad is not None]
        found["gradients"] = pd.DataFrame(gradients, columns=["parameter", "norm"])
    except Exception as error:
        print(f"  linearized: not measurable: {_short(error)}")
    return found | {"losses": pd.DataFrame(losses), "logits": pd.concat(logits, ignore_index=True)}


def _unit(rng: Any, n: int, d: int) -> np.ndarray:
    x = rng.standard_normal((n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def key_set(family: str, n: int, d: int) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Keys, an ellipsoid of queries (center and axes) and a bias."""
    rng = np.random.default_rng([zlib.crc32(family.encode()), n, d])
    keys = rng.standard_normal((n, d))
    if family == "layernormed":
        keys = (keys - keys.mean(1, keepdims=True)) / keys.std(1, keepdims=True)
    elif family == "heavy":  # norms over several decades
        keys *= rng.lognormal(0, 2, (n, 1))
    elif family == "planted":  # half of them mixtures of the others
        keys[n // 2 :] = rng.dirichlet(np.ones(n // 2), n - n // 2) @ keys[: n // 2]
    elif family == "attention":  # clusters with heavy tails, and a sink
        keys = 3 * keys[rng.integers(0, 4, n)] + rng.standard_t(3, (n, d)) * rng.lognormal(0, 0.5, (n, 1))
        keys[0] = 300 * _unit(rng, 1, d)
    elif family == "copies":  # exact copies, and copies 0.3 to 3 tolerances away
        keys[n // 2 :] = keys[: n - n // 2]
        size = 1e-7 * np.sqrt(((keys - keys.mean(0)) ** 2).sum(1).mean())
        keys[3 * n // 4 :] += size * rng.uniform(0.3, 3, (n - 3 * n // 4, 1)) * _unit(rng, n - 3 * n // 4, d)
    queries = (rng.standard_normal(d) / np.sqrt(d), 3 * rng.standard_normal((d, d)) / d)
    return keys, queries, rng.standard_normal(n)


FAMILIES = ("normal", "layernormed", "heavy", "planted", "attention", "copies")


def geometry(family: str) -> Tables:
    """Verdicts and brackets of a family of key sets: alone, seen by an ellipsoid of queries, and with a bias too."""
    from ln_probe import key_geometry

    tables: Tables = {}
    names = ("verdict", "margin_lower", "margin_upper", "attainable", "attainable_upper", "reachable", "representative")
    for n in (40, 128, 512):
        for d in (2, 8, 64):
            keys, queries, bias = key_set(family, n, d)
            calls = {"alone": {}, "seen": {"query_set": queries}, "biased": {"query_set": queries, "bias": bias}}
            for label, options in calls.items() if n <= 128 else list(calls.items())[:2]:
                one = key_geometry(keys, **options)
                columns = {c: v for c in names if (v := getattr(one, c, None)) is not None}
                place = {"n": n, "d": d, "key": range(n)}
                tables.setdefault(label, []).append(pd.DataFrame(place | columns))  # type: ignore[attr-defined]
    return {label: pd.concat(parts, ignore_index=True).dropna(axis=1, how="all") for label, parts in tables.items()}


def parts_of(results: dict[str, Any]) -> Tables:
    """Frames, tensors and numbers of attributions by label, as tables."""
    tables, numbers = {}, []
    for label, one in results.items():
        for name in ("table", "pairs", "terms", "values", "components", "total", "own", "scale", "weight", "sigma"):
            value = getattr(one, name, None)
            if isinstance(value, pd.DataFrame):
                if name == "pairs":
                    value = value.stack().rename("contribution").rename_axis(["query", "key"]).reset_index()
                tables[f"{label}-{name}"] = value
            elif isinstance(value, torch.Tensor):
                index = np.indices(value.shape).reshape(value.ndim, -1).astype(np.int32)
                columns = {f"i{k}": i for k, i in enumerate(index)}
                tables[f"{label}-{name}"] = pd.DataFrame(columns | {"value": value.detach().numpy().ravel()})
            elif isinstance(value, float):
                numbers.append({"of": label, "number": name, "value": value})
    return tables | {"numbers": pd.DataFrame(numbers)}


def attribution(name: str) -> Tables:
    import ln_probe

    model, rows = load(name), rows_of(name)
    first = torch.tensor(rows[0])
    logits, scores = ln_probe.attribute_logits, ln_probe.attribute_scores
    calls: dict[str, Callable[[], Any]] = {
        "logit": lambda: logits(model, first, -1, target=7),
        "logit-difference": lambda: logits(model, first, -1, target=7, against=5),
        "logit-layers": lambda: logits(model, first, -1, target=7, components="layers"),
        "logits": lambda: logits(model, rows[:2]),
        "score": lambda: scores(model, first, 1, 2, -1, 0),
        "score-mean": lambda: scores(model, first, 1, 2, -1, 0, against="mean"),
        "scores-keys": lambda: scores(model, first, 1, 2, -1),
        "scores-queries": lambda: scores(model, first, 1, 2, None, 0),
    }
    results = {}
    for label, call in calls.items():
        try:
            results[label] = call()
        except Exception as error:
            print(f"  {label}: not measurable: {_short(error)}")
    return parts_of(results)


_QUIET_LAB = """
import runpy, sys
try:
    from ln_probe.hooks import products
    products._is_faster = lambda: False
except ImportError:
    pass
sys.argv[0] = "ln_probe"
runpy.run_module("ln_probe", run_name="__main__")
"""


def laboratory(name: str, text: bool) -> Tables:
    """Tables of a quick run of an experiment (six significant digits, as it writes them)."""
    with tempfile.TemporaryDirectory() as folder:
        out, more = Path(folder) / "out", []
        if text:
            book = Path(os.environ["LN_PROBE_SHARED"]) / "corpora" / "moby_dick.txt"
            (path := Path(folder) / "text.txt").write_bytes(book.read_bytes()[:300_000])
            more = ["--text", str(path)]
        if name == "majority":  # one seed takes a minute
            more = ["--seeds", "1"]
        command = [sys.executable, "-c", _QUIET_LAB, "lab", "run", name, "--quick", "--out", str(out), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise RuntimeError(f"exit status {done.returncode}: {' '.join(lines[-3:])[-250:]}")
        tables = {p.stem: pd.read_csv(p) for p in sorted(out.glob("*.csv"))}
        tables |= {p.stem: pd.read_parquet(p) for p in sorted(out.glob("*.parquet"))}
    for key, table in tables.items():
        timed = table.get("measure", pd.Series("", table.index)).astype(str).str.startswith("seconds")
        tables[key] = table.loc[~timed, [c for c in table if not str(c).startswith("seconds")]]
    return tables


REPORTS = ("lm-layernorm", "lm-none", "lm-scaling_only", "mgm", "minilm", *TINY)
LAB = {
    "majority": ("random_keys", "majority"),
    "language_model": ("remove_norm", "language_model"),
    "crasp": ("compiler", "depth", "depth_deep"),
    "approximation": ("longer_inputs", "adaptive_memory", "approximation_text"),
    "counting": ("saturated_states", "rational_recurrence", "counters", "anbk"),
}
ON_TEXT = (*LAB["language_model"], "approximation_text")
CASES: dict[str, Callable[[], Tables]] = {
    **{f"report-{n}": partial(report, n, rows_of(n), PROBES) for n in REPORTS},
    "report-40-prompts": partial(report, "lm-layernorm", TOKENS["lm-40"], ["causal"]),
    "headline": headline,
    "edits": edits,
    **{f"geometry-{f}": partial(geometry, f) for f in FAMILIES},
    **{f"attribution-{n}": partial(attribution, n) for n in ("lm-layernorm", "capp-gpt", "neox")},
    **{f"lab-{source}-{n}": partial(laboratory, n, n in ON_TEXT) for source, names in LAB.items() for n in names},
}
CASES |= {f"{n}-tl4": CASES[n] for n in CASES if n.startswith("report") and n != "report-40-prompts"}

# ------------------------------------------------------------------------------------------------------ the comparison

# What identifies a row. Rows of other tables are compared in their order; where some are gone, every column that is not
# among VALUES identifies them.
VALUES = {"value", "mean", "ci_low", "ci_high", "median", "sd", "p", "p_holm", "low", "high", "factor", "published"}
IDENTITY = {
    "layernorms": ("site",),
    "heads": ("layer", "head", "variant"),
    "keys": ("layer", "head", "variant", "prompt", "position"),
    "causal": ("sites", "variant"),
    "causal_prompts": ("prompt", "sites", "variant"),
    "head_effects": ("layer", "head", "variant"),
    "sinks": ("prompt", "position"),
    "sink_heads": ("layer", "head"),
    "token_sizes": ("site", "first"),
    "outlier_dimensions": ("site", "dimension"),
    "scale_sums": ("prompt", "site"),
    "losses": ("edit", "prompt"),
    "constants": ("edit", "site"),
    "logits": ("edit", "i"),
}
BRACKETS = (
    ("margin_lower", "margin_upper"),
    ("attainable", "attainable_upper"),
    ("attainable_last", "attainable_last_upper"),
)
CLOSE = 1e-6


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """The same in numbers and text alone, as any version of pandas writes and reads them."""
    frame = frame.reset_index(drop=True).rename(columns=str)
    for name, column in frame.items():
        if pd.api.types.is_bool_dtype(column) or pd.api.types.is_numeric_dtype(column):
            if pd.api.types.is_extension_array_dtype(column):
                frame[name] = column.to_numpy(dtype=float, na_value=np.nan)
        else:
            frame[name] = [None if v is None or v is pd.NA or v is np.nan else _text(v) for v in column.astype(object)]
    return frame


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(np.asarray(value).tolist())


# Names of today by those of the committed tables.
NAMES = {
    "layernorms": {"mean_share": "projected_share", "norm_before_mean": "input_norm", "tokens": "n"},
    "heads": {"unselectable_fraction": "unselectable", "unreachable_fraction": "unreachable", "keys": "n"},
    "causal": {"prompts": "n"},
    "causal_prompts": {"predicted": "n"},
    "head_effects": {"prompts": "n"},
}


def renamed(name: str, old: pd.DataFrame) -> pd.DataFrame:
    """A committed table with the names of today: keys in head space, attention at the last position."""
    if "space" in old and "measure" not in old:  # a table of keys, not of the laboratory
        old = old[old["space"] == "head"].drop(columns="space").reset_index(drop=True)
    today = {c: c.replace("attainable_last", "attainable") for c in old if str(c).startswith("attainable_last")}
    today |= NAMES.get(name, {})
    gone = [new for column, new in today.items() if column in old and new in old]
    return old.drop(columns=gone).rename(columns=today)


def compare(name: str, old: pd.DataFrame, new: pd.DataFrame | None) -> str:
    """One line (and a line for each column that differs) on a table beside the committed one."""
    if new is None:
        return "table gone"
    old = renamed(name, old)
    notes = []
    for what, columns in (("gone", [c for c in old if c not in new]), ("new", [c for c in new if c not in old])):
        if columns:
            notes.append(f"columns {what}: {', '.join(columns)}")
    same = [c for c in old if c in new]
    identity = [c for c in IDENTITY.get(name, ()) if c in same]
    if name not in IDENTITY and len(old) != len(new):
        identity = [c for c in same if c not in VALUES]
    if identity and not (old.duplicated(identity).any() or new.duplicated(identity).any()):
        left, right = (pd.MultiIndex.from_frame(t[identity].astype(str)) for t in (old, new))
        for what, mine, other, table in (("gone", left, right, old), ("new", right, left, new)):
            if (missing := ~mine.isin(other)).any():
                values = {c: set(table[c]) - set(table.loc[~missing, c]) for c in identity}
                which = "; ".join(f"{c}: {' | '.join(sorted(map(str, v)))}" for c, v in values.items() if v)
                notes.append(f"{missing.sum()} of {len(mine)} rows {what}" + (f" (all of {which})" if which else ""))
        shared = left[left.isin(right)]
        old = old.iloc[left.get_indexer(shared)].reset_index(drop=True)
        new = new.iloc[right.get_indexer(shared)].reset_index(drop=True)
    elif len(old) != len(new):
        return "; ".join([f"DIFFERENT: {len(old)} rows are now {len(new)}, not compared", *notes])
    worst, lines, together = 0, [], _disjoint(old, new)
    for column in same:
        level, text = _difference(old[column], new[column])
        worst = max(worst, level)
        if level:
            lines.append(f"      {column}: {text}" + together.get(column, ""))
    verdict = ("equal bit for bit", "equal to 1e-6 relative", "equal to 1e-6 of the column's largest", "DIFFERENT")
    return "\n".join(["; ".join([f"{verdict[worst]} ({len(old)} rows, {len(same)} columns)", *notes]), *lines])


def _difference(old: pd.Series, new: pd.Series) -> tuple[int, str]:
    """0: the same bits, 1 and 2: equal to CLOSE (of each value, of the column's largest), 3: different."""
    if not all(pd.api.types.is_numeric_dtype(c) for c in (old, new)):
        a, b = (c.astype(object).where(c.notna(), None) for c in (old, new))
        differ = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if str(x) != str(y)]
        if not differ:
            return 0, ""
        return 3, f"{len(differ)} values, first at {differ[0]}: {a[differ[0]]!r} is now {b[differ[0]]!r}"
    a, b = (c.to_numpy(dtype=float, na_value=np.nan) for c in (old, new))
    differ = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not differ.any():
        return 0, ""
    count = f"{differ.sum()} of {len(a)}"
    finite = np.isfinite(a) & np.isfinite(b)
    if (strange := differ & ~finite).any():
        at = int(np.flatnonzero(strange)[0])
        return 3, f"{count} values, {strange.sum()} not finite on one side, first at {at}: {a[at]} is now {b[at]}"
    apart, size = np.abs(a - b)[differ], np.maximum(np.abs(a), np.abs(b))[differ]
    relative, absolute = (apart / size).max(), apart.max() / np.abs(a[finite]).max(initial=1e-300)
    at = int(np.flatnonzero(differ)[(apart / size).argmax()])
    text = f"{count} values, by {relative:.1e} at most ({absolute:.1e} of the largest): {a[at]} is now {b[at]}"
    return 1 if relative <= CLOSE else 2 if absolute <= CLOSE else 3, text


def _disjoint(old: pd.DataFrame, new: pd.DataFrame) -> dict[str, str]:
    """By the lower end's column, how many brackets of a number have no point in common."""
    found = {}
    for low, high in BRACKETS:
        if {low, high} <= set(old) & set(new):
            apart = (old[low] > new[high]) | (new[low] > old[high])
            found[low] = f"; {apart.sum()} brackets have nothing in common"
    return found


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def run(name: str, *, write: bool) -> None:
    folder, began, before = FOLDER / name, time.perf_counter(), os.times()
    print(f"{name}", flush=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tables = {key: plain(table) for key, table in CASES[name]().items() if len(table)}
    except Exception as error:
        print(f"  not measurable: {_short(error)}")
        return
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        for key in {p.stem for p in folder.glob("*.parquet")} - set(tables):
            (folder / f"{key}.parquet").unlink()
        for key, table in tables.items():
            floats = [c for c in table if table[c].dtype.kind == "f"]
            table.to_parquet(
                folder / f"{key}.parquet",
                index=False,
                compression="zstd",
                compression_level=19,
                use_byte_stream_split=floats,
                use_dictionary=[c for c in table if c not in floats],
                write_statistics=False,
                store_schema=False,
            )
        print(f"  {len(tables)} tables, {sum(p.stat().st_size for p in folder.iterdir()):,} bytes")
    else:
        for path in sorted(folder.glob("*.parquet")):
            print(f"  {path.stem}: {compare(path.stem, pd.read_parquet(path), tables.get(path.stem))}")
        if more := sorted(set(tables) - {p.stem for p in folder.glob("*.parquet")}):
            print(f"  new tables: {', '.join(more)}")
    used = sum(os.times()[:4]) - sum(before[:4])
    print(f"  {used:.0f} s of a processor, {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="write the tables in place of comparing with them")
    parser.add_argument("--list", action="store_true", help="list the cases of this TransformerLens")
    given = parser.parse_args()
    here = [name for name in CASES if name.endswith("-tl4") == TL4]
    if given.list:
        print("\n".join(here))
        return
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from ln_probe.hooks import products

        products._is_faster = lambda: False
    except ImportError:
        pass
    chosen = [name for name in here if not given.names or any(name.startswith(wanted) for wanted in given.names)]
    if not chosen:
        parser.error(f"no case begins with {' or '.join(given.names)}: see --list")
    for name in chosen:
        run(name, write=given.write)


if __name__ == "__main__":
    main()
