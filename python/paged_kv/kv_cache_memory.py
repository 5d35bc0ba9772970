# SPDX-License-Identifier: Apache-2.0
"""Tensors for keys and values: on a CPU in huge pages, which are read faster (docs/kernels.md)."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from typing import TYPE_CHECKING, Literal, get_args

import torch

from paged_kv._cache_panels import PANEL_DIMS, PANEL_TOKENS, panel_shapes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CacheLayout", "allocate_kv_cache", "preferred_layout", "zeros_in_huge_pages"]

CacheLayout = Literal["nhd", "hnd", "vllm", "panels"]
"""The order in which a cache's elements lie (docs/layouts.md)."""

HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of Arm with pages of 4 KiB
_CHUNK_BYTES = 16  # of the keys in the layout "vllm"


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    dtype: torch.dtype,
    layout: CacheLayout = "nhd",
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Returns the key cache and the value cache of one layer, all zeros.

    Their memory is that of :func:`zeros_in_huge_pages`. :func:`preferred_layout` says which layout
    attention on a device reads fastest.

    Args:
        num_blocks: Blocks, the null block included.
        block_size: Tokens per block.
        num_kv_heads: Key/value heads.
        head_size: Elements per head.
        dtype: Element type of the cache: a float type, or torch.uint8 or torch.int8 for a
            quantised cache.
        layout: ``"nhd"``, ``"hnd"``, ``"vllm"`` or ``"panels"``, which is for CPUs
            (docs/layouts.md).
        device: Where the tensors live.

    Returns:
        ``(key_cache, value_cache)``, as the ops take them. Layouts nhd and hnd: both
        ``[num_blocks, block_size, num_kv_heads, head_size]``, in hnd a transposed view. Layout
        vllm: ``[num_blocks, num_kv_heads, head_size / x, block_size, x]`` with x elements in 16
        bytes, and ``[num_blocks, num_kv_heads, head_size, block_size]``. Layout panels:
        ``[num_blocks, num_kv_heads, block_size / 16, head_size / x, 16, x]`` with x = 2 for
        bfloat16 and 1 for any other dtype, and ``[num_blocks, num_kv_heads, block_size / 16,
        head_size / 16, 16 / x, 16, x]``.

    Raises:
        ValueError: A size is below 1, the layout is none of the above, a head of layout vllm
            is not a multiple of 16 bytes, or block_size or head_size of layout panels is not a
            multiple of 16.
        MemoryError: The system refuses so much memory.

    Cost:
        A call to the system each; memory is taken page by page as it is first written.

    Example:
        >>> import torch
        >>> from paged_kv import allocate_kv_cache
        >>> key_cache, value_cache = allocate_kv_cache(64, 16, 2, 128, dtype=torch.bfloat16)
        >>> key_cache.shape, key_cache.stride()
        (torch.Size([64, 16, 2, 128]), (4096, 256, 128, 1))
    """
    sizes = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
    }
    for name, size in sizes.items():
        if size < 1:
            msg = f"{name}: expected at least 1, got {size}"
            raise ValueError(msg)
    if layout not in get_args(CacheLayout):
        msg = f"layout: expected one of {', '.join(get_args(CacheLayout))}; got {layout!r}"
        raise ValueError(msg)

    def zeros(*shape: int) -> Tensor:
        return zeros_in_huge_pages(shape, dtype=dtype, device=device)

    if layout == "vllm":
        x = _CHUNK_BYTES // dtype.itemsize
        if head_size % x != 0:
            expected = f"a multiple of {x} for layout vllm and {dtype}"
            msg = f"head_size: expected {expected}, got {head_size}"
            raise ValueError(msg)
        key_cache = zeros(num_blocks, num_kv_heads, head_size // x, block_size, x)
        return key_cache, zeros(num_blocks, num_kv_heads, head_size, block_size)
    if layout == "panels":
        for name, unit in (("block_size", PANEL_TOKENS), ("head_size", PANEL_DIMS)):
            if sizes[name] % unit != 0:
                msg = f"{name}: expected a multiple of {unit} for layout panels, got {sizes[name]}"
                raise ValueError(msg)
        key_shape, value_shape = panel_shapes(
            num_blocks, block_size, num_kv_heads, head_size, dtype
        )
        return zeros(*key_shape), zeros(*value_shape)
    if layout == "hnd":
        shape = (num_blocks, num_kv_heads, block_size, head_size)
        return zeros(*shape).transpose(1, 2), zeros(*shape).transpose(1, 2)
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return zeros(*shape), zeros(*shape)


def preferred_layout(device: torch.device | str, *, block_size: int, head_size: int) -> CacheLayout:
    """Returns the layout that attention on ``device`` reads fastest.

    Args:
        device: Where the cache will live.
        block_size: Tokens per block.
        head_size: Elements per head.

    Returns:
        ``"panels"`` on a CPU, if the layout allows such sizes; else ``"nhd"``, which allows any.

    Cost:
        O(1).

    Example:
        >>> from paged_kv.kv_cache_memory import preferred_layout
        >>> preferred_layout("cpu", block_size=16, head_size=64)
        'panels'
        >>> preferred_layout("cpu", block_size=8, head_size=64)
        'nhd'
    """
    has_panels = block_size % PANEL_TOKENS == 0 and head_size % PANEL_DIMS == 0
    return "panels" if has_panels and torch.device(device).type == "cpu" else "nhd"


def zeros_in_huge_pages(
    shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns a contiguous tensor of zeros: torch.zeros, in huge pages where there are any.

    Blocks lie anywhere in a cache, so with pages of 4 KiB nearly every block costs walks through
    the page table. On Linux a CPU tensor of at least `HUGE_PAGE_BYTES` begins at a multiple of
    that, and the system is asked for huge pages (transparent huge pages in the mode "madvise" or
    "always"). Where it has none, the memory is ordinary. Other tensors are torch.zeros.

    Args:
        shape: Of the tensor.
        dtype: Of its elements.
        device: Where it lives.

    Returns:
        The tensor. Its memory goes back to the system with the last tensor that shares it.

    Raises:
        MemoryError: The system refuses so much memory.

    Cost:
        A call to the system; memory is taken page by page as it is first written.

    Example:
        >>> import torch
        >>> from paged_kv.kv_cache_memory import HUGE_PAGE_BYTES, zeros_in_huge_pages
        >>> zeros_in_huge_pages((1024, 4096), dtype=torch.float32).data_ptr() % HUGE_PAGE_BYTES
        0
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    is_cpu = torch.device(device).type == "cpu"
    if sys.platform != "linux" or not is_cpu or num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory, offset = _map_huge_pages(num_bytes)
    # The tensor keeps `memory`, which unmaps itself when nobody holds it.
    elements = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=num_bytes)
    return elements.view(dtype).view(shape)


if sys.platform == "linux":

    def _map_huge_pages(num_bytes: int) -> tuple[mmap.mmap, int]:
        """Private memory, and where in it a stretch of ``num_bytes`` in huge pages begins."""
        # To the end of the last page: a part of one would be made of small pages.
        num_page_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        try:
            memory = mmap.mmap(
                -1,
                num_page_bytes + HUGE_PAGE_BYTES,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            )
        except OSError as error:
            msg = f"cannot map {num_bytes} bytes for a cache: {error}"
            raise MemoryError(msg) from error
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        offset = -address % HUGE_PAGE_BYTES
        # Advice: where it is refused, the memory is as good as any.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, offset, num_page_bytes)
        return memory, offset
