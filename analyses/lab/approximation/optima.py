"""`python -m ln_probe.analyses.lab.approximation.optima` makes the kept table of attainable errors anew."""

from __future__ import annotations

from ln_probe.analyses.lab.approximation.approximation import optimum_table
from ln_probe.analyses.lab.published import folder
from ln_probe.analyses.machinery.files import write_atomically


def main() -> None:
    """Write `published/approximation/optima.csv`."""
    text = optimum_table().to_csv(index=False, float_format="%.6g")
    write_atomically(folder("approximation") / "optima.csv", text.encode())


if __name__ == "__main__":
    main()
