"""Counting: recurrent networks and a transformer on counter languages, with each LayerNorm term inside the cell."""
