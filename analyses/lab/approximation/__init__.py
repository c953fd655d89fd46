"""Approximation: relative attention on sums of inputs and on text, beside the best that it can express."""
