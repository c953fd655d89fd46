"""Check verdicts of keys a second way: a linear program (scipy) for each of a sample of those of docs/checkpoints.md.

    PYTHONPATH=examples/checkpoints python bench/keys_second_way.py lm-layernorm MGM CAPP-GPT    # 100 keys a layer

A query that selects a key scores it above every other key. The program asks for the query with entries in [-1, 1] that
does so by most; none does if that margin is 0. ln_probe loads the model and gives the verdict that is compared.
Margins are relative to the largest difference of two keys; scipy's solver meets its constraints to about 1e-7.
"""

import sys

import numpy as np
from keys_at_length import keys_of, model_and_contexts
from scipy.optimize import linprog

import ln_probe

for name in sys.argv[1:]:
    model, contexts = model_and_contexts(name)
    rng, found = np.random.default_rng(0), {"unselectable": 0, "selectable": 0, "on the edge": 0}
    for layer in range(model.cfg.n_layers):
        sets = keys_of(model, contexts, layer)["intact"].double().numpy()  # [context, position, head, d_head]
        for _ in range(100):
            context, key, head = (int(rng.integers(size)) for size in sets.shape[:3])
            keys = sets[context, :, head]
            others = np.delete(keys - keys[key], key, axis=0)  # others @ query <= -margin
            others = np.hstack([others / np.abs(others).max(), np.ones((len(others), 1))])
            box = [(-1, 1)] * keys.shape[1] + [(None, None)]
            margin = -linprog([0] * keys.shape[1] + [-1], others, np.zeros(len(others)), bounds=box).fun
            verdict = "unselectable" if margin < 1e-8 else "selectable" if margin > 1e-6 else "on the edge"
            same = (ln_probe.key_geometry(keys, margins=False).verdict[key] == "unselectable") == (margin < 1e-8)
            assert same or verdict == "on the edge", (layer, context, head, key)
            found[verdict] += 1
    print(name, found, flush=True)
