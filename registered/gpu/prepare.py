"""Write plan.json and the token arrays of items 5 and 4, from the registered driver itself.

    python registered/gpu/prepare.py --texts FOLDER --out FOLDER/data     # from the root of this branch
"""
import argparse
import json
import lzma
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, "registered")
import drive


class Stop(Exception):
    pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plan = []

    def record(task, spec, training, out):
        name = f"item-{item}"
        if not (args.out / f"{name}.json").exists():
            tokens = np.concatenate([task.train_tokens.numpy(), task.valid_tokens.numpy()])
            assert tokens.max() < 2**16
            (args.out / f"{name}.tokens.xz").write_bytes(lzma.compress(tokens.astype("<u2").tobytes(), preset=9))
            (args.out / f"{name}.tokenizer.xz").write_bytes(lzma.compress(task.tokenizer.to_str().encode(), preset=9))
            about = {"train": len(task.train_tokens), "n_ctx": task.n_ctx, "d_vocab": task.d_vocab,
                     "valid_windows": task.valid_windows, "boundary": task.boundary, "identity": task.identity}
            (args.out / f"{name}.json").write_text(json.dumps(about, indent=1))
        plan.append({"item": item, "cell": cell, "seed": seed, "folder": str(out), "model": spec.to_dict(),
                     "training": asdict(training)})
        raise Stop

    drive.trained = record
    for item in (5, 4):
        cells = list(drive.work(item, args.texts))
        for seed in drive.SEEDS[item]:
            for cell, rows in cells:
                folder = Path("runs") / f"item-{item}" / f"{cell.replace(', ', '-').replace(' ', '_')}-seed{seed}"
                try:
                    list(rows(seed, folder))
                except Stop:
                    pass
    (args.out / "plan.json").write_text(json.dumps(plan, indent=1))
    print(len(plan), "runs")


main()
