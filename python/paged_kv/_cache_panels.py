# SPDX-License-Identifier: Apache-2.0
"""The cache layout ``panels``: shapes, and the way there and back (docs/layouts.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KEY_PANELS_NUM_DIMS",
    "PANEL_DIMS",
    "PANEL_TOKENS",
    "VALUE_PANELS_NUM_DIMS",
    "as_nhd",
    "from_panels",
    "has_panels",
    "panel_shapes",
    "panel_x",
    "slots_first",
    "to_panels",
]

PANEL_TOKENS = 16
"""What the block size of such a cache is a multiple of."""

PANEL_DIMS = 16
"""What the head size of such a cache is a multiple of."""

KEY_PANELS_NUM_DIMS = 6
VALUE_PANELS_NUM_DIMS = 7


def has_panels(cache: Tensor) -> bool:
    """Whether a cache, of keys or of values, has the dimensions of this layout and no other."""
    return cache.dim() in (KEY_PANELS_NUM_DIMS, VALUE_PANELS_NUM_DIMS)


def panel_x(dtype: torch.dtype) -> int:
    """How many elements of a cache of ``dtype`` lie side by side: the x of its shape."""
    return 2 if dtype == torch.bfloat16 else 1


def panel_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the key cache and the value cache; sizes are multiples of what they must be."""
    x = panel_x(dtype)
    groups = (num_blocks, num_kv_heads, block_size // PANEL_TOKENS)
    key_shape = (*groups, head_size // x, PANEL_TOKENS, x)
    return key_shape, (*groups, head_size // PANEL_DIMS, PANEL_TOKENS // x, PANEL_DIMS, x)


def to_panels(cache: Tensor, *, is_key: bool) -> Tensor:
    """Copies an nhd cache into panels.

    Args:
        cache: ``[num_blocks, block_size, num_kv_heads, head_size]``.
        is_key: Whether it holds keys; values lie in another order.
    """
    num_blocks, block_size, num_kv_heads, head_size = cache.shape
    groups, x = (num_blocks, block_size // PANEL_TOKENS), panel_x(cache.dtype)
    if is_key:
        view = cache.reshape(*groups, PANEL_TOKENS, num_kv_heads, head_size // x, x)
        return view.permute(0, 3, 1, 4, 2, 5).contiguous()
    tokens, chunks = (PANEL_TOKENS // x, x), (head_size // PANEL_DIMS, PANEL_DIMS)
    view = cache.reshape(*groups, *tokens, num_kv_heads, *chunks)
    return view.permute(0, 4, 1, 5, 2, 6, 3).contiguous()


def slots_first(cache: Tensor) -> Tensor:
    """A view of keys or values in panels: first what counts slots, then heads and their dims.

    Args:
        cache: As the ops take it.

    Returns:
        Of keys ``[num_blocks, block_size / 16, 16, num_kv_heads, head_size / x, x]``, of values
        ``[num_blocks, block_size / 16, 16 / x, x, num_kv_heads, head_size / 16, 16]``.
    """
    if cache.dim() == KEY_PANELS_NUM_DIMS:
        return cache.permute(0, 2, 4, 1, 3, 5)
    return cache.permute(0, 2, 4, 6, 1, 3, 5)


def as_nhd(cache: Tensor) -> Tensor:
    """A cache of any layout but vllm with the shape of nhd, to be read: it may be a view."""
    return from_panels(cache) if has_panels(cache) else cache


def from_panels(cache: Tensor) -> Tensor:
    """The nhd cache that :func:`to_panels` made panels of, to be read: it may be a view."""
    view = slots_first(cache)
    num_blocks, num_kv_heads, num_groups = cache.shape[:3]
    return view.reshape(num_blocks, num_groups * PANEL_TOKENS, num_kv_heads, -1)
