# SPDX-License-Identifier: Apache-2.0
"""The tensors behind the blocks, in two layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from paged_kv import ops
from paged_kv.kv_cache_memory import zeros_in_huge_pages
from paged_kv.minivllm._checks import ceil_div, check_positive

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CacheLayout", "PagedKVCache", "bytes_per_block", "bytes_per_token"]

CacheLayout = Literal["separate", "stacked"]
"""How :class:`PagedKVCache` stores keys and values: in two tensors, or side by side in one."""

_CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def bytes_per_token(
    num_layers: int, num_kv_heads: int, head_size: int, dtype: torch.dtype = torch.float32
) -> int:
    """Returns the bytes that one token's keys and values take in all layers.

    Args:
        num_layers: Attention layers of the model.
        num_kv_heads: Key/value heads per layer.
        head_size: Elements per head.
        dtype: Element type of the cache.

    Example:
        >>> import torch
        >>> from paged_kv.minivllm import bytes_per_token
        >>> bytes_per_token(num_layers=32, num_kv_heads=8, head_size=128, dtype=torch.float16)
        131072
    """
    return 2 * num_layers * num_kv_heads * head_size * dtype.itemsize


def bytes_per_block(
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Returns the bytes of one block: ``block_size`` tokens in all layers.

    A memory budget divided by this is the ``num_blocks`` that fits into it.

    Args:
        block_size: Tokens per block.
        num_layers: Attention layers of the model.
        num_kv_heads: Key/value heads per layer.
        head_size: Elements per head.
        dtype: Element type of the cache.

    Example:
        >>> from paged_kv.minivllm import bytes_per_block
        >>> 2**30 // bytes_per_block(block_size=16, num_layers=30, num_kv_heads=3, head_size=64)
        1456
    """
    return block_size * bytes_per_token(num_layers, num_kv_heads, head_size, dtype)


class PagedKVCache:
    """Keys and values of all layers, in blocks.

    Both layouts keep all layers of a block together, so a block is one stretch of memory (two, if
    keys and values are separate) and can be copied or sent away as a whole:

    ========== =======================================================================
    separate   two tensors ``[num_blocks, num_layers, block_size, num_kv_heads, head_size]``
    stacked    one ``[num_blocks, 2, num_layers, block_size, num_kv_heads, head_size]``
    ========== =======================================================================

    What the ops get are views of one layer (:meth:`layer`); nothing is copied on the way. Contents
    start as zeros.

    Args:
        num_blocks: Blocks, including the null block 0 (see :class:`BlockManager`).
        num_layers: Attention layers of the model.
        block_size: Tokens per block.
        num_kv_heads: Key/value heads per layer.
        head_size: Elements per head.
        dtype: float32, float16 or bfloat16.
        layout: ``"separate"`` or ``"stacked"``.
        device: Where the tensors live.

    Raises:
        ValueError: A size is below 1, or the dtype or layout is none of the above.

    Example:
        >>> import torch
        >>> from paged_kv.minivllm import BlockManager, PagedKVCache
        >>> manager = BlockManager(num_blocks=8, block_size=16)
        >>> cache = PagedKVCache(8, num_layers=2, block_size=16, num_kv_heads=2, head_size=32)
        >>> table = manager.prefill_allocate("a", num_tokens=20)
        >>> key, value = torch.randn(2, 20, 2, 32)
        >>> cache.write(0, key, value, manager.slot_mapping("a", 0, 20))
        >>> cached_key, cached_value = cache.gather_kv_for_attention(0, table, seq_len=20)
        >>> torch.equal(cached_key, key) and torch.equal(cached_value, value)
        True
        >>> query = torch.randn(1, 4, 32)  # the last token, with 4 query heads
        >>> cache.attend(0, query, table, seq_len=20).shape
        torch.Size([1, 4, 32])
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        layout: CacheLayout = "separate",
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        check_positive(
            num_blocks=num_blocks,
            num_layers=num_layers,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
        )
        if dtype not in _CACHE_DTYPES:
            msg = f"dtype: expected one of {_CACHE_DTYPES}, got {dtype}"
            raise ValueError(msg)
        if layout not in get_args(CacheLayout):
            msg = f"layout: expected one of {get_args(CacheLayout)}, got {layout!r}"
            raise ValueError(msg)
        page = (num_layers, block_size, num_kv_heads, head_size)
        if layout == "stacked":
            kv = zeros_in_huge_pages((num_blocks, 2, *page), dtype=dtype, device=device)
            self._tensors: tuple[torch.Tensor, ...] = (kv,)
            self._key, self._value = kv.unbind(1)
        else:
            shape = (num_blocks, *page)
            self._key = zeros_in_huge_pages(shape, dtype=dtype, device=device)
            self._value = zeros_in_huge_pages(shape, dtype=dtype, device=device)
            self._tensors = (self._key, self._value)
        self._scale = torch.ones(1, dtype=torch.float32, device=device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The memory itself: ``(key, value)`` if separate, ``(kv,)`` if stacked; row = block."""
        return self._tensors

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the key and the value cache of one layer.

        Args:
            layer: Index of the layer.

        Returns:
            Two views ``[num_blocks, block_size, num_kv_heads, head_size]`` (layout nhd) that the
            ops take as they are: what is written to them is in the cache.

        Raises:
            IndexError: There is no such layer.
        """
        num_layers = self._key.size(1)
        if not 0 <= layer < num_layers:
            msg = f"layer: expected 0 to {num_layers - 1}, got {layer}"
            raise IndexError(msg)
        return self._key[:, layer], self._value[:, layer]

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Stores the keys and values of some tokens in one layer.

        Args:
            layer: Index of the layer. Its cache is mutated.
            key: ``[num_tokens, num_kv_heads, head_size]``, of the cache's dtype.
            value: As ``key``.
            slot_mapping: ``[num_tokens]`` int64; the slot of each token, negative = skip.

        Raises:
            IndexError: There is no such layer.
            RuntimeError: A tensor has the wrong shape or dtype, or a slot is past the cache.
        """
        key_cache, value_cache = self.layer(layer)
        ops.reshape_and_cache_flash(
            key, value, key_cache, value_cache, slot_mapping, "auto", self._scale, self._scale
        )

    def gather_kv_for_attention(
        self, layer: int, block_table: Sequence[int], seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies a sequence's keys and values out of their blocks, for dense attention.

        Args:
            layer: Index of the layer.
            block_table: Block ids of the sequence.
            seq_len: Tokens to take, at most ``len(block_table) * block_size``.

        Returns:
            Key and value, contiguous ``[seq_len, num_kv_heads, head_size]``.

        Raises:
            IndexError: There is no such layer or block, or the table is too short.
        """
        table = self._table_tensor(block_table, seq_len)
        cu_seq_lens = torch.tensor([0, seq_len], dtype=torch.int32, device=table.device)
        gathered = []
        for cache in self.layer(layer):
            out = cache.new_empty((seq_len, *cache.shape[2:]))
            ops.gather_cache(cache, out, table, cu_seq_lens)
            gathered.append(out)
        key, value = gathered
        return key, value

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        block_table: Sequence[int],
        seq_len: int,
        *,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Returns the causal attention of a sequence's last tokens over its cached ones.

        Reads keys and values where they lie. ``paged_kv.ops.paged_attention_varlen`` does the same
        for a batch of sequences at once.

        Args:
            layer: Index of the layer.
            query: ``[num_query_tokens, num_heads, head_size]``: the last tokens of the sequence,
                whose keys and values have been written. ``num_heads`` is a multiple of
                ``num_kv_heads``.
            block_table: Block ids of the sequence.
            seq_len: Tokens of the sequence, including those of ``query``.
            scale: Factor of the dot products, ``head_size ** -0.5`` if None.

        Returns:
            ``[num_query_tokens, num_heads, head_size]``, of the query's dtype.

        Raises:
            IndexError: There is no such layer or block, or the table is too short.
            RuntimeError: ``query`` has the wrong shape or dtype.
        """
        key_cache, value_cache = self.layer(layer)
        table = self._table_tensor(block_table, seq_len)
        out = torch.empty_like(query)
        ops.paged_attention_varlen(
            out,
            query,
            key_cache,
            value_cache,
            torch.tensor([0, query.size(0)], dtype=torch.int32, device=table.device),
            torch.tensor([seq_len], dtype=torch.int32, device=table.device),
            table,
            query.size(-1) ** -0.5 if scale is None else scale,
        )
        return out

    def _table_tensor(self, block_table: Sequence[int], seq_len: int) -> torch.Tensor:
        """The blocks of the first ``seq_len`` tokens as int32 ``[1, num_blocks]``, checked."""
        num_blocks, _, block_size = self._key.shape[:3]
        if not 0 <= seq_len <= len(block_table) * block_size:
            msg = (
                f"seq_len: expected 0 to {len(block_table) * block_size} "
                f"({len(block_table)} blocks of {block_size} tokens), got {seq_len}"
            )
            raise IndexError(msg)
        used = list(block_table[: ceil_div(seq_len, block_size)])
        for block_id in used:
            if not 0 <= block_id < num_blocks:
                msg = f"block_table: expected block ids 0 to {num_blocks - 1}, got {block_id}"
                raise IndexError(msg)
        return torch.tensor([used], dtype=torch.int32, device=self._key.device)
