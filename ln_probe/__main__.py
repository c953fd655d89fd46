"""The command line, as `ln-probe` and as `python -m ln_probe`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command. Ctrl-C while its modules are imported ends it with a message, too."""
    # Threads wait asleep. Those that wait spinning take, beside other processes, the time that a working one needs. On
    # idle cores both are as fast. (Read once, when torch is imported.)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from ln_probe.analyses.processes import stop_on_signals

        stop_on_signals()
        from ln_probe.cli import main as command
    except KeyboardInterrupt as stop:
        print(f"ln-probe: {getattr(stop, 'message', 'stopped')}", file=sys.stderr)
        sys.exit(getattr(stop, "status", 130))
    command()


if __name__ == "__main__":
    main()
