"""Norms taken out of a trained language model, one by one, while it is fine-tuned."""
