# SPDX-License-Identifier: Apache-2.0
"""The cache of one attention layer, as models take it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["KVCache", "kv_cache_dtype_str_to_dtype"]

_QUANTISED_DTYPES = {
    "fp8": torch.uint8,
    "fp8_e4m3": torch.uint8,
    "fp8_e5m2": torch.uint8,
    "int8": torch.int8,
}


def _unit_scale() -> torch.Tensor:
    return torch.ones(1, dtype=torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of one layer, and how they are stored.

    Attributes:
        key: ``[num_blocks, block_size, num_kv_heads, head_size]`` of any strides; a cache in the
            ``hnd`` layout is a transposed view. Or keys in ``panels`` (docs/layouts.md). Of the
            model's dtype, or of the one that :func:`kv_cache_dtype_str_to_dtype` gives.
        value: As ``key``.
        kv_cache_dtype: ``"auto"``: elements as the model computes them. ``"fp8"`` (=
            ``"fp8_e4m3"``), ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"int8"``: quantised.
        k_scale: float32, ``[1]`` or ``[num_kv_heads]``, on the device of ``key``: a key is
            ``element * scale``. Not read if the cache is not quantised.
        v_scale: As ``k_scale``, for values.

    Notes:
        Nothing is checked here: the ops that write and read the cache check it in full.

    Example:
        >>> import torch
        >>> from paged_kv.kv_cache import KVCache
        >>> cache = KVCache(torch.empty(4, 16, 2, 64), torch.empty(4, 16, 2, 64))
        >>> cache.kv_cache_dtype, cache.k_scale.tolist()
        ('auto', [1.0])
    """

    key: torch.Tensor
    value: torch.Tensor
    kv_cache_dtype: str = "auto"
    k_scale: torch.Tensor = field(default_factory=_unit_scale)
    v_scale: torch.Tensor = field(default_factory=_unit_scale)


def kv_cache_dtype_str_to_dtype(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Returns the element type of the tensors of such a cache.

    Args:
        kv_cache_dtype: As in :class:`KVCache`.
        model_dtype: What the model computes in.

    Raises:
        ValueError: Another ``kv_cache_dtype``.

    Source:
        vLLM 0.32 utils/torch_utils.py::kv_cache_dtype_str_to_dtype.

    Example:
        >>> kv_cache_dtype_str_to_dtype("fp8", torch.float32)
        torch.uint8
    """
    if kv_cache_dtype == "auto":
        return model_dtype
    if kv_cache_dtype not in _QUANTISED_DTYPES:
        known = ", ".join(("auto", *_QUANTISED_DTYPES))
        msg = f"kv_cache_dtype must be one of {known}, got {kv_cache_dtype!r}"
        raise ValueError(msg)
    return _QUANTISED_DTYPES[kv_cache_dtype]
