"""Language models on text: the ones that ship with ln_probe, and the published experiment."""
