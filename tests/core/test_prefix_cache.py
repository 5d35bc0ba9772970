# SPDX-License-Identifier: Apache-2.0
"""The prefix cache of BlockPool (docs/invariants.md, V7 to V21)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paged_kv import BlockPool
from paged_kv.hashing import BlockHashList, get_request_block_hasher, make_block_hash_with_group_id

BLOCK_SIZE = 16


def hashes_of(num_tokens: int, *, prompt: int = 0, block_size: int = BLOCK_SIZE) -> BlockHashList:
    request = SimpleNamespace(
        all_token_ids=[prompt * 10_000 + i for i in range(num_tokens)], block_hashes=[]
    )
    return get_request_block_hasher(block_size)(request)


def make_pool(num_blocks: int = 11) -> BlockPool:
    return BlockPool(num_blocks, True, BLOCK_SIZE)


def allocate_and_cache(pool: BlockPool, hashes: BlockHashList, group_id: int = 0) -> np.ndarray:
    ids = pool.get_new_block_ids(len(hashes))
    pool.cache_full_blocks(hashes, ids, 0, len(hashes), BLOCK_SIZE, group_id)
    return ids


def find(pool: BlockPool, hashes: BlockHashList, group_id: int = 0) -> list[int]:
    return pool.find_cached_prefix(hashes, len(hashes), group_id).tolist()


def test_two_requests_share_a_prefix_block_through_its_life():
    pool = make_pool(5)
    hashes = hashes_of(16)
    (first,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(hashes, [first], 0, 1, BLOCK_SIZE, 0)
    assert first.ref_cnt == 1
    (second,) = pool.get_cached_block(hashes[0], [0])
    assert second == first
    pool.touch([second])
    assert first.ref_cnt == 2
    pool.free_blocks([first])
    assert first.ref_cnt == 1
    assert first.block_id not in pool.dump()[0]
    pool.free_blocks([second])
    assert first.ref_cnt == 0
    assert pool.dump()[0] == [2, 3, 4, 1]
    assert find(pool, hashes) == [1]
    pool.get_new_blocks(3)
    assert find(pool, hashes) == [1]
    pool.get_new_blocks(1)
    assert find(pool, hashes) == []
    assert first.block_hash is None


def test_a_reused_block_is_not_found_under_its_old_content():
    pool = make_pool(2)
    for prompt in range(20):
        hashes = hashes_of(16, prompt=prompt)
        pool.free_blocks(allocate_and_cache(pool, hashes))
        assert find(pool, hashes) == [1]
        if prompt:
            assert find(pool, hashes_of(16, prompt=prompt - 1)) == []
        assert len(pool.dump()[2]) == 1
        pool.check_integrity()


def test_blocks_with_one_key_coexist_and_the_first_is_found():
    pool = make_pool()
    hashes = hashes_of(16)
    first, second = allocate_and_cache(pool, hashes), allocate_and_cache(pool, hashes)
    key = make_block_hash_with_group_id(hashes[0], 0).hex()
    assert pool.dump()[2] == {key: [1, 2]}
    assert find(pool, hashes) == [1]
    pool.evict_blocks(first)
    assert find(pool, hashes) == [2]
    pool.evict_blocks(second)
    assert find(pool, hashes) == []


def test_equal_blocks_are_found_in_the_order_of_their_caching():
    pool = make_pool()
    hashes = hashes_of(16)
    for _ in range(5):
        allocate_and_cache(pool, hashes)
    pool.evict_blocks([3])
    found = []
    while ids := find(pool, hashes):
        found += ids
        pool.evict_blocks(ids)
    assert found == [1, 2, 4, 5]


def test_reuse_of_one_of_two_equal_blocks_leaves_the_other_with_its_owner():
    """Two requests with one prompt in one step hold different blocks; no block gets two owners."""
    pool = make_pool(4)
    hashes = hashes_of(16)
    first, second = allocate_and_cache(pool, hashes), allocate_and_cache(pool, hashes)
    pool.free_blocks(second)
    third = pool.get_new_block_ids(2)
    assert set(third.tolist()) == {2, 3}
    assert find(pool, hashes) == first.tolist()
    pool.check_integrity()


def test_eviction_of_a_held_block_ends_the_hit_but_not_the_holding():
    pool = make_pool()
    hashes = hashes_of(80)
    ids = allocate_and_cache(pool, hashes)
    pool.evict_blocks({2})
    assert find(pool, hashes) == [1]
    assert pool.dump()[1] == dict.fromkeys(ids.tolist(), 1)
    assert len(pool.dump()[2]) == 4
    pool.check_integrity()


@pytest.mark.parametrize(("evicted", "expected"), [(1, []), (2, [1]), (3, [1, 2])])
def test_a_hit_stops_at_the_first_miss(evicted, expected):
    pool = make_pool()
    hashes = hashes_of(48)
    allocate_and_cache(pool, hashes)
    pool.evict_blocks([evicted])
    assert find(pool, hashes) == expected


def test_eviction_of_a_free_block_keeps_its_place_in_the_queue():
    pool = make_pool(6)
    pool.free_blocks(allocate_and_cache(pool, hashes_of(48))[::-1])
    before = pool.dump()[0]
    pool.evict_blocks({2})
    assert pool.dump()[0] == before == [4, 5, 3, 2, 1]
    assert len(pool.dump()[2]) == 2


def test_reset_is_refused_while_blocks_are_held():
    pool = make_pool()
    hashes = hashes_of(32)
    ids = allocate_and_cache(pool, hashes)
    pool.free_blocks(ids[1:])
    before = pool.dump()
    assert pool.reset_prefix_cache() is False
    assert pool.dump() == before
    pool.free_blocks(ids[:1])
    order = pool.dump()[0]
    assert pool.reset_prefix_cache() is True
    assert pool.dump() == (order, {}, {})
    assert find(pool, hashes) == []
    pool.check_integrity()


def test_groups_are_kept_apart_and_all_must_hit():
    pool = make_pool()
    hashes = hashes_of(16)
    allocate_and_cache(pool, hashes, group_id=0)
    assert pool.get_cached_block(hashes[0], [0, 1]) is None
    allocate_and_cache(pool, hashes, group_id=1)
    assert [b.block_id for b in pool.get_cached_block(hashes[0], [1, 0])] == [2, 1]
    assert find(pool, hashes, group_id=1) == [2]


def test_freeing_group_after_group_orders_each_tail_first():
    pool = make_pool(10)
    first = allocate_and_cache(pool, hashes_of(48), group_id=0)
    second = allocate_and_cache(pool, hashes_of(48), group_id=1)
    pool.free_blocks(first[::-1])
    pool.free_blocks(second[::-1])
    assert pool.dump()[0] == [7, 8, 9, 3, 2, 1, 6, 5, 4]


def test_freeing_all_groups_reversed_orders_the_last_group_first():
    pool = make_pool(10)
    first = allocate_and_cache(pool, hashes_of(48), group_id=0)
    second = allocate_and_cache(pool, hashes_of(48), group_id=1)
    pool.free_blocks(np.concatenate([first, second])[::-1])
    assert pool.dump()[0] == [7, 8, 9, 6, 5, 4, 3, 2, 1]


def test_caching_again_is_a_no_op():
    """Repeated, after a hit, and after a preempted request has come back to its own blocks."""
    pool = make_pool()
    hashes = hashes_of(64)
    ids = pool.get_new_block_ids(4)
    pool.cache_full_blocks(hashes, ids, 0, 2, BLOCK_SIZE, 0)
    once = pool.dump()
    for num_cached in (0, 1, 2):
        pool.cache_full_blocks(hashes, ids, num_cached, 2, BLOCK_SIZE, 0)
        assert pool.dump() == once
    pool.cache_full_blocks(hashes, ids, 1, 4, BLOCK_SIZE, 0)
    assert find(pool, hashes) == [1, 2, 3, 4]
    pool.free_blocks(ids[::-1])
    hit = pool.find_cached_prefix(hashes, 3)
    pool.touch(hit)
    resumed = np.concatenate([hit, pool.get_new_block_ids(1)])
    pool.cache_full_blocks(hashes, resumed, 0, 4, BLOCK_SIZE, 0)
    assert find(pool, hashes)[:3] == [1, 2, 3]
    pool.check_integrity()


def test_a_block_cannot_be_cached_as_another_content():
    pool = make_pool()
    ids = allocate_and_cache(pool, hashes_of(16))
    more = np.concatenate([pool.get_new_block_ids(1), ids])
    before = pool.dump()
    with pytest.raises(ValueError, match="block 1: it is cached as another content"):
        pool.cache_full_blocks(hashes_of(32, prompt=1), more, 0, 2, BLOCK_SIZE, 0)
    assert pool.dump() == before


def test_a_free_block_cannot_be_cached():
    pool = make_pool()
    with pytest.raises(ValueError, match="block 3: nobody holds it"):
        pool.cache_full_blocks(hashes_of(16), [3], 0, 1, BLOCK_SIZE, 0)


@pytest.mark.parametrize("num_tokens", range(1, 49))
def test_only_full_blocks_are_indexed(num_tokens):
    pool = make_pool()
    hashes = hashes_of(num_tokens)
    num_full = num_tokens // BLOCK_SIZE
    pool.cache_full_blocks(hashes, pool.get_new_blocks(3), 0, num_full, BLOCK_SIZE, 0)
    assert len(pool.dump()[2]) == num_full
    if num_full < 3:
        with pytest.raises(ValueError, match="has hashes for"):
            pool.cache_full_blocks(hashes, [1, 2, 3], 0, num_full + 1, BLOCK_SIZE, 0)


def test_masked_and_null_blocks_are_left_out():
    pool = make_pool()
    hashes = hashes_of(80)
    ids = pool.get_new_block_ids(5)
    blocks = [0, *ids[1:]]
    pool.cache_full_blocks(hashes, blocks, 0, 1, BLOCK_SIZE, 0)
    pool.cache_full_blocks(
        hashes, blocks, 1, 5, BLOCK_SIZE, 0, block_mask=[True, False, False, True]
    )
    assert [block.block_id for block in pool.blocks if block.block_hash] == [2, 5]
    assert pool.blocks[5].block_hash == make_block_hash_with_group_id(hashes[4], 0)
    assert pool.blocks[5].block_hash_num_tokens == 80
    with pytest.raises(ValueError, match="block_mask must have one entry"):
        pool.cache_full_blocks(hashes, blocks, 0, 5, BLOCK_SIZE, 0, block_mask=[True])


def test_coarse_blocks_are_named_by_their_last_fine_hash():
    pool = make_pool()
    fine = hashes_of(5 * BLOCK_SIZE)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(fine, blocks, 0, 2, 2 * BLOCK_SIZE, 0)
    assert [block.block_hash[:32] for block in blocks] == [fine[1], fine[3]]
    assert [block.block_hash_num_tokens for block in blocks] == [32, 64]
    assert pool.find_cached_prefix(fine, 9, 0, 2 * BLOCK_SIZE).tolist() == [1, 2]
    with pytest.raises(ValueError, match="has hashes for 2 blocks"):
        pool.cache_full_blocks(fine, pool.get_new_blocks(3), 0, 3, 2 * BLOCK_SIZE, 0)
    with pytest.raises(ValueError, match="multiple of hash_block_size"):
        pool.find_cached_prefix(fine, 9, 0, 24)


def test_a_whole_cached_prompt_leaves_its_last_token_to_compute():
    """48 cached tokens: the lookup limit of a 48-token prompt is 47 tokens, so 32 are hit."""
    pool = make_pool()
    hashes = hashes_of(48)
    allocate_and_cache(pool, hashes)
    assert len(pool.find_cached_prefix(hashes, (48 - 1) // BLOCK_SIZE)) == 2
    assert len(pool.find_cached_prefix(hashes, (49 - 1) // BLOCK_SIZE)) == 3
    assert len(pool.find_cached_prefix(hashes, 0)) == 0


def test_a_hit_that_is_not_held_can_be_lost_to_the_next_allocation():
    """Lookup does not hold: a caller must touch before it allocates, and then the hit stays."""
    pool = make_pool(3)
    hashes = hashes_of(32)
    pool.free_blocks(allocate_and_cache(pool, hashes)[::-1])
    hit = pool.find_cached_prefix(hashes, 2)
    pool.touch(hit)
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)
    pool.free_blocks(hit[::-1])
    pool.get_new_blocks(1)
    assert find(pool, hashes) == [1]


def test_a_block_that_is_pinned_and_unpinned_is_queued_once():
    pool = make_pool(4)
    pool.free_blocks(allocate_and_cache(pool, hashes_of(16)))
    pool.touch([1])
    pool.free_blocks([1])
    assert pool.dump()[0] == [2, 3, 1]
    pool.check_integrity()


def test_requests_give_their_hashes_as_a_list_or_natively():
    for wrap in (lambda h: h, list, lambda h: SimpleNamespace(block_hashes=h)):
        pool = make_pool()
        hashes = hashes_of(32)
        request = wrap(hashes)
        if isinstance(request, list):
            request = SimpleNamespace(block_hashes=request)
        pool.cache_full_blocks(request, pool.get_new_blocks(2), 0, 2, BLOCK_SIZE, 0)
        assert pool.find_cached_prefix(list(hashes), 2).tolist() == [1, 2]


def test_without_caching_nothing_is_found():
    pool = BlockPool(6, False, BLOCK_SIZE)
    hashes = hashes_of(32)
    ids = allocate_and_cache(pool, hashes)
    assert find(pool, hashes) == []
    assert pool.get_cached_block(hashes[0], [0]) is None
    assert pool.blocks[1].block_hash is None
    pool.evict_blocks(ids)
    pool.free_blocks(ids)
    assert pool.reset_prefix_cache() is True
    pool.check_integrity()
