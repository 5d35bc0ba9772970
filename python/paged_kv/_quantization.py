# SPDX-License-Identifier: Apache-2.0
"""How a quantised cache stores an element: the definition that kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dequantize_kv", "quantize_kv"]

_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


def _dtype_of(kv_cache_dtype: str) -> torch.dtype:
    if kv_cache_dtype not in _DTYPES:
        known = ", ".join(_DTYPES)
        msg = f"kv_cache_dtype: expected one of: {known}; got {kv_cache_dtype!r}"
        raise ValueError(msg)
    return _DTYPES[kv_cache_dtype]


def _along_heads(scale: Tensor, num_dims: int, head_dim: int) -> Tensor:
    """A scale of one element, or of one a kv head, in the form that broadcasts."""
    if scale.numel() == 1:
        return scale.reshape(())
    shape = [1] * num_dims
    shape[head_dim] = -1
    return scale.view(shape)


def quantize_kv(x: Tensor, kv_cache_dtype: str, scale: Tensor, head_dim: int = -2) -> Tensor:
    """Returns the elements that a quantised cache holds for ``x``.

    ``saturate(x / scale)``: divided in float32, then rounded once, to nearest even. What is too
    large becomes the largest finite value, infinity too (int8: 127 or -128). NaN stays NaN; int8
    has none, there it becomes 0. A scale that uses the whole range of a format, per head, is
    ``x.abs().amax((0, 2)) / largest``, with 448 as the largest of e4m3, 57344 of e5m2, 127 of int8.

    Args:
        x: Keys or values, any floating dtype.
        kv_cache_dtype: ``fp8`` (= ``fp8_e4m3``), ``fp8_e4m3``, ``fp8_e5m2`` or ``int8``.
        scale: float32, one element or ``[num_kv_heads]``.
        head_dim: The dimension of ``x`` that counts kv heads.

    Returns:
        Shape of ``x``: int8, or the bytes of a float8 format as uint8.

    Raises:
        ValueError: Another ``kv_cache_dtype``.

    Example:
        >>> quantize_kv(torch.tensor([1.0, 1e9]), "fp8", torch.tensor([0.5])).tolist()
        [64, 126]
        >>> quantize_kv(torch.tensor([1.25, -1e9]), "int8", torch.tensor([0.5])).tolist()
        [2, -128]
    """
    dtype = _dtype_of(kv_cache_dtype)
    quotient = x.float() / _along_heads(scale, x.dim(), head_dim)
    if dtype == torch.int8:
        return quotient.nan_to_num(0.0, torch.inf, -torch.inf).clamp(-128, 127).round().to(dtype)
    largest = torch.finfo(dtype).max
    return quotient.clamp(-largest, largest).to(dtype).view(torch.uint8)


def dequantize_kv(cache: Tensor, kv_cache_dtype: str, scale: Tensor, head_dim: int = -2) -> Tensor:
    """Returns the elements of a quantised cache, ``element * scale`` in float32.

    Args:
        cache: int8; of a float8 format uint8 or torch's dtype. Any layout.
        kv_cache_dtype: ``fp8`` (= ``fp8_e4m3``), ``fp8_e4m3``, ``fp8_e5m2`` or ``int8``.
        scale: float32, one element or ``[num_kv_heads]``.
        head_dim: The dimension of ``cache`` that counts kv heads: -2 for layouts nhd and hnd, 1
            for layouts vllm and panels.

    Returns:
        float32, shape of ``cache``.

    Raises:
        ValueError: Another ``kv_cache_dtype``.

    Example:
        >>> cache = torch.tensor([64, 126], dtype=torch.uint8)
        >>> dequantize_kv(cache, "fp8", torch.tensor([0.5])).tolist()
        [1.0, 224.0]
    """
    elements = cache.view(_dtype_of(kv_cache_dtype)).float()
    return elements * _along_heads(scale, cache.dim(), head_dim)
