"""How a model gets into memory: found, checked, converted, and compared with the original."""
