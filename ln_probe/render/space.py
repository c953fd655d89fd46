"""Keys and queries in three dimensions, to be turned by mouse, finger or keyboard.

    python -m ln_probe.render.space > docs/_static/majority_in_space.html     # of the kept results

Drawn by a script of the page itself, from the coordinates that the experiment `majority_in_space` writes; nothing is
fetched, and what is seen stands beside it in words and as a table.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float32
from markupsafe import Markup

from ln_probe.analyses.lab.keeping import table_at
from ln_probe.analyses.lab.majority.majority_in_space import COORDINATES, ROLES, STAGES, D
from ln_probe.analyses.lab.published import folder
from ln_probe.render.page import environment
from ln_probe.render.payload import own_script, packed, policy

SCRIPTS = ("unpack.js", "space.js")
TABLE = "coordinates"  # of an experiment's results
STAGE_NAMES = {"stream": "stream", "projected": "projection", "scaled": "scaling", "both": "both terms"}


def space_data(coordinates: pd.DataFrame) -> str:
    """Coordinates as the script takes them: what can be chosen, and one array over all of it (NaN where nothing is).

    Raises:
        ValueError: other columns than COORDINATES, nothing in it, or two rows for one point.
    """
    if list(coordinates.columns) != COORDINATES or coordinates.empty:
        found = ", ".join(map(str, coordinates.columns))
        raise ValueError(
            f"points to draw have the columns {', '.join(COORDINATES)}; found {len(coordinates)} of {found}"
        )
    models = list(dict.fromkeys(zip(coordinates["norm"], coordinates["radius"], strict=True)))
    seeds, steps, tokens = (sorted(set(coordinates[c].tolist())) for c in ("seed", "step", "token"))
    at = [
        [models.index(pair) for pair in zip(coordinates["norm"], coordinates["radius"], strict=True)],
        *([values.index(v) for v in coordinates[c]] for c, values in (("seed", seeds), ("step", steps))),
        [STAGES.index(s) for s in coordinates["stage"]],
        [ROLES.index(r) for r in coordinates["role"]],
        [tokens.index(t) for t in coordinates["token"]],
    ]
    if len(set(zip(*at, strict=True))) != len(coordinates):
        raise ValueError("two rows of coordinates for one point")
    shape = (len(models), len(seeds), len(steps), len(STAGES), len(ROLES), len(tokens), D)
    points: Float32[np.ndarray, "model seed step stage role token axis"] = np.full(shape, np.nan, np.float32)
    points[tuple(np.array(index) for index in at)] = coordinates[["x", "y", "z"]].to_numpy(np.float32)
    return packed({
        "models": [f"{norm}, radius {radius}" for norm, radius in models],
        "seeds": seeds,
        "steps": steps,
        "stages": [STAGE_NAMES[s] for s in STAGES],
        "tokens": tokens,
        "points": points,
    })  # fmt: skip


def space_part(coordinates: pd.DataFrame) -> Markup:
    """The picture with its controls, for a page whose script holds SCRIPTS and whose styles hold `space.css`."""
    return Markup(environment().get_template("space_part.html").render(data=space_data(coordinates)))


def space_page(coordinates: pd.DataFrame) -> str:
    """A page of its own, which opens offline and can stand in a frame."""
    script = own_script(*SCRIPTS)
    return (
        environment()
        .get_template("space.html")
        .render(space=space_part(coordinates), policy=policy(script), script=Markup(script))
    )


if __name__ == "__main__":
    print(space_page(table_at(folder("majority_in_space"), TABLE)), end="")
