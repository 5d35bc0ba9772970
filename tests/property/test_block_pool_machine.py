# SPDX-License-Identifier: Apache-2.0
"""BlockPool against a model in plain Python, over random calls."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paged_kv import BlockPool, OutOfBlocksError
from paged_kv.hashing import make_block_hash_with_group_id

BLOCK_SIZE = 4
IDS = st.lists(st.integers(-1, 9), max_size=6)


class ModelPool:
    """The rules of BlockPool, as short as they can be written."""

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        self.num_blocks, self.enable_caching = num_blocks, enable_caching
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.key_of: dict[int, str] = {}
        self.index: dict[str, list[int]] = {}

    def uncache(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            self.index[key].remove(block)
            if not self.index[key]:
                del self.index[key]

    def get_new(self, num_blocks: int) -> list[int]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block in taken:
            self.uncache(block)
            self.refs[block] = 1
        return taken

    def touch(self, blocks: list[int]) -> None:
        for block in filter(None, blocks):
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def can_free(self, blocks: list[int]) -> bool:
        return all(blocks.count(block) <= self.refs[block] for block in filter(None, blocks))

    def free_all(self, blocks: list[int]) -> None:
        released = []
        for block in filter(None, blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                released.append(block)
        front = [block for block in released if block not in self.key_of]
        back = [block for block in released if block in self.key_of]
        self.free = front + self.free + back

    def can_cache(self, blocks: list[int], keys: list[str]) -> bool:
        wanted: dict[int, str] = {}
        for block, key in zip(blocks, keys, strict=True):
            if block == 0 or self.key_of.get(block) == key:
                continue
            if self.refs[block] == 0 or block in self.key_of:
                return False
            if wanted.setdefault(block, key) != key:
                return False
        return True

    def cache(self, blocks: list[int], keys: list[str]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            if block and block not in self.key_of:
                self.key_of[block] = key
                self.index.setdefault(key, []).append(block)

    def dump(self):
        return (
            self.free,
            {block: count for block, count in self.refs.items() if count},
            {key: sorted(blocks) for key, blocks in self.index.items()},
        )


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 9), enable_caching=st.sampled_from([True, True, False]))
    def make(self, num_blocks, enable_caching):
        self.pool = BlockPool(num_blocks, enable_caching, BLOCK_SIZE)
        self.model = ModelPool(num_blocks, enable_caching)

    def known(self, blocks: list[int]) -> bool:
        return all(0 <= block < self.model.num_blocks for block in blocks)

    @rule(num_blocks=st.integers(-1, 6), as_array=st.booleans())
    def get_new_blocks(self, num_blocks, as_array):
        get = self.pool.get_new_block_ids if as_array else self.pool.get_new_blocks
        if num_blocks < 0:
            with pytest.raises(ValueError, match="must not be negative"):
                get(num_blocks)
        elif num_blocks > len(self.model.free):
            with pytest.raises(OutOfBlocksError):
                get(num_blocks)
        else:
            taken = get(num_blocks)
            ids = taken.tolist() if as_array else [block.block_id for block in taken]
            assert ids == self.model.get_new(num_blocks)

    @rule(blocks=IDS)
    def touch(self, blocks):
        if self.known(blocks):
            self.pool.touch(blocks)
            self.model.touch(blocks)
        else:
            with pytest.raises(ValueError, match="block id must be in"):
                self.pool.touch(blocks)

    @rule(blocks=IDS, as_array=st.booleans())
    def free_blocks(self, blocks, as_array):
        given = np.array(blocks, dtype=np.int64) if as_array else blocks
        if self.known(blocks) and self.model.can_free(blocks):
            self.pool.free_blocks(given)
            self.model.free_all(blocks)
        else:
            with pytest.raises(ValueError, match="block"):
                self.pool.free_blocks(given)

    @rule()
    def free_one_holder_of_everything(self):
        held = [block for block, count in self.model.refs.items() if count]
        self.pool.free_blocks(held)
        self.model.free_all(held)

    @rule(
        blocks=st.lists(st.integers(0, 8), min_size=1, max_size=5),
        first_hash=st.integers(0, 3),
        group_id=st.integers(0, 1),
        num_cached=st.integers(0, 2),
        scale=st.integers(1, 2),
    )
    def cache_full_blocks(self, blocks, first_hash, group_id, num_cached, scale):
        """Few hashes, so that different blocks often get one key."""
        if not self.known(blocks):
            return
        hashes = [bytes([first_hash + i]) * 32 for i in range(len(blocks) * scale)]
        coarse = hashes[scale - 1 :: scale]
        keys = [make_block_hash_with_group_id(h, group_id).hex() for h in coarse]
        call = (hashes, blocks, num_cached, len(blocks), BLOCK_SIZE * scale, group_id)
        new_blocks, new_keys = blocks[num_cached:], keys[num_cached:]
        request = SimpleNamespace(block_hashes=call[0])
        if not self.model.enable_caching:
            self.pool.cache_full_blocks(request, *call[1:])
        elif self.model.can_cache(new_blocks, new_keys):
            self.pool.cache_full_blocks(request, *call[1:])
            self.model.cache(new_blocks, new_keys)
        else:
            with pytest.raises(ValueError, match="cannot cache block"):
                self.pool.cache_full_blocks(request, *call[1:])

    @rule(blocks=st.sets(st.integers(0, 9)))
    def evict_blocks(self, blocks):
        if self.known(list(blocks)):
            self.pool.evict_blocks(blocks)
            for block in blocks:
                self.model.uncache(block)
        else:
            with pytest.raises(ValueError, match="block id must be in"):
                self.pool.evict_blocks(blocks)

    @rule()
    def reset_prefix_cache(self):
        can_reset = not any(self.model.refs.values())
        assert self.pool.reset_prefix_cache() is can_reset
        if can_reset:
            self.model.key_of, self.model.index = {}, {}

    @rule(first_hash=st.integers(0, 5), group_id=st.integers(0, 1), limit=st.integers(0, 4))
    def look_up(self, first_hash, group_id, limit):
        hashes = [bytes([first_hash + i]) * 32 for i in range(4)]
        expected = []
        for block_hash in hashes[:limit]:
            key = make_block_hash_with_group_id(block_hash, group_id).hex()
            if key not in self.model.index:
                break
            expected.append(self.model.index[key][0])
        assert self.pool.find_cached_prefix(hashes, limit, group_id).tolist() == expected
        found = self.pool.get_cached_block(hashes[0], [group_id])
        key = make_block_hash_with_group_id(hashes[0], group_id).hex()
        if key in self.model.index:
            assert [block.block_id for block in found] == self.model.index[key][:1]
        else:
            assert found is None

    @invariant()
    def pool_is_as_the_model_says(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.dump() == self.model.dump()
        assert self.pool.get_num_free_blocks() == len(self.model.free)
        total = self.model.num_blocks - 1
        assert self.pool.get_usage() == (1.0 - len(self.model.free) / total if total else 0.0)


BlockPoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True
)
TestBlockPool = BlockPoolMachine.TestCase
