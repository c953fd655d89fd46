"""Approximation: relative attention on sums of inputs and on text compared with the best that it can express."""
