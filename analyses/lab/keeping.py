"""Kept results are regenerated from the committed values of every seed:

    python -m ln_probe.analyses.lab.keeping NAME                # from the kept values alone
    python -m ln_probe.analyses.lab.keeping NAME --add DIR      # and those of a folder that `lab run NAME` wrote

A run is identified by its keys and its seed. Where both have it, the kept one stays, unless the other has more steps.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from ln_probe.analyses.lab.experiments import EXPERIMENT_FILE, EXPERIMENTS
from ln_probe.analyses.lab.results import PUBLISHED_FOLDER, RESULTS_FILE, Results, folder, table_at, write_results

KNOWN = tuple(name for name, experiment in EXPERIMENTS.items() if experiment.kept.tables)  # of which results are kept
_OF_SEEDS = ("seeds", "finished")  # settings that list the runs
_COUNTS_MISSES = ("depth", "depth_deep")


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
    steps = [t if "step" in t else t.assign(step=0) for t in (kept, added)]
    reached = [t.groupby(by, as_index=False, dropna=False)["step"].max() for t in steps]
    both = reached[0].merge(reached[1], on=by, how="outer", suffixes=("_kept", "_added"))
    newer = both[~(both["step_kept"] >= both["step_added"]) & both["step_added"].notna()]
    new = set(newer[by].itertuples(index=False, name=None))
    old = [run not in new for run in kept[by].itertuples(index=False, name=None)]
    taken = [run in new for run in added[by].itertuples(index=False, name=None)]
    return pd.concat([kept[old], added[taken][list(kept.columns)]], ignore_index=True)


def check_added(experiment: str, added: Path, settings: Mapping[str, Any]) -> tuple[str, ...]:
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
    other = sorted(k for k in told if not _agree(settings[k], found["settings"][k]))
    if other:
        said = "; ".join(f"{k}: {settings[k]} kept, {found['settings'][k]} added" for k in other)
        raise ValueError(f"{added} was made with other settings than the kept results of {experiment}: {said}")
    lost = tuple(found.get("diverged", ()))
    if lost and experiment in _COUNTS_MISSES:
        raise ValueError(f"{added} has runs that diverged, which {experiment} counts as misses: {'; '.join(lost)}")
    return lost


def _agree(kept: Any, added: Any) -> bool:
    """Equal; of settings by cell, those of the cells that both have."""
    if isinstance(kept, dict) and isinstance(added, dict):
        return all(kept[k] == added[k] for k in kept.keys() & added.keys())
    return bool(kept == added)


def rebuilt(experiment: str, added: Path | None = None) -> Results:
    """The results of an experiment from the kept values, with those of the folder `added`.

    Raises:
        KeyError: an experiment of which nothing is kept.
        FileNotFoundError, ValueError: as `table_at`, `joined`, `check_added`; ValueError also if nothing can be added
            to it.
    """
    if experiment not in KNOWN:
        raise KeyError(f"nothing is kept of {experiment!r}: known are {', '.join(KNOWN)}")
    how, tables = EXPERIMENTS[experiment].kept, {}
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
    findings = getattr(importlib.import_module(EXPERIMENTS[experiment].module), how.function)
    results: Results = findings(*tables.values(), *([about["settings"]] if how.with_settings else []))
    return replace(results, diverged=tuple(dict.fromkeys((*results.diverged, *lost))))


def with_seeds(command: str, results: Results) -> str:
    """The command with as many seeds as the results have, from an experiment's first on: what was added counts."""
    seeds = [int(table["seed"].max() - table["seed"].min()) + 1 for table in results.tables.values() if "seed" in table]
    return re.sub(r"--seeds \d+", f"--seeds {max(seeds)}", command) if seeds else command


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="make the kept results of an experiment again from their values")
    parser.add_argument("experiment", choices=sorted(KNOWN), nargs="+")
    parser.add_argument("--add", type=Path, help="a folder that `ln-probe lab run NAME` wrote; of one experiment")
    args = parser.parse_args(argv)
    if args.add and len(args.experiment) > 1:
        parser.error("--add is for one experiment")
    for experiment in args.experiment:
        results = rebuilt(experiment, args.add)
        out = PUBLISHED_FOLDER / experiment
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
