# SPDX-License-Identifier: Apache-2.0
"""Tiny random models in every supported shape, made by transformers."""

from __future__ import annotations

import torch
import transformers

VOCAB_SIZE = 160

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Head size 32 where not said otherwise: hidden 64 over 2 heads would not have grouped queries.
_HEAD = {"head_dim": 32}

# Layers of both kinds, the last one with a window, in no multiple of the pattern.
_GEMMA3 = {
    "hidden_size": 72,  # whose root is not exact in 16 bits
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "query_pre_attn_scalar": 32,
    "num_key_value_heads": 1,
}
_GEMMA3["layer_types"] = _GEMMA3["layer_types"][:5]
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

VARIANTS = {
    "llama_untied": ("Llama", _HEAD),
    "llama_tied": ("Llama", _HEAD | {"tie_word_embeddings": True}),
    "llama_one_kv_head": ("Llama", _HEAD | {"num_key_value_heads": 1}),
    "llama_biases": ("Llama", _HEAD | {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3_rope": ("Llama", _HEAD | {"rope_parameters": _LLAMA3_ROPE}),
    "llama_linear_rope": (
        "Llama",
        _HEAD | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", _HEAD | {"sliding_window": None}),
    "mistral_sliding_window": ("Mistral", _HEAD | {"sliding_window": 7}),
    # Qwen2 has no head_dim of its own: hidden / heads = 32.
    "qwen2": ("Qwen2", {"hidden_size": 128}),
    "qwen3": ("Qwen3", _HEAD | {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3", _HEAD | _GEMMA3),
    "gemma3_linear_rope": (
        "Gemma3",
        _HEAD | _GEMMA3 | {"rope_parameters": _GEMMA3_ROPE, "query_pre_attn_scalar": 20},
    ),
}


def make_tiny(variant: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A random model; every parameter, biases and norms too, differs from its neutral value."""
    family, overrides = VARIANTS[variant]
    config_class = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_class)(
        **(_SIZES | overrides), attn_implementation="eager"
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if "norm" in name and family == "Gemma3":
                # Its norms add the one themselves. In steps that the sum has room for.
                parameter.mul_(1024).round_().div_(1024)
            elif "norm" in name:
                parameter.add_(1.0)
    return model


def hf_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """``[len(ids), vocab]`` float32."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def random_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
