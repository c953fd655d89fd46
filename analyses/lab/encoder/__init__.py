"""Encoders of BERT's shape, trained on masked text with and without each LayerNorm term, and fine-tuned to classify."""
