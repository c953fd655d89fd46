"""C-RASP: programs, their compilation to transformer weights, and what transformers of each depth learn of them."""
