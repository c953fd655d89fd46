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
import json
import random
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import LN_PROBE, ROOT, environment_of, keep, measure_command, write_prompts

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
    given: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[int, int] = (0, 0)
    dtype: str = "float32"


LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
SHAPES = {
    "lm-layernorm": Shape(),
    "gpt2": Shape("GPT2Config", {"vocab_size": 50257}, (1, 128)),
    "pythia-160m": Shape(
        "GPTNeoXConfig",
        {
            "vocab_size": 50304,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "max_position_embeddings": 2048,
            "rotary_pct": 0.25,
        },
        (1, 64),
    ),
    "smollm2-135m, 4 layers": Shape(
        "LlamaConfig",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "num_hidden_layers": 4,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        (2, 64),
        "bfloat16",
    ),
    "llama-3-8b, 1 layer": Shape(
        "LlamaConfig", LLAMA_3_8B | {"num_hidden_layers": 1, "vocab_size": 16384}, (1, 64), "bfloat16"
    ),
    "pythia-12b, 1 layer": Shape(
        "GPTNeoXConfig",
        {
            "vocab_size": 16384,
            "hidden_size": 5120,
            "num_hidden_layers": 1,
            "num_attention_heads": 40,
            "intermediate_size": 20480,
            "max_position_embeddings": 2048,
            "rotary_pct": 0.25,
        },
        (1, 64),
        "bfloat16",
    ),
}


def checkpoint(shape: Shape, folder: Path) -> Path:
    """A folder as the model hub has it, with weights as they are initialized."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, shape.config)(**shape.given)
    dtype = getattr(torch, shape.dtype)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return folder


def prompts(shape: Shape, file: Path) -> str:
    rng, (count, length) = random.Random(0), shape.prompts
    vocabulary = shape.given["vocab_size"]
    return write_prompts(file, [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(count)])


def planned(arguments: list[str]) -> dict[str, float]:
    """Processor seconds, bytes and tokens that `plan` names."""
    command = [*LN_PROBE, "plan", *arguments, "--json", "--quiet"]
    done = subprocess.run(command, env=environment_of(), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    model = json.loads(done.stdout)["models"][0]
    return {"cpu": model["seconds"], "memory": model["memory_bytes"], "tokens": model["tokens"]}


def row(name: str, scratch: Path) -> tuple[object, ...]:
    shape = SHAPES[name]
    where, given = name, []
    if shape.config:
        where = str(checkpoint(shape, scratch / "model"))
        given = ["--prompts", prompts(shape, scratch / "prompts.jsonl"), "--dtype", shape.dtype]
    arguments = [where, "--out", str(scratch / "out"), "--workers", "0", *given]
    before = planned(arguments)
    then = measure_command([*LN_PROBE, "report", *arguments, "--quiet"])
    planned_gb, largest_gb = before["memory"] / 2**30, then["largest"] / 2**10
    count = shape.prompts[0] or "default"
    size = f"{planned_gb:.2f}", f"{largest_gb:.2f}", f"{planned_gb / largest_gb:.2f}"
    times = f"{before['cpu']:.0f}", f"{then['cpu']:.0f}", f"{before['cpu'] / then['cpu']:.2f}"
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
        keep(asked.out, COLUMNS, [made], order=list(SHAPES).index)


if __name__ == "__main__":
    main()
