"""The command line, as `ln-probe` and as `python -m ln_probe`."""

from __future__ import annotations

import os
import signal
import sys
from io import TextIOWrapper
from typing import cast


def main() -> None:
    """Run the command line; SIGTERM, which Slurm sends before a job's time is over, ends it as Ctrl-C does."""
    # Threads wait asleep: those that spin take the time of other processes. Torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):  # consoles that lack a character show its number
        cast(TextIOWrapper, stream).reconfigure(errors="backslashreplace")
    from ln_probe.cli import app

    app()


if __name__ == "__main__":
    main()
