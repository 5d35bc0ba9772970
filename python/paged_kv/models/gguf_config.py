# SPDX-License-Identifier: Apache-2.0
"""Reads a model's configuration from the metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paged_kv.models.config import ModelConfig, RopeScaling, layer_types_of_pattern

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paged_kv.models.gguf_file import GgufFile

__all__ = ["CONTROL_TOKEN_TYPE", "ROPE_FREQS", "config_from_gguf", "eos_token_ids"]

# GGUF's architecture names, and the Hugging Face class that computes the same. Mistral's files are
# written as "llama".
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
ROPE_FREQS = "rope_freqs.weight"
"""The tensor that holds what each rotary frequency is divided by."""


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


def _config(file: GgufFile) -> ModelConfig:
    metadata = _Metadata(file.metadata)
    arch = metadata.get("general.architecture", str)
    if arch not in _ARCHITECTURES:
        msg = f"architecture {arch!r} is not supported: {', '.join(_ARCHITECTURES)} are"
        raise ValueError(msg)
    if metadata.get(f"{arch}.expert_count", int, 0) > 0:
        msg = f"{arch}.expert_count: mixtures of experts are not supported"
        raise ValueError(msg)
    if arch != "gemma3" and metadata.get(f"{arch}.attention.sliding_window", int, 0) > 0:
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
    num_layers = metadata.get(f"{arch}.block_count", int)
    own = _gemma3_settings(metadata, hidden_size, num_heads, num_layers) if arch == "gemma3" else {}
    return ModelConfig(
        architecture=_ARCHITECTURES[arch],
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=metadata.get(f"{arch}.feed_forward_length", int),
        num_layers=num_layers,
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
        **own,
    )


# Facts of the architecture that files leave out. Source: llama.cpp src/llama-model.cpp.
_GEMMA3_WINDOW_PATTERN = 6
_GEMMA3_LOCAL_ROPE_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62


def _gemma3_settings(
    metadata: _Metadata, hidden_size: int, num_heads: int, num_layers: int
) -> dict[str, Any]:
    if metadata.get("gemma3.final_logit_softcapping", float, 0.0) != 0.0:
        msg = "gemma3.final_logit_softcapping is not supported"
        raise ValueError(msg)
    pattern = metadata.get("gemma3.attention.sliding_window_pattern", int, _GEMMA3_WINDOW_PATTERN)
    return {
        "sliding_window": metadata.get("gemma3.attention.sliding_window", int),
        "layer_types": layer_types_of_pattern(pattern, num_layers),
        "local_rope_theta": metadata.get(
            "gemma3.rope.freq_base_swa", float, _GEMMA3_LOCAL_ROPE_THETA
        ),
        # Only the largest model of the family divides by something else than its head size.
        "query_pre_attn_scalar": (
            hidden_size / num_heads if num_layers == _GEMMA3_27B_LAYERS else None
        ),
    }


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
    has_factors = ROPE_FREQS in file.tensors
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
