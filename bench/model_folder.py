# SPDX-License-Identifier: Apache-2.0
"""Writes a loaded model as a Hugging Face folder, so that peers run the very same weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    from paged_kv.models import LoadedModel


def write_model_folder(loaded: LoadedModel, folder: Path) -> None:
    """Write weights and configuration of a Llama; no tokenizer: peers are given token ids."""
    config = loaded.config
    if config.architecture != "LlamaForCausalLM" or config.rope_scaling is not None:
        msg = f"{loaded.name}: only a plain Llama can be written"
        raise ValueError(msg)
    tensors = {name: slot.contiguous() for name, slot in loaded.model.weight_slots().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hf_config = {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": min(config.eos_token_ids, default=None),
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(hf_config, indent=1) + "\n")
