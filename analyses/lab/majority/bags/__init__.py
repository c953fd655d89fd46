"""Bags of tokens: the exact loss of a one-layer model from one row per distinct token."""
