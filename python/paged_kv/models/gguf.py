# SPDX-License-Identifier: Apache-2.0
"""Reads a model's weights from a GGUF file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from paged_kv.models.gguf_config import ROPE_FREQS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paged_kv.models.config import ModelConfig
    from paged_kv.models.gguf_file import GgufFile

__all__ = ["GgufSource"]

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_FREQS: "model.rotary_emb.freq_factors",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 has norms after attention and feed-forward too.
_IN_GEMMA3_LAYER = _IN_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_QUERY_OR_KEY = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")


class GgufSource:
    """The tensors of a GGUF file under Hugging Face's names, dequantised one by one.

    Query and key rows of "llama" files, which llama.cpp interleaves to suit its rotary kernel, come
    out in Hugging Face's order. Norm weights of "gemma3" files, which hold what Hugging Face's
    model multiplies with, come out as its weights, which are less by one.

    Args:
        file: the file.
        config: what `gguf_config.config_from_gguf` read from it.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        architecture = file.metadata["general.architecture"]
        self._rows_interleaved = architecture == "llama"
        self._norms_plus_one = architecture == "gemma3"
        in_layer = _IN_GEMMA3_LAYER if architecture == "gemma3" else _IN_LAYER
        self._gguf_name = {_hf_name(name, in_layer): name for name in file.tensors}
        self.path: Path = file.path
        self.shapes: Mapping[str, tuple[int, ...]] = {
            hf_name: file.tensors[name].shape for hf_name, name in self._gguf_name.items()
        }

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Dequantise tensor `name` into `out` (mutated), converting to its dtype.

        Raises:
            ValueError: the quantisation can't be undone.
        """
        gguf_name = self._gguf_name[name]
        rows = out.view(1, -1) if out.dim() == 1 else out
        start = 0
        offset = 1.0 if self._norms_plus_one and gguf_name.endswith("norm.weight") else 0.0
        for piece in self._file.read_rows(gguf_name):
            # Subtracted in float32, before the rounding to the dtype of `out`.
            rows[start : start + len(piece)].copy_(_as_tensor(piece - offset if offset else piece))
            start += len(piece)
        match = _QUERY_OR_KEY.fullmatch(gguf_name)
        if match and self._rows_interleaved:
            num_heads = self._config.num_heads if match[1] == "q" else self._config.num_kv_heads
            out.copy_(deinterleave_rows(out, num_heads))


def deinterleave_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the row order that llama.cpp gives query and key projections.

    Its rotary kernel rotates elements ``2i`` and ``2i + 1`` of a head, Hugging Face's ``i`` and
    ``i + head_size / 2``. The converter moves the rows accordingly, head by head.

    Args:
        weight: ``[num_heads * head_size, ...]``.
        num_heads: heads of *this* projection: the number of KV heads for the key's.

    Returns:
        A new tensor of the same shape.

    Source:
        llama.cpp convert_hf_to_gguf.py::LlamaModel.permute, inverted.
    """
    half = weight.shape[0] // num_heads // 2
    pairs = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _as_tensor(array: Any) -> torch.Tensor:  # noqa: ANN401
    # An F32 piece is a view of the read-only file mapping, which torch would warn about.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _hf_name(name: str, in_layer: Mapping[str, str]) -> str:
    """The Hugging Face name of a tensor; its own name where there is none."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{in_layer.get(part, part)}.{kind}"
