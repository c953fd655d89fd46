"""The command line, as `ln-probe` and as `python -m ln_probe`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. Ctrl-C while its modules are imported ends it with a message, too."""
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
