# SPDX-License-Identifier: Apache-2.0
"""Writes transformers models as GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

import gguf
import numpy as np

_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3_PARTS = _PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    path,
    model,
    *,
    arch="llama",
    quantization=None,
    metadata=None,
    extra_tensors=None,
    skip=(),
):
    """Write `model`.

    Args:
        path: where to.
        model: a transformers model.
        arch: GGUF's name of the architecture; "llama" interleaves query and key rows.
        quantization: of the matrices; None = F32.
        metadata: more entries, or None values to leave one out; keys with ``{arch}`` filled in.
        extra_tensors: more tensors by name.
        skip: names of tensors to leave out.
    """
    writer = gguf.GGUFWriter(str(path), arch)
    config = model.config
    entries = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    rope = config.rope_parameters
    entries["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
    if arch == "gemma3":
        entries["attention.sliding_window"] = config.sliding_window
    if getattr(config, "head_dim", None):
        entries |= {
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "rope.dimension_count": config.head_dim,
        }
    entries = {f"{arch}.{key}": value for key, value in entries.items()} | (metadata or {})
    for key, value in entries.items():
        if value is not None:
            _add_value(writer, key, value)
    for name, array in gguf_tensors(model, arch):
        if name in skip:
            continue
        if quantization is None or array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            packed = gguf.quantize(array, quantization)
            writer.add_tensor(name, packed, raw_dtype=quantization)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order: element i of a head's second half follows element i of its first."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def gguf_name(hf_name: str, arch: str) -> str:
    """The name of a tensor in a GGUF file."""
    if hf_name in _TOP:
        return _TOP[hf_name]
    _, _, layer, rest = hf_name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    parts = _GEMMA3_PARTS if arch == "gemma3" else _PARTS
    return f"blk.{layer}.{parts[part]}.{kind}"


def gguf_tensors(model, arch):
    """Name and content of each tensor, as llama.cpp's converter writes it."""
    tied = model.config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        array = parameter.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            array = interleave_rows(array, model.config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            array = interleave_rows(array, model.config.num_key_value_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        yield gguf_name(name, arch), array


def _add_value(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
