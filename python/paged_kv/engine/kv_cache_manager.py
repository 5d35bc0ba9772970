# SPDX-License-Identifier: Apache-2.0
"""Which blocks each request holds: prefix hits, allocation, caching, release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_kv._core import BlockPool, KVCacheBlock, KVCacheBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paged_kv.engine.request import Request

__all__ = ["BlockUsage", "KVCacheManager", "SlotUsage"]


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """The pool's blocks by state; the null block is in none of the numbers.

    Attributes:
        num_used: Held by at least one request; a shared block counts once.
        num_idle_cached: Held by none, content still findable through the prefix cache.
        num_free: Held by none and without cached content.
    """

    num_used: int
    num_idle_cached: int
    num_free: int


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """How well the used blocks are filled.

    Attributes:
        num_used_blocks: Blocks that requests hold; a shared block counts once.
        fragmentation: Share of their slots that holds no token, 0 to 1.
    """

    num_used_blocks: int
    fragmentation: float


class KVCacheManager:
    """Blocks of requests to a model with one group of full-attention layers.

    It holds ids and counters, never tensors. All blocks come from the native pool.

    Invariants: a request's blocks cover its computed tokens; a block that is shared is full; a
    call that returns ``None`` or raises has changed nothing.

    Args:
        num_blocks: Blocks in the pool including the null block, at least 2.
        block_size: Tokens per block.
        max_model_len: No request gets slots past this many tokens.
        enable_caching: Whether full blocks can be found again by their content.

    Source:
        Method names and semantics follow vLLM 0.32 ``v1/core/kv_cache_manager.py::KVCacheManager``
        for a single full-attention group.

    Example:
        >>> manager = KVCacheManager(num_blocks=5, block_size=16, max_model_len=64)
        >>> manager.num_token_slots, manager.get_block_usage().num_free
        (64, 4)
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, max_model_len: int, enable_caching: bool = True
    ) -> None:
        if num_blocks < 2:
            msg = f"num_blocks must be at least 2 (block 0 is never handed out), got {num_blocks}"
            raise ValueError(msg)
        if block_size < 1:
            msg = f"block_size must be at least 1, got {block_size}"
            raise ValueError(msg)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.block_pool = BlockPool(num_blocks, enable_caching, block_size)
        # By id; made once, since the pool makes a new list each time it is asked.
        self._blocks = self.block_pool.blocks
        self._req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        # Leading blocks of a request that are in the prefix cache already.
        self._num_cached_blocks: dict[str, int] = {}

    @property
    def num_token_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self._num_usable_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold, 0 to 1. Idle cached blocks do not count."""
        return float(self.block_pool.get_usage())

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Find the longest cached prefix of a request that holds no blocks.

        At least one token is left to compute, else there would be nothing to sample from; as only
        whole blocks are shared, a fully cached prompt recomputes its last block.

        Args:
            request: A waiting request. Not changed, nor are the blocks found.

        Returns:
            The blocks, in order, and the number of tokens in them.

        Notes:
            Cost: one hash lookup per block, up to the first miss.
        """
        max_num_blocks = (request.num_tokens - 1) // self.block_size
        if not self.enable_caching or request.skip_reading_prefix_cache:
            max_num_blocks = 0
        hit_ids = self.block_pool.find_cached_prefix(request.block_hashes, max_num_blocks)
        hits = [self._blocks[block_id] for block_id in hit_ids.tolist()]
        return KVCacheBlocks((hits,)), len(hits) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        *,
        full_sequence_must_fit: bool = False,
    ) -> KVCacheBlocks | None:
        """Give a request the blocks for its next tokens.

        Prefix hits are adopted before new blocks are taken, so that taking blocks cannot evict
        them. Blocks that these tokens fill go into the prefix cache at once: a request scheduled
        later in the same step may share them, as each layer stores keys and values before it
        attends.

        Args:
            request: ``num_computed_tokens`` says where its new tokens begin.
            num_new_tokens: Tokens to compute in this step.
            num_new_computed_tokens: Tokens in ``new_computed_blocks``.
            new_computed_blocks: Result of :meth:`get_computed_blocks`, for a request without
                blocks.
            num_lookahead_tokens: Slots to have ready beyond the new tokens.
            full_sequence_must_fit: Refuse unless all tokens that the request has now would fit,
                not just the new ones.

        Returns:
            The newly taken blocks, possibly none, or ``None`` if the pool has too few.

        Raises:
            ValueError: Nothing to allocate, or hits for a request that holds blocks.

        Notes:
            Cost: linear in the blocks taken, adopted or filled.
        """
        hits = list(new_computed_blocks.blocks[0]) if new_computed_blocks is not None else []
        held = self._req_to_blocks.get(request.request_id, [])
        if num_new_tokens <= 0:
            msg = f"num_new_tokens must be at least 1, got {num_new_tokens}"
            raise ValueError(msg)
        if hits and held:
            msg = f"request {request.request_id!r} holds blocks, prefix hits came too late"
            raise ValueError(msg)
        if num_new_computed_tokens != len(hits) * self.block_size:
            msg = (
                f"num_new_computed_tokens must be {len(hits) * self.block_size} for {len(hits)} "
                f"blocks, got {num_new_computed_tokens}"
            )
            raise ValueError(msg)

        num_covered_blocks = len(held) + len(hits)
        num_tokens = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        num_new_blocks = self._count_missing_blocks(
            num_tokens + num_lookahead_tokens, num_covered_blocks
        )
        num_required = num_new_blocks
        if full_sequence_must_fit:
            whole = self._count_missing_blocks(request.num_tokens, num_covered_blocks)
            num_required = max(num_required, whole)
        # Idle hits sit in the free queue: adopting them uses up capacity too.
        num_idle_hits = sum(block.ref_cnt == 0 for block in hits)
        if num_required + num_idle_hits > self.block_pool.get_num_free_blocks():
            return None

        if hits:
            self.block_pool.touch(hits)
        new_blocks = list(self.block_pool.get_new_blocks(num_new_blocks))
        self._req_to_blocks[request.request_id] = [*held, *hits] if hits else held
        self._req_to_blocks[request.request_id].extend(new_blocks)
        if hits:
            self._num_cached_blocks[request.request_id] = len(hits)
        self.cache_blocks(request, min(num_tokens, request.num_tokens))
        return KVCacheBlocks((new_blocks,))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make the blocks that the first ``num_computed_tokens`` tokens fill findable."""
        if not self.enable_caching:
            return
        request_id = request.request_id
        num_cached = self._num_cached_blocks.get(request_id, 0)
        num_full = num_computed_tokens // self.block_size
        if num_full <= num_cached:
            return
        blocks = self._req_to_blocks[request_id]
        self.block_pool.cache_full_blocks(request, blocks, num_cached, num_full, self.block_size, 0)
        self._num_cached_blocks[request_id] = num_full

    def free(self, request: Request) -> None:
        """Take back a request's blocks, the last first, so that prefixes are evicted last.

        A request that holds none is left alone. Full blocks stay findable until they are reused.
        """
        blocks = self._req_to_blocks.pop(request.request_id, None)
        self._num_cached_blocks.pop(request.request_id, None)
        if blocks:
            self.block_pool.free_blocks(blocks[::-1])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, e.g. after the weights changed.

        Returns:
            Whether it was done: not while any request holds blocks.
        """
        return bool(self.block_pool.reset_prefix_cache())

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks of a request in order; empty for an unknown one."""
        return KVCacheBlocks((self._req_to_blocks.get(request_id, []),))

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        """The block ids of a request, in a tuple of one group."""
        return ([block.block_id for block in self._req_to_blocks.get(request_id, [])],)

    def get_block_usage(self) -> BlockUsage:
        """Count blocks by state. Cost: linear in the pool."""
        num_free = self.block_pool.get_num_free_blocks()
        num_used = self._num_usable_blocks - num_free
        num_idle_cached = len(self.get_idle_cached_block_ids())
        return BlockUsage(num_used, num_idle_cached, num_free - num_idle_cached)

    def get_idle_cached_block_ids(self) -> frozenset[int]:
        """Blocks that nobody holds and the prefix cache can find. Cost: linear in the pool."""
        return frozenset(
            block.block_id
            for block in self._blocks
            if block.ref_cnt == 0 and block.block_hash is not None
        )

    def get_slot_usage(self, requests: Iterable[Request]) -> SlotUsage:
        """Measure how well blocks are filled, once a step's tokens are stored.

        Args:
            requests: All requests that hold blocks.

        Notes:
            Cost: linear in the requests.
        """
        num_used_blocks = self._num_usable_blocks - self.block_pool.get_num_free_blocks()
        # A block that is not full is never shared: empty slots belong to one request.
        num_empty_slots = sum(
            len(self._req_to_blocks[request.request_id]) * self.block_size
            - request.num_computed_tokens
            for request in requests
        )
        num_slots = num_used_blocks * self.block_size
        return SlotUsage(num_used_blocks, num_empty_slots / num_slots if num_slots else 0.0)

    @property
    def _num_usable_blocks(self) -> int:
        """All but the null block."""
        return self.block_pool.num_gpu_blocks - 1

    def _count_missing_blocks(self, num_tokens: int, num_covered_blocks: int) -> int:
        num_tokens = min(num_tokens, self.max_model_len)
        return max(-(-num_tokens // self.block_size) - num_covered_blocks, 0)
