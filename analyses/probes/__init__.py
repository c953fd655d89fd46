"""The probes: one module each. `protocol` says what a probe is, `registry` which there are."""
