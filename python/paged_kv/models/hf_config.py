# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paged_kv.models.config import ModelConfig, RopeScaling, layer_types_of_pattern

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SUPPORTED_ARCHITECTURES", "config_from_hf"]


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What transformers assumes when ``config.json`` leaves a key out."""

    num_kv_heads: int | None = None  # None: as many as query heads
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    qkv_bias: bool | None = None  # None: the file's attention_bias decides
    head_size: int | None = None  # None: hidden_size / num_heads
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"


_GEMMA3 = "Gemma3ForCausalLM"
# Source: transformers 5 models/*/configuration_*.py.
_DEFAULTS = {
    "LlamaForCausalLM": _Defaults(),
    "MistralForCausalLM": _Defaults(
        num_kv_heads=8, max_position_embeddings=131072, sliding_window=4096, qkv_bias=False
    ),
    "Qwen2ForCausalLM": _Defaults(num_kv_heads=32, max_position_embeddings=32768, qkv_bias=True),
    "Qwen3ForCausalLM": _Defaults(
        num_kv_heads=32, max_position_embeddings=32768, head_size=128, qk_norm=True
    ),
    _GEMMA3: _Defaults(
        num_kv_heads=4,
        max_position_embeddings=131072,
        sliding_window=4096,
        qkv_bias=False,
        head_size=256,
        qk_norm=True,
        tie_word_embeddings=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
    ),
}
SUPPORTED_ARCHITECTURES = tuple(_DEFAULTS)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Turn the content of ``config.json`` into a `ModelConfig`.

    Both spellings of the rotary settings are read: ``rope_theta`` with ``rope_scaling``, and
    ``rope_parameters`` (transformers 5).

    Args:
        raw: the parsed JSON object.

    Raises:
        ValueError: an architecture or a feature that isn't supported, a missing or bad key; the
            message names it.
    """
    architecture = _architecture(raw)
    defaults = _DEFAULTS[architecture]
    _refuse_unsupported(raw, architecture, defaults)
    num_heads = _get_int(raw, "num_attention_heads")
    hidden_size = _get_int(raw, "hidden_size")
    if architecture == _GEMMA3:
        own = _gemma3_settings(raw)
    else:
        own = dict(zip(("rope_theta", "rope_scaling"), _rope(raw), strict=True))
    file_bias = _get_bool(raw, "attention_bias")
    is_llama_like = defaults.qkv_bias is None
    return ModelConfig(
        architecture=architecture,
        vocab_size=_get_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_get_int(raw, "intermediate_size"),
        num_layers=_get_int(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(raw, num_heads, defaults),
        head_size=_head_size(raw, hidden_size, num_heads, defaults),
        max_position_embeddings=_get_int(
            raw, "max_position_embeddings", defaults.max_position_embeddings
        ),
        rms_norm_eps=_get_float(raw, "rms_norm_eps", 1e-6),
        tie_word_embeddings=_get_bool(raw, "tie_word_embeddings", defaults.tie_word_embeddings),
        attention_bias=file_bias if defaults.qkv_bias is None else defaults.qkv_bias,
        attention_output_bias=is_llama_like and file_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and _get_bool(raw, "mlp_bias"),
        qk_norm=defaults.qk_norm,
        sliding_window=_sliding_window(raw, defaults),
        bos_token_id=_bos_token_id(raw),
        eos_token_ids=token_ids(raw.get("eos_token_id"), "eos_token_id"),
        **own,
    )


def token_ids(value: object, key: str) -> frozenset[int]:
    """Read an id or a list of ids, as ``eos_token_id`` may be."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        msg = f"{key} must be a token id or a list of token ids, got {value!r}"
        raise ValueError(msg)
    return frozenset(ids)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        msg = "architectures is missing"
        raise ValueError(msg)
    if names[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        msg = f"architecture {names[0]!r} is not supported: {supported} are"
        raise ValueError(msg)
    return str(names[0])


def _refuse_unsupported(raw: Mapping[str, Any], architecture: str, defaults: _Defaults) -> None:
    if raw.get("quantization_config"):
        msg = "quantization_config: quantised Hugging Face checkpoints are not supported"
        raise ValueError(msg)
    key, supported = defaults.activation_key, defaults.activation
    if (activation := raw.get(key, supported)) != supported:
        msg = f"{key} {activation!r} is not supported: {supported} is"
        raise ValueError(msg)
    if architecture == _GEMMA3:
        return  # its own settings are checked where they are read
    if raw.get("use_sliding_window") and architecture.startswith("Qwen"):
        msg = "use_sliding_window: a window in some layers only is not supported"
        raise ValueError(msg)
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        msg = f"layer_types: only full_attention is supported, got {layer_types!r:.80}"
        raise ValueError(msg)


def _num_kv_heads(raw: Mapping[str, Any], num_heads: int, defaults: _Defaults) -> int:
    if "num_key_value_heads" not in raw and defaults.num_kv_heads is not None:
        return defaults.num_kv_heads
    return _get_int(raw, "num_key_value_heads", num_heads)


def _head_size(
    raw: Mapping[str, Any], hidden_size: int, num_heads: int, defaults: _Defaults
) -> int:
    if raw.get("head_dim") is not None:
        return _get_int(raw, "head_dim")
    if defaults.head_size is not None:
        return defaults.head_size
    if num_heads < 1 or hidden_size % num_heads != 0:
        msg = f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
        raise ValueError(msg)
    return hidden_size // num_heads


def _sliding_window(raw: Mapping[str, Any], defaults: _Defaults) -> int | None:
    if defaults.sliding_window is None:
        return None  # the architecture has none; Qwen's layer-wise one is refused above
    window = raw.get("sliding_window", defaults.sliding_window)
    return None if window is None else _get_int(raw, "sliding_window", defaults.sliding_window)


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        msg = f"rope_scaling must be an object, got {parameters!r:.80}"
        raise ValueError(msg)  # noqa: TRY004  (the file is bad, not an argument)
    theta = _get_float({**raw, **parameters}, "rope_theta", 10000.0)
    for source in (raw, parameters):
        if source.get("partial_rotary_factor", 1.0) != 1.0:
            msg = "partial_rotary_factor other than 1 is not supported"
            raise ValueError(msg)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, RopeScaling("linear", factor=_get_float(parameters, "factor"))
    if rope_type == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=_get_float(parameters, "factor"),
            low_freq_factor=_get_float(parameters, "low_freq_factor"),
            high_freq_factor=_get_float(parameters, "high_freq_factor"),
            original_max_position_embeddings=_get_int(
                parameters,
                "original_max_position_embeddings",
                raw.get("original_max_position_embeddings") or raw.get("max_position_embeddings"),
            ),
        )
    msg = f"rope scaling {rope_type!r} is not supported: linear and llama3 are"
    raise ValueError(msg)


# What Gemma 3 assumes for keys that are left out.
_GEMMA3_WINDOW_PATTERN = 6
_GEMMA3_QUERY_PRE_ATTN_SCALAR = 256
_GEMMA3_ROPE_THETA = 1_000_000.0
_GEMMA3_LOCAL_ROPE_THETA = 10_000.0


def _gemma3_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What only Gemma 3 has: windows in some layers, two rotary bases, a scale of queries."""
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(key):
            msg = f"{key} is not supported"
            raise ValueError(msg)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        pattern = _get_int(raw, "sliding_window_pattern", _GEMMA3_WINDOW_PATTERN)
        layer_types = layer_types_of_pattern(pattern, _get_int(raw, "num_hidden_layers"))
    if not isinstance(layer_types, (list, tuple)):
        msg = f"layer_types must be a list, got {layer_types!r:.80}"
        raise ValueError(msg)  # noqa: TRY004  (the file is bad, not an argument)
    rope = {"rope_theta": _GEMMA3_ROPE_THETA, "rope_local_base_freq": _GEMMA3_LOCAL_ROPE_THETA}
    rope |= {key: value for key, value in raw.items() if value is not None}
    by_layer_type = raw.get("rope_parameters")
    if isinstance(by_layer_type, dict) and "full_attention" in by_layer_type:
        full = _rope({**rope, "rope_parameters": by_layer_type["full_attention"]})
        local = _rope(
            {
                "rope_theta": rope["rope_local_base_freq"],
                "rope_parameters": by_layer_type.get("sliding_attention"),
            }
        )
    else:
        full = _rope(rope)
        local = _rope({"rope_theta": rope["rope_local_base_freq"]})
    if local[1] is not None:
        msg = "rope_parameters: sliding_attention: only rope_type default is supported"
        raise ValueError(msg)
    return {
        "layer_types": tuple(layer_types),
        "query_pre_attn_scalar": _get_float(
            raw, "query_pre_attn_scalar", _GEMMA3_QUERY_PRE_ATTN_SCALAR
        ),
        "rope_theta": full[0],
        "rope_scaling": full[1],
        "local_rope_theta": local[0],
    }


def _bos_token_id(raw: Mapping[str, Any]) -> int | None:
    ids = token_ids(raw.get("bos_token_id"), "bos_token_id")
    return min(ids) if ids else None


def _get_int(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        msg = f"{key} must be an int, got {value!r:.80}"
        raise ValueError(msg)  # noqa: TRY004  (the file is bad, not an argument)
    return value


def _get_float(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        msg = f"{key} must be a number, got {value!r:.80}"
        raise ValueError(msg)  # noqa: TRY004  (the file is bad, not an argument)
    return float(value)


def _get_bool(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = raw.get(key)
    value = default if value is None else value
    if value not in (True, False):
        msg = f"{key} must be true or false, got {value!r:.80}"
        raise ValueError(msg)
    return bool(value)
