"""`python -m ln_probe` is the command line."""

from ln_probe.cli import main

main()
