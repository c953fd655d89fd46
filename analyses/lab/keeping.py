"""Kept results: their tables, figures and sentences made again from the values of every seed that are committed.

    python -m ln_probe.analyses.lab.keeping NAME                # from the kept values alone
    python -m ln_probe.analyses.lab.keeping NAME --add DIR      # and those of a folder that `lab run NAME` wrote

A run is known by its keys and its seed. Where both have it, the one that was kept stays, unless the other has come
further (more steps): then it takes the whole place of the kept one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from ln_probe.analyses.lab.experiments import EXPERIMENT_FILE
from ln_probe.analyses.lab.published import folder
from ln_probe.analyses.lab.results import RESULTS_FILE, Results, write_results

Tables = Mapping[str, pd.DataFrame]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Kept:
    """How the results of an experiment are made of what is committed.

    Attributes:
        tables: that hold the values of every seed; the first tells which runs there are.
        keys: columns that, with `seed`, say which run a row is of; empty: nothing can be added.
        rebuild: from the tables and the settings of the kept results.
    """

    tables: tuple[str, ...]
    keys: tuple[str, ...]
    rebuild: Callable[[Tables, Settings], Results]


def _depth(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.depth.depth import findings, training

    return findings(tables["exact_match"], training=vars(training(False, 0)))


def _depth_deep(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.depth.depth_deep import findings

    return findings(tables["exact_match"])


def _longer_inputs(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.approximation.longer_inputs import findings

    return findings(tables["errors"], tables["solved"])


def _adaptive_memory(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.approximation.adaptive_memory import findings

    return findings(tables["errors"])


def _dot_product_text(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.approximation.approximation_text import findings

    return findings(tables["losses"], settings)


def _counting(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.counting.counting import findings

    return findings(tables["values"])


def _counting_budget(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.counting.qrnn_budget import findings

    return findings(tables["values"])


def _saturated(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.counting.saturated_states import findings

    return findings(tables["values"], tables["growth"])


def _rational(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.counting.rational_recurrence import findings

    return findings(tables["values"], tables["errors"])


def _traces(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.counting.counting_traces import findings

    return findings(dict(tables))


def _compiler(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.compiler.compiler import findings

    return findings(tables["agreement"], tables["operations"], tables["lengths"])


def _approximation(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.approximation.approximation import findings

    return findings(tables["errors"])


def _majority(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.experiments import Request
    from ln_probe.analyses.lab.majority import majority
    from ln_probe.analyses.lab.majority.majority import findings, start_angles

    curves = tables["curves"]
    there = set(curves[["norm", "radius", "seed"]].drop_duplicates().itertuples(index=False, name=None))
    seeds = tuple(sorted({seed for _, _, seed in there}))
    runs = [r for r in majority.make_runs(Request(Path("."), seeds)) if (*r.keys.values(), r.seed) in there]
    return findings(curves, start_angles(runs), majority.settings(runs[0]))


def _majority_in_space(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.majority.majority_in_space import findings

    return findings(tables["coordinates"], tables["scores"], settings)


def _encoder(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.encoder.encoder import findings

    return findings(tables["seeds"], tables["curves"], settings)


def _encoder_passages(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.encoder.encoder_passages import findings

    return findings(tables["values"], settings)


def _language_model(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.language_model.published_language_model import findings

    return findings(tables["seeds"], tables["curves"], settings)


def _bundled(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.language_model.bundled_seeds import findings

    return findings(tables["seeds"])


def _random_keys(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.majority.random_keys import findings

    return findings(tables["maps"])


def _remove_norm(tables: Tables, settings: Settings) -> Results:
    from ln_probe.analyses.lab.removal.remove_norm import results_of

    return results_of(tables["seeds"], tables["curves"], settings)


_OF_SEEDS = ("seeds", "finished")  # settings that say which runs there are
_COUNTS_MISSES = ("depth", "depth_deep")

KEPT = {
    "depth": Kept(("exact_match",), ("depth", "k", "norm", "norm_order", "positions"), _depth),
    "depth_deep": Kept(("exact_match",), ("depth", "k", "norm", "norm_order", "positions"), _depth_deep),
    "longer_inputs": Kept(("errors", "solved"), (), _longer_inputs),
    "adaptive_memory": Kept(("errors",), ("heads", "width", "dot_product"), _adaptive_memory),
    "dot_product_text": Kept(("losses",), ("layers", "heads", "dot_product", "norm"), _dot_product_text),
    "counting": Kept(("values",), ("task", "model", "norm", "norm_site"), _counting),
    "counting_budget": Kept(("values",), ("task", "model", "lr"), _counting_budget),
    "saturated_states": Kept(("values", "growth"), (), _saturated),
    "rational_recurrence": Kept(("values", "errors"), (), _rational),
    "counting_traces": Kept(
        ("networks", "dimensions", "traces", "readings", "moves"), ("task", "model", "norm", "norm_site"), _traces
    ),
    "compiler": Kept(("agreement", "operations", "lengths"), (), _compiler),
    "approximation": Kept(
        ("errors",),
        ("target", "kernel", "heads", "width", "dot_product", "norm", "norm_order", "lr"),
        _approximation,
    ),
    "majority": Kept(("curves",), ("norm", "radius"), _majority),
    "majority_in_space": Kept(("coordinates", "scores"), ("norm", "radius"), _majority_in_space),
    "encoder": Kept(("seeds", "curves"), ("shape", "norm"), _encoder),
    "encoder_passages": Kept(("values",), ("shape", "norm"), _encoder_passages),
    "language_model": Kept(("seeds", "curves"), ("norm", "divisor"), _language_model),
    "language_model_full": Kept(("seeds", "curves"), ("norm", "divisor"), _language_model),
    "language_model_bundled": Kept(("seeds",), ("norm",), _bundled),
    "random_keys": Kept(("maps",), (), _random_keys),
    "remove_norm": Kept(("seeds", "curves"), ("model",), _remove_norm),
}


def table_at(where: Path, name: str) -> pd.DataFrame:
    """A table of a results folder, whichever way it was written.

    Raises:
        FileNotFoundError: the folder has none of that name.
    """
    if (where / f"{name}.parquet").exists():
        return pd.read_parquet(where / f"{name}.parquet")
    if (where / f"{name}.csv").exists():
        return pd.read_csv(where / f"{name}.csv")
    raise FileNotFoundError(f"{where} holds no table {name!r} (.csv or .parquet)")


def joined(kept: pd.DataFrame, added: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The rows of both, each run from one of them: the kept one unless the other has more steps.

    Raises:
        ValueError: a column that only one of them has.
    """
    if set(kept.columns) != set(added.columns):
        raise ValueError(
            f"columns differ: kept {', '.join(kept.columns)}; added {', '.join(added.columns)}: of another version?"
        )
    by = [*keys, "seed"]
    if "step" in kept:
        reached = [t.groupby(by, as_index=False)["step"].max() for t in (kept, added)]
        both = reached[0].merge(reached[1], on=by, how="outer", suffixes=("_kept", "_added"))
        newer = both[~(both["step_kept"] >= both["step_added"]) & both["step_added"].notna()]
    else:
        both = kept[by].drop_duplicates().merge(added[by].drop_duplicates(), on=by, how="outer", indicator=True)
        newer = both[both["_merge"] == "right_only"]
    new = set(newer[by].itertuples(index=False, name=None))
    old = [run not in new for run in kept[by].itertuples(index=False, name=None)]
    taken = [run in new for run in added[by].itertuples(index=False, name=None)]
    return pd.concat([kept[old], added[taken][list(kept.columns)]], ignore_index=True)


def check_added(experiment: str, added: Path, settings: Settings) -> tuple[str, ...]:
    """What became of the diverged runs of a folder that may be added; its other runs are as those that are kept.

    Raises:
        FileNotFoundError: no results in it.
        ValueError: of another experiment, of `--quick`, or made with other settings; or it has runs that diverged and
            the experiment counts those as misses, which kept tables cannot hold.
    """
    found = json.loads((added / RESULTS_FILE).read_text())
    if found["experiment"] != experiment:
        raise ValueError(f"{added} holds results of {found['experiment']}, not of {experiment}")
    mark = added / EXPERIMENT_FILE
    if mark.exists() and json.loads(mark.read_text()).get("quick"):
        raise ValueError(f"{added} was made with --quick: its runs are smaller than those that are kept")
    told = {k for k in settings if k in found["settings"] and k not in _OF_SEEDS and not k.startswith("published")}
    other = sorted(k for k in told if _plain(settings[k]) != _plain(found["settings"][k]))
    if other:
        said = "; ".join(f"{k}: {settings[k]} kept, {found['settings'][k]} added" for k in other)
        raise ValueError(f"{added} was made with other settings than what is kept of {experiment}: {said}")
    lost = tuple(found.get("diverged", ()))
    if lost and experiment in _COUNTS_MISSES:
        raise ValueError(f"{added} has runs that diverged, which {experiment} counts as misses: {'; '.join(lost)}")
    return lost


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def rebuilt(experiment: str, added: Path | None = None) -> Results:
    """The results of an experiment from the kept values, with those of the folder `added`.

    Raises:
        KeyError: an experiment of which nothing is kept.
        FileNotFoundError, ValueError: as `table_at`, `joined`, `check_added`; ValueError also if nothing can be added
            to it.
    """
    if experiment not in KEPT:
        raise KeyError(f"nothing is kept of {experiment!r}: known are {', '.join(KEPT)}")
    how, tables = KEPT[experiment], {}
    about: dict[str, Any] = {"settings": {}}
    try:
        where = folder(experiment)
        about = json.loads((where / RESULTS_FILE).read_text())
    except FileNotFoundError:
        if added is None:
            raise
        where, added = added, None
    lost = tuple(about.get("diverged", ()))
    if added is not None:
        lost += check_added(experiment, added, about["settings"])
    for name in how.tables:
        tables[name] = table_at(where, name)
        if added is not None:
            if not how.keys:
                raise ValueError(f"to {experiment} nothing can be added: its kept tables hold no seeds")
            tables[name] = joined(tables[name], table_at(added, name), how.keys)
    results = how.rebuild(tables, about["settings"])
    return replace(results, diverged=tuple(dict.fromkeys((*results.diverged, *lost))))


def with_seeds(command: str, results: Results) -> str:
    """The command with as many seeds as the results have: what was added counts."""
    seeds = [int(table["seed"].max()) + 1 for table in results.tables.values() if "seed" in table]
    return re.sub(r"--seeds \d+", f"--seeds {max(seeds)}", command) if seeds else command


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="make the kept results of an experiment again from their values")
    parser.add_argument("experiment", choices=sorted(KEPT), nargs="+")
    parser.add_argument("--add", type=Path, help="a folder that `ln-probe lab run NAME` wrote; of one experiment")
    args = parser.parse_args(argv)
    if args.add and len(args.experiment) > 1:
        parser.error("--add is for one experiment")
    for experiment in args.experiment:
        results = rebuilt(experiment, args.add)
        out = Path(__file__).parent / "published" / experiment
        command, seconds = f"python -m ln_probe.analyses.lab.keeping {experiment}", 0.0
        if (out / RESULTS_FILE).exists():
            before = json.loads((out / RESULTS_FILE).read_text())
            command, seconds = with_seeds(before["command"], results), before["seconds"]
        out.mkdir(exist_ok=True)
        write_results(
            results, out, experiment=experiment, command=command, ln_probe_version=version("ln-probe"), seconds=seconds
        )
        print(f"{experiment}: {len(results.summary)} rows, {len(results.conclusions)} sentences")


if __name__ == "__main__":
    main()
