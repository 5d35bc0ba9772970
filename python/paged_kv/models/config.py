# SPDX-License-Identifier: Apache-2.0
"""What a decoder looks like: sizes, rotary embedding, biases, special tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["ModelConfig", "RopeScaling", "layer_types_of_pattern"]

# Far above every published model and far below where a product of two sizes leaves 64 bits: a
# corrupt file must not be able to ask for more than its own tensors can back.
_MAX_SIZE = 2**24
_MAX_HEADS = 2**16
_MAX_LAYERS = 2**16
_MAX_HEAD_SIZE = 2**12

_FULL_ATTENTION = "full_attention"
_SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the pretraining ones.

    Attributes:
        rope_type: ``linear`` divides each frequency by `factor`; ``llama3`` divides low frequencies
            by `factor`, keeps high ones and blends those between; ``freq_factors`` divides
            frequency ``i`` by entry ``i`` of a tensor stored with the weights (what GGUF files have
            instead of ``llama3``).
        factor: the divisor.
        low_freq_factor: ``llama3`` only; wavelengths over
            ``original_max_position_embeddings / low_freq_factor`` are divided in full.
        high_freq_factor: ``llama3`` only; wavelengths under
            ``original_max_position_embeddings / high_freq_factor`` are kept.
        original_max_position_embeddings: ``llama3`` only; context length of the pretraining.

    Source:
        transformers 5 modeling_rope_utils.py (names and formulas).
    """

    rope_type: Literal["linear", "llama3", "freq_factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        if self.rope_type not in ("linear", "llama3", "freq_factors"):
            msg = f"rope scaling {self.rope_type!r} is not supported: linear and llama3 are"
            raise ValueError(msg)
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _check_positive(f"rope scaling: {name}", getattr(self, name))
        if self.rope_type != "llama3":
            return
        _check_size(
            "rope scaling: original_max_position_embeddings", self.original_max_position_embeddings
        )
        if self.high_freq_factor <= self.low_freq_factor:
            msg = (
                f"rope scaling: high_freq_factor must be over low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder, whatever file it came from.

    Attributes:
        architecture: Hugging Face's class name, e.g. ``LlamaForCausalLM``.
        vocab_size: rows of the embedding. Valid token ids are ``0 .. vocab_size - 1``.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layer.
        num_layers: decoder layers, each with a KV cache of its own.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_size: width of one head; even.
        max_position_embeddings: longest sequence the model was made for, in tokens.
        rms_norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: stretching of those frequencies, or None.
        local_rope_theta: base of the frequencies of layers with a sliding window, which are not
            stretched; None: as in all other layers.
        tie_word_embeddings: the head shares the embedding's weight.
        attention_bias: the q, k and v projections have a bias.
        attention_output_bias: the output projection of attention has a bias.
        mlp_bias: the three feed-forward projections have a bias.
        query_pre_attn_scalar: queries are divided by its square root; None: by `head_size`'s.
        qk_norm: RMSNorm over each query and key head before the rotation.
        sliding_window: keys a token sees, itself included; None = all.
        layer_types: for each layer ``full_attention`` or ``sliding_attention``: the window holds in
            the latter only. Empty: it holds in all layers.
        bos_token_id: begin-of-sequence id, or None.
        eos_token_ids: ids that end a generation.

    Raises:
        ValueError: a size is not positive or absurd, or sizes don't fit together.

    Example:
        >>> from paged_kv.models import ModelConfig
        >>> config = ModelConfig(
        ...     architecture="LlamaForCausalLM", vocab_size=128, hidden_size=64,
        ...     intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16,
        ...     max_position_embeddings=512,
        ... )
        >>> config.num_heads // config.num_kv_heads
        2
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    query_pre_attn_scalar: float | None = None
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers"):
            _check_size(name, getattr(self, name))
        _check_size("max_position_embeddings", self.max_position_embeddings, maximum=2**31 - 1)
        _check_size("num_heads", self.num_heads, maximum=_MAX_HEADS)
        _check_size("num_kv_heads", self.num_kv_heads, maximum=_MAX_HEADS)
        _check_size("head_size", self.head_size, maximum=_MAX_HEAD_SIZE)
        if self.num_heads % self.num_kv_heads != 0:
            msg = f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
            raise ValueError(msg + str(self.num_kv_heads))
        if self.head_size % 2 != 0:
            msg = f"head_size must be even for rotary embedding, got {self.head_size}"
            raise ValueError(msg)
        if self.sliding_window is not None:
            _check_size("sliding_window", self.sliding_window, maximum=2**31 - 1)
        self._check_layer_types()
        _check_positive("rms_norm_eps", self.rms_norm_eps)
        _check_positive("rope_theta", self.rope_theta)
        for name in ("local_rope_theta", "query_pre_attn_scalar"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))

    @property
    def attention_scale(self) -> float:
        """Factor of the dot product of a query and a key."""
        return float((self.query_pre_attn_scalar or self.head_size) ** -0.5)

    def sliding_window_of(self, layer_index: int) -> int | None:
        """Keys that a token sees in layer `layer_index`, itself included; None = all."""
        if self.layer_types and self.layer_types[layer_index] == _FULL_ATTENTION:
            return None
        return self.sliding_window

    def _check_layer_types(self) -> None:
        if not self.layer_types:
            return
        if len(self.layer_types) != self.num_layers:
            msg = f"layer_types: expected {self.num_layers} entries, got {len(self.layer_types)}"
            raise ValueError(msg)
        for kind in self.layer_types:
            if kind not in (_FULL_ATTENTION, _SLIDING_ATTENTION):
                msg = (
                    f"layer_types: {kind!r} is not supported: {_FULL_ATTENTION} and "
                    f"{_SLIDING_ATTENTION} are"
                )
                raise ValueError(msg)
        if _SLIDING_ATTENTION in self.layer_types and self.sliding_window is None:
            msg = "layer_types: sliding_attention needs a sliding_window"
            raise ValueError(msg)


def layer_types_of_pattern(pattern: int, num_layers: int) -> tuple[str, ...]:
    """Give `ModelConfig.layer_types` where every `pattern`-th layer sees all tokens.

    Raises:
        ValueError: `pattern` or `num_layers` is not positive or absurd.

    Example:
        >>> from paged_kv.models.config import layer_types_of_pattern
        >>> layer_types_of_pattern(2, 3)
        ('sliding_attention', 'full_attention', 'sliding_attention')
    """
    _check_size("sliding_window_pattern", pattern)
    _check_size("num_layers", num_layers, maximum=_MAX_LAYERS)
    return tuple(
        _SLIDING_ATTENTION if (index + 1) % pattern else _FULL_ATTENTION
        for index in range(num_layers)
    )


def _check_size(name: str, value: object, *, maximum: int = _MAX_SIZE) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        msg = f"{name} must be an int from 1 to {maximum}, got {value!r}"
        raise ValueError(msg)


def _check_positive(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        msg = f"{name} must be a positive number, got {value!r}"
        raise ValueError(msg)
