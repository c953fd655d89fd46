"""Train items 5 and 4 side by side on a GPU, then item 2 on its processors; what is done goes to --out.

    python3 run.py --out $OUT --work /tmp/runs --seconds 430
"""
import argparse
import hashlib
import json
import lzma
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKS = {  # each at most 16 MiB, also where nothing is finished
    "item-5-a.tgz": (5, range(30, 35)), "item-5-b.tgz": (5, range(35, 40)),
    "item-4-a.tgz": (4, (10,)), "item-4-b.tgz": (4, (11,)), "item-4-c.tgz": (4, (12,)),
}
LEFT_OUT = {"checkpoints", ".lock", "tokenizer.json"}  # the tokenizer is written again when the runs are unpacked


RATES, SIZES = (1e-3, 3e-3, 8e-3), {"published": 8**-0.5, "equal": None}  # as in drive.py
PROJECTION = {"projection": "layernorm", "none": "scaling_only"}
LEVEL, CAP, CHUNK = 0.4, 12_000, 500
MAJORITY = [(rate, seed) for seed in range(19, 9, -1) for rate in RATES]  # from the last: another machine begins at 10
MEASURES = {2: ("train_loss", "test_accuracy", "angle_deg"), 4: ("train_loss", "valid_loss")}


def plan():
    return json.loads((HERE / "data" / "plan.json").read_text())


def majority(rate, seed, work):
    """The four cells of a rate and seed, as drive.py trains them."""
    sys.path.insert(0, str(HERE / "package"))
    import torch
    from ln_probe.analyses.lab.majority.majority_task import EPOCH, MajorityTask, majority_model, published_training
    from ln_probe.analyses.lab.run_folder import read_metrics
    from ln_probe.analyses.lab.train import DivergedError, train

    torch.set_num_threads(1)
    task = MajorityTask(seed)
    digest = hashlib.sha256(task.data[0].counts.tobytes() + task.data[0].chosen.tobytes()).hexdigest()[:16]
    print(f"rate {rate:g}, seed {seed}: data {digest}", flush=True)
    for size in SIZES:
        for projection in PROJECTION:
            cell, began = f"rate {rate:g}, {size} size, {projection}", time.time()
            out = work / "runs" / "item-2" / f"{cell.replace(', ', '-').replace(' ', '_')}-seed{seed}"
            training = published_training(CAP, seed, lr=rate, evaluate_every=100, decay_steps=EPOCH * 10_000)
            spec, lines = majority_model(PROJECTION[projection], SIZES[size]), []
            try:
                for until in range(CHUNK, CAP + 1, CHUNK):
                    train(task, spec, training, out, until=until, progress=False)
                    metrics = read_metrics(out)
                    if (metrics["train_loss"] <= LEVEL).any():
                        break
                lines = [f'"{cell}",{seed},{row["step"]:.0f},{name},{row[name]:.7g}'
                         for row in metrics.to_dict("records") for name in MEASURES[2]]
            except DivergedError:
                lines = [f'"{cell}",{seed},-1,diverged,1']
            (out / "rows.csv").write_text("\n".join(lines) + "\n")
            print(f"{out.name}: {time.time() - began:.0f} s", flush=True)


def train_one(index, work, device, steps):
    sys.path.insert(0, str(HERE / "package"))
    import numpy as np
    import torch
    from ln_probe.analyses.lab import text_task, train
    from ln_probe.analyses.lab.transformer import LabConfig

    torch.set_num_threads(1)
    each = plan()[index]
    data = HERE / "data" / f"item-{each['item']}"
    about = json.loads(data.with_suffix(".json").read_text())
    if device == "cuda":
        text_task.PIECE = 2048  # logits of all positions at once: 0.4 GB

    class Tokens(text_task.TextTask):
        """The task of the driver from its token arrays; held-out windows on the device, too."""

        def __init__(self):
            ids = np.frombuffer(lzma.decompress(Path(f"{data}.tokens.xz").read_bytes()), "<u2").astype(np.int64)
            self.train_tokens, self.valid_tokens = (
                torch.from_numpy(ids[: about["train"]]), torch.from_numpy(ids[about["train"]:]))
            self.n_ctx, self.d_vocab = about["n_ctx"], about["d_vocab"]
            self.valid_windows, self.boundary = about["valid_windows"], about["boundary"]

        identity = property(lambda self: about["identity"])

        @torch.no_grad()
        def evaluate(self, model):
            model.to(device)
            windows = self.held_out(self.valid_windows).to(device)
            losses = [float(self.loss(model, part)) * len(part) for part in windows.split(16)]
            return {"valid_loss": sum(losses) / len(windows)}

        def write_files(self, out):
            (out / "tokenizer.json").write_bytes(lzma.decompress(Path(f"{data}.tokenizer.xz").read_bytes()))

    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in each["training"].items()}
    task, spec, training = Tokens(), LabConfig(**each["model"]), train.TrainConfig(**settings)
    folder = work / each["folder"]
    torch.manual_seed(training.seed)
    weights = torch.cat([p.detach().flatten() for p in spec.build().parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    card = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{each['folder']}: initial weights {digest}, torch {torch.__version__}, {card}", flush=True)
    began = time.time()
    try:
        train.train(task, spec, training, folder, progress=False, device=device, until=steps)
    except RuntimeError as error:
        if "determinis" not in str(error):
            raise
        print(f"{each['folder']}: without deterministic algorithms ({str(error)[:90]})", flush=True)
        from contextlib import nullcontext

        train._deterministic = lambda _: nullcontext()
        torch.use_deterministic_algorithms(False)
        train.train(task, spec, training, folder, progress=False, device=device, until=steps)
    print(f"{each['folder']}: {time.time() - began:.0f} s", flush=True)


def write_values(out, work):
    """item-5.csv and item-4.csv of all evaluations so far, item-2.csv of ended runs; returns steps and ended runs."""
    ended = sorted((work / "runs" / "item-2").glob("*/rows.csv"))
    rows, reached = {5: [], 4: [], 2: [path.read_text().strip() for path in ended]}, []
    for each in plan():
        path = work / each["folder"] / "metrics.jsonl"
        last = 0
        for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
            if line.endswith("\n"):
                row = json.loads(line)
                last = row["step"]
                cell = f'"{each["cell"]}"' if "," in each["cell"] else each["cell"]
                rows[each["item"]] += [f"{cell},{each['seed']},{last},{name},{row[name]:.7g}"
                                       for name in MEASURES[4]]
        reached.append(last)
    for item, lines in rows.items():
        part = out / f".item-{item}.csv"
        part.write_text("\n".join(["cell,seed,step,measure,value", *lines]) + "\n")
        part.replace(out / f"item-{item}.csv")
    return reached, len(ended)


def pack(out, work):
    for name, (item, seeds) in PACKS.items():
        with tarfile.open(out / name, "w:gz", compresslevel=1) as tar:
            for each in plan():
                if each["item"] == item and each["seed"] in seeds:
                    for path in sorted((work / each["folder"]).glob("*")):
                        if path.name not in LEFT_OUT:
                            tar.add(path, f"{each['folder']}/{path.name}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=430, help="then stop, and pack what there is")
    parser.add_argument("--items", type=int, nargs="+", default=[5, 4, 2])
    parser.add_argument("--steps", type=int, help="stop after so many: to rehearse")
    parser.add_argument("--jobs", type=int, default=18)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        if args.one.startswith("majority"):
            majority(*MAJORITY[int(args.one.removeprefix("majority"))], args.work)
        else:
            train_one(int(args.one), args.work, args.device, args.steps)
        return
    began, out = time.time(), args.out
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    waiting = [i for i, each in enumerate(plan()) if each["item"] in args.items]
    waiting.sort(key=lambda i: plan()[i]["item"])  # the longer runs first
    waiting += [f"majority{i}" for i in range(len(MAJORITY))] if 2 in args.items else []
    running, failed = {}, 0
    args.work.mkdir(parents=True, exist_ok=True)
    with (args.work / "log.txt").open("a") as log:
        last = 0.0
        while waiting or running:
            while waiting and len(running) < args.jobs:
                i = waiting.pop(0)
                command = [sys.executable, __file__, "--one", str(i), "--work", args.work, "--device", args.device]
                command += ["--steps", str(args.steps)] if args.steps else []
                running[i] = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment)
            time.sleep(0.5)
            for i in [i for i, process in running.items() if process.poll() is not None]:
                failed += running.pop(i).returncode != 0
            if time.time() - last > 10:
                last = time.time()
                print(f"{last - began:.0f} s: steps {write_values(out, args.work)}", flush=True)
            if time.time() - began > args.seconds:
                for process in running.values():
                    process.kill()
                for process in running.values():
                    process.wait()
                print(f"stopped: {len(running)} runs unfinished, {len(waiting)} not begun", flush=True)
                break
    print(f"{time.time() - began:.0f} s: steps {write_values(out, args.work)}", flush=True)
    pack(out, args.work)
    print(f"{time.time() - began:.0f} s: packed; {failed} failed", flush=True)
    print((args.work / "log.txt").read_text()[-8000:], flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
