"""An edit made permanent: a Hugging Face folder whose norms compute the edited form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import make_bridge, make_hooked
from compose import distance as largest

import ln_probe
from ln_probe.analyses.lab.run_folder import save_model
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.hooks import find_sites, make_permanent, without
from ln_probe.hooks.edits import InterventionError

TOKENS = torch.arange(3, 23).view(2, 10)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_saved_norm_free_model_gives_the_logits_of_the_edited_one(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_bridge(architecture)
    with torch.no_grad():
        intact = model(TOKENS)
        with without(model, "scaling", sites="all", scale="uniform") as edit:
            wanted = model(TOKENS)
        permanent = make_permanent(model, "scaling")
        assert torch.equal(model(TOKENS), intact)
        assert permanent.sites == edit.sites
        assert permanent.divisors == edit.divisors
        folder = permanent.save(tmp_path / "free")
        again = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert largest(again(TOKENS).logits, wanted) < 1e-5
        assert largest(wanted, intact) > 1e-2
        loaded: Any = ln_probe.load_model(folder)
        assert largest(loaded(TOKENS), wanted) < 1e-5
    assert not any(s.scales for s in find_sites(loaded))
    (file := tmp_path / "file.txt").write_text("mine")
    for wrong, error, said in ((file, FileExistsError, r"file\.txt is a file: give a folder"),
                               (None, TypeError, "give a folder to write to, got None"),
                               ("", ValueError, "give a folder to write to, got ''")):  # fmt: skip
        with pytest.raises(error, match=said):
            permanent.save(wrong)  # type: ignore[arg-type]
    assert file.read_text() == "mine"


def test_a_lab_model_in_the_shape_of_gpt2(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = ln_probe.load_model("lm-layernorm")
    permanent = make_permanent(model, "scaling", tokens=TOKENS)
    again = AutoModelForCausalLM.from_pretrained(permanent.save(tmp_path / "free")).eval()
    with torch.no_grad(), without(model, "scaling", sites="all", scale="uniform", tokens=TOKENS):
        assert largest(again(TOKENS).logits, model(TOKENS)) < 1e-5


def test_what_has_no_standard_form_is_refused(tmp_path: Path) -> None:
    """Lab models with an unembedding bias are those that shipped with version 0.2."""
    config = LabConfig(n_layers=1, d_model=16, n_heads=2, d_vocab=32, n_ctx=24)
    biased = config.build()
    with torch.no_grad():
        biased.unembed.b_U[3] = 1.0
    save_model(biased, tmp_path / "model.safetensors")
    (tmp_path / "lab.json").write_text(json.dumps({"format": 1, "task": "none", "model": config.to_dict()}))
    model, number = make_bridge("gpt2"), {"what": "scaling", "scale": 2.0}
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (model, {"what": "both"}, "has no standard form without projection: a LayerNorm always subtracts the mean"),
        (model, {"what": "projection"}, "has no standard form without projection"),
        (model, {"what": "scaling", "sites": "attention"}, r"blocks\.0\.ln2 would still scale: a config holds one eps"),
        (model, {"what": "scaling", "scale": "frozen"}, r"blocks\.0\.ln1 has a separate constant at position 0"),
        (make_hooked(), number, "a HookedTransformer holds no Hugging Face model to edit: load the"),
        (ln_probe.load_model(tmp_path), number, "the model has no standard form: a GPT2LMHeadModel has no unembedding"),
    ]
    for each, arguments, message in refused:
        with pytest.raises(InterventionError, match=message):
            make_permanent(each, **arguments)
