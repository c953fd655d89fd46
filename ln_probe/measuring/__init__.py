"""From a model and prompts to a report: the passes over the prompts, and what is made of their pieces."""
