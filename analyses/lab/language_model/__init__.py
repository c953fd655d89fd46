"""Language models and encoders on text: those that ship with ln_probe, the published experiments, norms removed."""
