"""Small Hugging Face models with random weights, of many architectures and variants of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers

D, HEADS, VOCAB, CONTEXT = 32, 4, 50, 32


def cases(*quick: Any, slow: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrized test: those that always run, then those that only `make slow` runs.

    A tuple is a case of several arguments.
    """
    several = (case if isinstance(case, tuple) else (case,) for case in slow)
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in several)]


_LLAMA = {
    "hidden_size": D, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 80,
    "vocab_size": VOCAB, "max_position_embeddings": CONTEXT,
}  # fmt: skip
_GROUPED = _LLAMA | {"num_key_value_heads": 2}
_NARROW = _GROUPED | {"head_dim": 8}
_GPT2 = {"n_embd": D, "n_head": HEADS, "n_layer": 2, "n_positions": CONTEXT, "vocab_size": VOCAB}
_NEOX = _LLAMA | {"rotary_pct": 0.5}
_OPT = _LLAMA | {"ffn_dim": 80, "word_embed_proj_dim": D}
_FALCON = {key: value for key, value in _LLAMA.items() if key != "intermediate_size"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WINDOW = {"sliding_window": 8}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 2,
}  # fmt: skip

# Name: (model class, config class, options of the config).
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX),
    "opt": ("OPTForCausalLM", "OPTConfig", _OPT),
    "neo": ("GPTNeoForCausalLM", "GPTNeoConfig", {
        "hidden_size": D, "num_heads": HEADS, "num_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT,
        "attention_types": [[["global", "local"], 1]],
    }),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _LLAMA | {"num_key_value_heads": 1, "head_dim": 8}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _NARROW),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _LLAMA | {"num_key_value_heads": 1, "head_dim": 8}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _LLAMA),
    "bloom": ("BloomForCausalLM", "BloomConfig", {
        "hidden_size": D, "n_head": HEADS, "n_layer": 2, "vocab_size": VOCAB,
    }),
    "bert": ("BertForMaskedLM", "BertConfig", _LLAMA),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED | _WINDOW),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _NARROW | _WINDOW | {
        "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", _GPT2 | {"rotary_dim": 4}),
    "mpt": ("MptForCausalLM", "MptConfig", {
        "d_model": D, "n_heads": HEADS, "n_layers": 2, "max_seq_len": CONTEXT, "vocab_size": VOCAB,
    }),
    # Variants of these.
    "gpt2-scaled-by-layer": ("GPT2LMHeadModel", "GPT2Config", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": ("GPT2LMHeadModel", "GPT2Config", _GPT2 | {"scale_attn_weights": False}),
    "gpt2-narrow-mlp": ("GPT2LMHeadModel", "GPT2Config", _GPT2 | {"n_inner": 48}),
    "gpt2-untied": ("GPT2LMHeadModel", "GPT2Config", _GPT2 | {"tie_word_embeddings": False}),
    "neox-sequential": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX | {"use_parallel_residual": False}),
    "opt-350m": ("OPTForCausalLM", "OPTConfig", _OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "llama-biases": ("LlamaForCausalLM", "LlamaConfig", _LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("LlamaForCausalLM", "LlamaConfig", _LLAMA | {"head_dim": 16}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", _LLAMA | {"tie_word_embeddings": True}),
    "llama3-rope": ("LlamaForCausalLM", "LlamaConfig", _GROUPED | {"rope_parameters": _LLAMA3_ROPE}),
    "llama-dynamic-rope": ("LlamaForCausalLM", "LlamaConfig", _LLAMA | {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    }),
    "mistral-long": ("MistralForCausalLM", "MistralConfig", _GROUPED | {
        "sliding_window": None, "max_position_embeddings": 3000,
    }),
    "qwen3-long": ("Qwen3ForCausalLM", "Qwen3Config", _NARROW | {"max_position_embeddings": 3000}),
    # Others.
    "apertus": ("ApertusForCausalLM", "ApertusConfig", _GROUPED | {"rope_parameters": _ROPE}),
    "arcee": ("ArceeForCausalLM", "ArceeConfig", _GROUPED),
    "bert-decoder": ("BertLMHeadModel", "BertConfig", _LLAMA | {"is_decoder": True}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", _GPT2 | {"rotary_dim": 4}),
    "cohere": ("CohereForCausalLM", "CohereConfig", _GROUPED),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", _GROUPED | _WINDOW),
    "ernie4.5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", _NARROW),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", _NARROW | _WINDOW),
    "falcon": ("FalconForCausalLM", "FalconConfig", _FALCON),
    "falcon-alibi": ("FalconForCausalLM", "FalconConfig", _FALCON | {
        "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
    }),
    "falcon-40b": ("FalconForCausalLM", "FalconConfig", _FALCON | {
        "new_decoder_architecture": True, "num_kv_heads": 2,
    }),
    "glm": ("GlmForCausalLM", "GlmConfig", _NARROW | _MARKS),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", _NARROW | _MARKS),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT2),
    "gpt-bigcode-many-keys": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT2 | {"multi_query": False}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", _NARROW | _LOCAL_EXPERTS | _WINDOW | {"rope_parameters": _ROPE}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", _GROUPED | {
        "logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.2,
    }),
    "granite-moe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", _GROUPED | _LOCAL_EXPERTS),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", _NARROW),
    "jais2": ("Jais2ForCausalLM", "Jais2Config", _NARROW),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", _GROUPED | {"layer_types": ["conv", "full_attention"]}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {
        "hidden_size": D, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": 8,
    }),
    "ministral3": ("Ministral3ForCausalLM", "Ministral3Config", _NARROW),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _GROUPED | _LOCAL_EXPERTS),
    "modernbert-decoder": ("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", _LLAMA | _MARKS | {
        "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2,
    }),
    "nanochat": ("NanoChatForCausalLM", "NanoChatConfig", _GROUPED),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", _GROUPED),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", _LLAMA | _WINDOW),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", _LLAMA | _EXPERTS),
    "openai-gpt": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", _GPT2),
    "phi": ("PhiForCausalLM", "PhiConfig", _LLAMA),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _GROUPED | _MARKS),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", _GROUPED | _EXPERTS | {
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40,
    }),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _NARROW | _EXPERTS | {"moe_intermediate_size": 40}),
    "seed-oss": ("SeedOssForCausalLM", "SeedOssConfig", _NARROW),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", _GROUPED | _MARKS | {"no_rope_layers": [1, 0]}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", _GROUPED),
    "stablelm-parallel": ("StableLmForCausalLM", "StableLmConfig", _GROUPED | {
        "use_parallel_residual": True, "qk_layernorm": True,
    }),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", _GROUPED | _WINDOW),
    "vaultgemma": ("VaultGemmaForCausalLM", "VaultGemmaConfig", _NARROW | _WINDOW),
    "xglm": ("XGLMForCausalLM", "XGLMConfig", {
        "d_model": D, "attention_heads": HEADS, "num_layers": 2, "ffn_dim": 80, "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
    }),
}  # fmt: skip


def randomize(model: torch.nn.Module, seed: int = 1) -> None:
    """Weights of ordinary size with gains near 1 and biases that are not 0 (Gemma's gains are offsets from 1)."""
    generator = torch.Generator().manual_seed(seed)
    offset = "Gemma" in type(model).__name__
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            if parameter.ndim > 1:
                parameter.copy_(0.3 * noise)
            elif "norm" in name.lower() or "ln_" in name:
                base = 1.0 if name.endswith("weight") and not offset else 0.0
                parameter.copy_(base + 0.3 * noise)
            else:
                parameter.copy_(0.3 * noise)


def hugging_face(arch: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A Hugging Face model of one of ARCHITECTURES, in evaluation mode; `more`: options of its config."""
    name, config_name, options = ARCHITECTURES[arch]
    config = getattr(transformers, config_name)(**(options | more))
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).eval()
    randomize(model)
    return model.to(dtype)


def bridge_of(hf_model: Any) -> Any:
    """A TransformerBridge around that very model."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    name = type(hf_model).__name__
    return build_bridge_from_module(hf_model, name, hf_config=hf_model.config, tokenizer=None, model_name="tiny")


def hooked_transformer(**options: Any) -> Any:
    """A HookedTransformer with random weights; options go to HookedTransformerConfig.

    Raises:
        ImportError: This TransformerLens has none.
    """
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    torch.manual_seed(0)
    settings = {
        "n_layers": 2, "d_model": D, "n_heads": HEADS, "d_head": 8, "d_mlp": 80, "d_vocab": VOCAB, "n_ctx": CONTEXT,
        "act_fn": "gelu", "normalization_type": "LN", "default_prepend_bos": False, "device": "cpu",
    }  # fmt: skip
    return with_noise(HookedTransformer(HookedTransformerConfig(**(settings | options))))


def with_noise(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The model itself, with random numbers in place of its parameters: gains near 1, all others near 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
            parameter.copy_(1 + noise if name.endswith(".w") else noise)
    return model


def process(model: Any, of: Any = None, **what: bool) -> Any:
    """Fold or centre a HookedTransformer in place, with the weights of another one if `of` is given; what is not asked
    for (`fold_ln=True`) is left out."""
    left_out = dict.fromkeys(("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), False)
    model.load_and_process_state_dict((of or model).state_dict(), **(left_out | what))
    return model


def make_bridge(*given: Any, **more: Any) -> Any:
    """A bridge around a model of `hugging_face`, which takes the same arguments."""
    return bridge_of(hugging_face(*given, **more))


def folded_in_place(model: Any, *, centre: bool = False) -> Any:
    """A HookedTransformer or a bridge, folded in place."""
    if hasattr(model, "enable_compatibility_mode"):
        what = {"fold_ln": True, "center_writing_weights": centre, "center_unembed": False, "fold_value_biases": False}
        model.enable_compatibility_mode(disable_warnings=True, **what)
        return model
    return process(model, fold_ln=True, center_writing_weights=centre)


def make_folded(*given: Any, centre: bool = False, **more: Any) -> Any:
    """A bridge in compatibility mode."""
    return folded_in_place(make_bridge(*given, **more), centre=centre)


def make_twins(*given: Any) -> tuple[Any, Any, dict[int, str]]:
    """A Hugging Face model, a bridge around its copy, and the path in the original of each module that is wrapped."""
    original, wrapped = hugging_face(*given), hugging_face(*given)
    paths = {id(module): path for path, module in wrapped.named_modules()}
    return original, bridge_of(wrapped), paths


def make_hooked(**options: Any) -> Any:
    """`hooked_transformer`; a test that asks for it is skipped where TransformerLens has none."""
    try:
        return hooked_transformer(**options)
    except ImportError:
        pytest.skip("this TransformerLens has no HookedTransformer")


def norm_free(dtype: torch.dtype = torch.float32) -> Any:
    """A GPT-2 as norm-free checkpoints are released: eps 1e12 and gains times 1e6, Px divided by nothing that depends
    on x."""
    model = hugging_face("gpt2", dtype, layer_norm_epsilon=1e12)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_" in name and name.endswith("weight"):
                parameter.mul_(1e6)
    return model
