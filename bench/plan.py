"""What `ln-probe plan` says beforehand next to what the same report then takes: processor time and memory.

Six shapes: lm-layernorm, and random weights (seed 0) in Hugging Face folders of the shapes of GPT-2 small,
Pythia-160m, four layers of SmolLM2-135m (in bfloat16), one of Llama-3-8B and one of Pythia-12B (in bfloat16, vocabulary
16,384). Prompts are random token ids; lm-layernorm has its own. Every report is the default one, a whole command in one
process (`--workers 0`); memory is its largest resident set. Kernels are warm; other work makes seconds longer, not
memory.

    python bench/plan.py                             all six, twenty minutes
    python bench/plan.py --shapes gpt2 pythia-160m
    python bench/plan.py --out bench/results/plan.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-c", "from ln_probe.cli import app; app()"]
COLUMNS = (
    *("shape", "dtype", "prompts", "tokens", "planned_cpu_s", "cpu_s", "cpu_ratio"),
    *("planned_gb", "largest_gb", "memory_ratio"),
)


@dataclass(frozen=True)
class Shape:
    """A model's configuration (class of transformers, its arguments), and prompts: how many of how many tokens.

    A model without a configuration is a bundled one, and its prompts are its own.
    """

    config: str = ""
    given: tuple[tuple[str, Any], ...] = ()
    prompts: tuple[int, int] = (0, 0)
    dtype: str = "float32"


def _given(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


LLAMA_3_8B = _given(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
)
SHAPES = {
    "lm-layernorm": Shape(),
    "gpt2": Shape("GPT2Config", _given(vocab_size=50257), (1, 128)),
    "pythia-160m": Shape(
        "GPTNeoXConfig",
        _given(
            vocab_size=50304,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            max_position_embeddings=2048,
            rotary_pct=0.25,
        ),
        (1, 64),
    ),
    "smollm2-135m, 4 layers": Shape(
        "LlamaConfig",
        _given(
            vocab_size=49152,
            hidden_size=576,
            num_hidden_layers=4,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
        (2, 64),
        "bfloat16",
    ),
    "llama-3-8b, 1 layer": Shape(
        "LlamaConfig", (*LLAMA_3_8B, ("num_hidden_layers", 1), ("vocab_size", 16384)), (1, 64), "bfloat16"
    ),
    "pythia-12b, 1 layer": Shape(
        "GPTNeoXConfig",
        _given(
            vocab_size=16384,
            hidden_size=5120,
            num_hidden_layers=1,
            num_attention_heads=40,
            intermediate_size=20480,
            max_position_embeddings=2048,
            rotary_pct=0.25,
        ),
        (1, 64),
        "bfloat16",
    ),
}


def checkpoint(shape: Shape, folder: Path) -> Path:
    """A folder as the model hub has it, with weights as they are initialized."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, shape.config)(**dict(shape.given))
    dtype = getattr(torch, shape.dtype)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return folder


def prompts(shape: Shape, file: Path) -> Path:
    rng, (count, length) = random.Random(0), shape.prompts
    vocabulary = dict(shape.given)["vocab_size"]
    rows = [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
    file.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    return file


def _ran(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[:5])} … failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return done


def planned(arguments: list[str]) -> dict[str, float]:
    """Processor seconds, bytes and tokens that `plan` names."""
    model = json.loads(_ran([*COMMAND, "plan", *arguments, "--json", "--quiet"]).stdout)["models"][0]
    return {"cpu": model["seconds"], "memory": model["memory_bytes"], "tokens": model["tokens"]}


def measured(arguments: list[str]) -> dict[str, float]:
    """Processor seconds of all processes of the report, bytes of the largest one."""
    inner = (
        "import json, resource, subprocess, sys; "
        "done = subprocess.run(json.loads(sys.argv[1]), stdout=sys.stderr); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024])); sys.exit(done.returncode)"
    )
    done = _ran([sys.executable, "-c", inner, json.dumps([*COMMAND, "report", *arguments, "--quiet"])])
    cpu, memory = json.loads(done.stdout.splitlines()[-1])
    return {"cpu": cpu, "memory": memory}


def row(name: str, scratch: Path) -> tuple[object, ...]:
    shape = SHAPES[name]
    where, given = name, []
    if shape.config:
        where = str(checkpoint(shape, scratch / "model"))
        given = ["--prompts", str(prompts(shape, scratch / "prompts.jsonl")), "--dtype", shape.dtype]
    arguments = [where, "--out", str(scratch / "out"), "--workers", "0", *given]
    before, then = planned(arguments), measured(arguments)
    ratios = {what: before[what] / then[what] for what in then}
    count = shape.prompts[0] or "default"
    size = f"{before['memory'] / 2**30:.2f}", f"{then['memory'] / 2**30:.2f}", f"{ratios['memory']:.2f}"
    times = f"{before['cpu']:.0f}", f"{then['cpu']:.0f}", f"{ratios['cpu']:.2f}"
    return name, shape.dtype, count, f"{before['tokens']:.0f}", *times, *size


def main() -> None:
    given = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    given.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    given.add_argument("--out", type=Path, help="a CSV file for the table; rows of other shapes in it are kept")
    asked = given.parse_args()
    print(",".join(COLUMNS), flush=True)
    for name in asked.shapes:
        with tempfile.TemporaryDirectory() as scratch:
            made = row(name, Path(scratch))
        print(",".join(f'"{v}"' if "," in str(v) else str(v) for v in made), flush=True)
        if asked.out:
            _keep(made, asked.out)


def _keep(made: tuple[object, ...], path: Path) -> None:
    """Put a row into the table, in the place of the shape's earlier one."""
    rows: dict[str, list[str]] = {}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            rows = {r[0]: r for r in list(csv.reader(file))[1:]}
    rows[str(made[0])] = [str(v) for v in made]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *(rows[name] for name in SHAPES if name in rows)])


if __name__ == "__main__":
    main()
