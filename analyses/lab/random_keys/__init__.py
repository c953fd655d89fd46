"""Random keys: how often some key cannot be selected, with LayerNorm and without."""
