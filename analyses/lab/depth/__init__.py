"""Depth: C-RASP, its languages of alternating blocks, and which of them a transformer of each depth learns."""
