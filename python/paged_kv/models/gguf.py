# SPDX-License-Identifier: Apache-2.0
"""Reads a Llama-like model from a GGUF file: configuration and weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from paged_kv.models.config import ModelConfig, RopeScaling

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paged_kv.models.gguf_file import GgufFile

__all__ = ["GgufSource", "config_from_gguf"]

# GGUF's architecture names, and the Hugging Face class that computes the same. Mistral's files are
# written as "llama".
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_ROPE_FREQS = "rope_freqs.weight"
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    _ROPE_FREQS: "model.rotary_emb.freq_factors",
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
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_QUERY_OR_KEY = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Turn a GGUF file's metadata into a `ModelConfig`.

    Biases, the tied head and rotary factors are known by the tensors that are there.

    Raises:
        ValueError: an architecture or a feature that isn't supported, a missing or bad key; the
            message names the file and the key.
    """
    try:
        return _config(file)
    except ValueError as error:
        msg = f"{file.path}: {error}"
        raise ValueError(msg) from None


class GgufSource:
    """The tensors of a GGUF file under Hugging Face's names, dequantised one by one.

    Query and key rows of "llama" files, which llama.cpp interleaves to suit its rotary kernel, come
    out in Hugging Face's order.

    Args:
        file: the file.
        config: what `config_from_gguf` read from it.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._rows_interleaved = file.metadata["general.architecture"] == "llama"
        self._gguf_name = {_hf_name(name): name for name in file.tensors}
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
        for piece in self._file.read_rows(gguf_name):
            rows[start : start + len(piece)].copy_(_as_tensor(piece))
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


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; its own name where there is none."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{_IN_LAYER.get(part, part)}.{kind}"


def _config(file: GgufFile) -> ModelConfig:
    metadata = _Metadata(file.metadata)
    arch = metadata.get("general.architecture", str)
    if arch not in _ARCHITECTURES:
        msg = f"architecture {arch!r} is not supported: {', '.join(_ARCHITECTURES)} are"
        raise ValueError(msg)
    if metadata.get(f"{arch}.expert_count", int, 0) > 0:
        msg = f"{arch}.expert_count: mixtures of experts are not supported"
        raise ValueError(msg)
    if metadata.get(f"{arch}.attention.sliding_window", int, 0) > 0:
        msg = f"{arch}.attention.sliding_window is not supported"
        raise ValueError(msg)

    hidden_size = metadata.get(f"{arch}.embedding_length", int)
    num_heads = metadata.get(f"{arch}.attention.head_count", int)
    if num_heads < 1:
        msg = f"{arch}.attention.head_count must be positive, got {num_heads}"
        raise ValueError(msg)
    head_size = metadata.get(f"{arch}.attention.key_length", int, hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := metadata.get(f"{arch}.{key}", int, head_size)) != head_size:
            msg = f"{arch}.{key}: only the head size, {head_size}, is supported, got {value}"
            raise ValueError(msg)
    return ModelConfig(
        architecture=_ARCHITECTURES[arch],
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=metadata.get(f"{arch}.feed_forward_length", int),
        num_layers=metadata.get(f"{arch}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=metadata.get(f"{arch}.attention.head_count_kv", int, num_heads),
        head_size=head_size,
        max_position_embeddings=metadata.get(f"{arch}.context_length", int),
        rms_norm_eps=metadata.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope_theta=metadata.get(f"{arch}.rope.freq_base", float, 10000.0),
        rope_scaling=_rope_scaling(file, metadata, arch),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id", int, None),
        eos_token_ids=eos_token_ids(file),
    )


# Tokens that end a turn, by the text that model makers gave them: files often name only one of
# several in eos_token_id. Source: llama.cpp src/llama-vocab.cpp (end-of-generation tokens).
_END_OF_TURN_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<EOT>",
    }
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
CONTROL_TOKEN_TYPE = 3


def eos_token_ids(file: GgufFile) -> frozenset[int]:
    """The ids that end a generation: those the metadata names, and well-known control tokens."""
    metadata = _Metadata(file.metadata)
    ids = {metadata.get(f"tokenizer.ggml.{key}", int, -1) for key in _END_KEYS} - {-1}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    types = file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False)):
            if token_type == CONTROL_TOKEN_TYPE and token in _END_OF_TURN_TEXTS:
                ids.add(token_id)
    return frozenset(ids)


def _vocab_size(file: GgufFile) -> int:
    # The embedding decides: metadata may leave the number out, and a vocabulary may be padded.
    if "token_embd.weight" not in file.tensors:
        msg = "tensor 'token_embd.weight' is missing"
        raise ValueError(msg)
    return file.tensors["token_embd.weight"].shape[0]


def _rope_scaling(file: GgufFile, metadata: _Metadata, arch: str) -> RopeScaling | None:
    rope_type = metadata.get(f"{arch}.rope.scaling.type", str, "none")
    has_factors = _ROPE_FREQS in file.tensors
    if has_factors and rope_type == "none":
        return RopeScaling("freq_factors")
    if rope_type == "none":
        return None
    if rope_type == "linear" and not has_factors:
        return RopeScaling("linear", factor=metadata.get(f"{arch}.rope.scaling.factor", float))
    msg = f"{arch}.rope.scaling.type {rope_type!r}{' with rope_freqs' if has_factors else ''}"
    raise ValueError(msg + " is not supported: none and linear are")


class _Metadata:
    """Typed access to a file's metadata."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, key: str, kind: type, default: Any = ...) -> Any:  # noqa: ANN401
        value = self._values.get(key, default)
        if value is ...:
            msg = f"metadata {key} is missing"
            raise ValueError(msg)
        if key not in self._values:
            return value
        # bool is an int to Python, not to us.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            msg = f"metadata {key} must be of type {kind.__name__}, got {value!r:.80}"
            raise ValueError(msg)
        return value
