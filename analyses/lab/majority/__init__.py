"""Majority: what projection and scaling buy a transformer that has to attend uniformly."""
