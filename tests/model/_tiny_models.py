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
}


def make_tiny(variant: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A random model; every parameter, biases and norms too, differs from its neutral value."""
    family, overrides = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(
        **(_SIZES | overrides), attn_implementation="eager"
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if "norm" in name:
                parameter.add_(1.0)
    return model


def hf_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """``[len(ids), vocab]`` float32."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def random_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
