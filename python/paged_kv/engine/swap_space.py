# SPDX-License-Identifier: Apache-2.0
"""Blocks in the host's memory, where preempted requests leave what they have computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SwapSpace"]

_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class _SwappedRequest:
    """What a request has in the space.

    Attributes:
        num_computed_tokens: Tokens whose keys and values are there.
        block_ids: For each KV cache group, by place in the block table: a block of the space, or
            None where the request held none (it had left the window).
    """

    num_computed_tokens: int
    block_ids: tuple[tuple[int | None, ...], ...]


class SwapSpace:
    """Which blocks of the swap space are free, and what is in the others.

    It holds ids, no tensors: the caller makes the copies that it is told.

    Args:
        num_blocks: Blocks of the space; 0: there is none.
        block_sizes: Tokens per block of each KV cache group.
    """

    def __init__(self, num_blocks: int, block_sizes: Sequence[int]) -> None:
        self._block_sizes = block_sizes
        self._num_blocks = num_blocks
        self._free_block_ids = list(range(num_blocks))[::-1]
        self._requests: dict[str, _SwappedRequest] = {}
        self._copies: list[tuple[int, int]] = []

    @property
    def num_used_blocks(self) -> int:
        """Blocks that hold something."""
        return self._num_blocks - len(self._free_block_ids)

    def num_computed_tokens(self, request_id: str) -> int:
        """Tokens of a request that are in the space; 0: it is not there."""
        swapped = self._requests.get(request_id)
        return swapped.num_computed_tokens if swapped is not None else 0

    def swap_out(
        self, request_id: str, block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> bool:
        """Take a block for each block that a request holds; `take_copies` has the copies.

        Args:
            request_id: Names the request.
            block_ids: Its block table in each group; 0 is the null block.
            num_computed_tokens: Blocks past these tokens hold nothing.

        Returns:
            Whether it is in the space now: not if it does not fit.
        """
        held = [
            ids[: -(-num_computed_tokens // block_size)]
            for ids, block_size in zip(block_ids, self._block_sizes, strict=True)
        ]
        num_blocks = sum(block_id != _NULL_BLOCK for ids in held for block_id in ids)
        if num_blocks == 0 or num_blocks > len(self._free_block_ids):
            return False
        places = tuple(tuple(self._place(block_id) for block_id in ids) for ids in held)
        self._requests[request_id] = _SwappedRequest(num_computed_tokens, places)
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """Copies of what was swapped out since the last call: ``(cache block, space block)``."""
        copies, self._copies = self._copies, []
        return copies

    def swap_in(self, request_id: str, block_ids: tuple[list[int], ...]) -> list[tuple[int, int]]:
        """The copies that bring a request back: ``(space block, cache block)``.

        Its blocks of the space are free afterwards: the copies must be made before the space is
        written to again.

        Args:
            request_id: Names the request.
            block_ids: The block tables that it has now. Blocks that have left a window since are
                null blocks, and are left out.
        """
        copies = [
            (place, block_id)
            for places, ids in zip(self._requests[request_id].block_ids, block_ids, strict=True)
            for place, block_id in zip(places, ids, strict=False)
            if place is not None and block_id != _NULL_BLOCK
        ]
        self.discard(request_id)
        return copies

    def discard(self, request_id: str) -> None:
        """Free the blocks of a request that does not come back. Others are left alone."""
        swapped = self._requests.pop(request_id, None)
        if swapped is None:
            return
        self._free_block_ids.extend(
            place for places in swapped.block_ids for place in places if place is not None
        )

    def clear(self) -> None:
        """Discard all requests."""
        for request_id in list(self._requests):
            self.discard(request_id)
        self._copies.clear()

    def _place(self, block_id: int) -> int | None:
        if block_id == _NULL_BLOCK:
            return None
        place = self._free_block_ids.pop()
        self._copies.append((block_id, place))
        return place
