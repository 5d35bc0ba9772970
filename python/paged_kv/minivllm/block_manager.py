# SPDX-License-Identifier: Apache-2.0
"""Which request holds which blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paged_kv._core import BlockPool
from paged_kv.minivllm._checks import ceil_div, check_positive

if TYPE_CHECKING:
    from collections.abc import Hashable

    from paged_kv._core import KVCacheBlock

__all__ = ["BlockManager"]


@dataclass(slots=True)
class _Request:
    blocks: list[KVCacheBlock]
    num_tokens: int


class BlockManager:
    """Gives each request the blocks that its tokens need, one block at a time.

    ``num_blocks`` is the number that :class:`PagedKVCache` and ``paged_kv.BlockPool`` take: the
    rows of the cache. Block 0 among them is the null block, which stands in tables where no block
    is held and is never handed out; so requests share ``num_blocks - 1`` blocks, and every id that
    this class returns indexes the cache directly.

    A call that raises has changed nothing. All calls are O(blocks they return or free) and touch no
    tensor memory.

    Args:
        num_blocks: Blocks of the cache, including the null block; at least 2.
        block_size: Tokens per block, at least 1.

    Raises:
        ValueError: An argument is too small.

    Example:
        >>> from paged_kv.minivllm import BlockManager
        >>> manager = BlockManager(num_blocks=8, block_size=4)
        >>> manager.prefill_allocate("a", num_tokens=7)
        [1, 2]
        >>> manager.decode_append("a"), manager.decode_append("a")
        (11, 12)
        >>> manager.block_table("a")  # the 9th token needed a third block
        [1, 2, 3]
        >>> manager.slot_mapping("a", 6, 9).tolist()
        [10, 11, 12]
        >>> manager.fragmentation_ratio()  # 3 of 12 slots are empty
        0.25
        >>> manager.free_request("a")
        >>> manager.num_free_blocks
        7
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            msg = f"num_blocks: expected at least 2 (block 0 is the null block), got {num_blocks}"
            raise ValueError(msg)
        check_positive(block_size=block_size)
        self._pool = BlockPool(num_blocks, enable_caching=False, hash_block_size=block_size)
        self._block_size = block_size
        self._requests: dict[Hashable, _Request] = {}

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; ``num_blocks - 1`` at first."""
        return self._pool.get_num_free_blocks()

    def prefill_allocate(self, request_id: Hashable, num_tokens: int) -> list[int]:
        """Takes the blocks for the prompt of a new request.

        Args:
            request_id: Name of the request, unused among those that hold blocks.
            num_tokens: Length of the prompt, at least 1.

        Returns:
            The block table: ``ceil(num_tokens / block_size)`` block ids. Token ``i`` lives in block
            ``table[i // block_size]`` at offset ``i % block_size``.

        Raises:
            ValueError: The request already holds blocks, or ``num_tokens`` is below 1.
            OutOfBlocksError: Fewer blocks are free than the prompt needs.
        """
        if request_id in self._requests:
            msg = f"request_id: {request_id!r} already holds blocks; free it or pick another name"
            raise ValueError(msg)
        check_positive(num_tokens=num_tokens)
        blocks = self._pool.get_new_blocks(ceil_div(num_tokens, self._block_size))
        self._requests[request_id] = _Request(list(blocks), num_tokens)
        return self.block_table(request_id)

    def decode_append(self, request_id: Hashable) -> int:
        """Makes room for one more token, with a new block if the last one is full.

        Args:
            request_id: A request that holds blocks.

        Returns:
            The slot of the new token: block id * block size + offset.

        Raises:
            ValueError: The request holds no blocks.
            OutOfBlocksError: A block is needed and none is free.
        """
        request = self._request(request_id)
        block_idx, offset = divmod(request.num_tokens, self._block_size)
        if block_idx == len(request.blocks):
            request.blocks.extend(self._pool.get_new_blocks(1))
        request.num_tokens += 1
        return request.blocks[block_idx].block_id * self._block_size + offset

    def free_request(self, request_id: Hashable) -> None:
        """Gives all blocks of a request back.

        Args:
            request_id: A request that holds blocks; the name may be used again afterwards.

        Raises:
            ValueError: The request holds no blocks, e.g. because it was freed before.
        """
        request = self._request(request_id)
        del self._requests[request_id]
        self._pool.free_blocks(request.blocks[::-1])

    def block_table(self, request_id: Hashable) -> list[int]:
        """Returns the ids of the request's blocks, in token order (a new list).

        Raises:
            ValueError: The request holds no blocks.
        """
        return [block.block_id for block in self._request(request_id).blocks]

    def num_tokens(self, request_id: Hashable) -> int:
        """Returns how many tokens of the request have a slot.

        Raises:
            ValueError: The request holds no blocks.
        """
        return self._request(request_id).num_tokens

    def slot_mapping(self, request_id: Hashable, start: int, end: int) -> torch.Tensor:
        """Returns the slots of the tokens ``start`` to ``end - 1`` of a request.

        Args:
            request_id: A request that holds blocks.
            start: First token position.
            end: One past the last token position, at most :meth:`num_tokens`.

        Returns:
            ``[end - start]`` int64 on the CPU: what :meth:`PagedKVCache.write` takes.

        Raises:
            ValueError: The request holds no blocks.
            IndexError: Not ``0 <= start <= end <= num_tokens(request_id)``.
        """
        request = self._request(request_id)
        if not 0 <= start <= end <= request.num_tokens:
            msg = (
                f"start, end: expected 0 <= start <= end <= {request.num_tokens} (the tokens of "
                f"request {request_id!r}), got {start}, {end}"
            )
            raise IndexError(msg)
        positions = torch.arange(start, end, dtype=torch.int64)
        table = torch.tensor(self.block_table(request_id), dtype=torch.int64)
        return table[positions // self._block_size] * self._block_size + (
            positions % self._block_size
        )

    def fragmentation_ratio(self) -> float:
        """Returns the share of empty slots in the blocks that requests hold.

        ``(blocks * block_size - used) / (blocks * block_size)`` with ``blocks`` the blocks held and
        ``used`` the tokens in them; 0.0 when nothing is allocated. Paging wastes only the end of a
        request's last block, so this is below ``(block_size - 1) / block_size`` for whatever
        lengths. O(requests).
        """
        num_slots = sum(len(r.blocks) for r in self._requests.values()) * self._block_size
        if num_slots == 0:
            return 0.0
        num_used = sum(r.num_tokens for r in self._requests.values())
        return (num_slots - num_used) / num_slots

    def _request(self, request_id: Hashable) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            msg = f"request_id: {request_id!r} holds no blocks (never allocated, or freed before)"
            raise ValueError(msg)
        return request
