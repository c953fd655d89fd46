"""`python -m ln_probe.analyses.lab.language_model` trains one of the models that ship with ln_probe."""

from ln_probe.analyses.lab.language_model.bundled_seeds import main

main()
