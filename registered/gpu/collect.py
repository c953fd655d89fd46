"""Unpack what run.py brought back into the driver's folder of runs; then `drive.py 5 4` finds them finished.

    python registered/gpu/collect.py BROUGHT --out FOLDER        # the driver's --out
"""
import argparse
import json
import lzma
import tarfile
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"

parser = argparse.ArgumentParser()
parser.add_argument("brought", type=Path)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--data", type=Path, default=DATA)
args = parser.parse_args()
for path in sorted(args.brought.glob("item-*.tgz")):
    with tarfile.open(path) as tar:
        tar.extractall(args.out, filter="data")
for each in json.loads((args.data / "plan.json").read_text()):
    folder = args.out / each["folder"]
    if folder.is_dir():
        tokenizer = args.data / f"item-{each['item']}.tokenizer.xz"
        (folder / "tokenizer.json").write_bytes(lzma.decompress(tokenizer.read_bytes()))
        print(folder.name, "finished" if (folder / "model.safetensors").exists() else "unfinished")
