# SPDX-License-Identifier: Apache-2.0
"""BlockPool: allocation, reference counts, order of reuse (docs/invariants.md, V1 to V6)."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest

from paged_kv import BlockPool, KVCacheBlock, OutOfBlocksError
from paged_kv.hashing import BlockHashList, get_request_block_hasher

BLOCK_SIZE = 16


def make_pool(num_blocks: int = 11, *, enable_caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks, enable_caching, BLOCK_SIZE)


def hashes_of(num_tokens: int, first_token: int = 0) -> BlockHashList:
    request = SimpleNamespace(
        all_token_ids=list(range(first_token, first_token + num_tokens)), block_hashes=[]
    )
    return get_request_block_hasher(BLOCK_SIZE)(request)


def free_order(pool: BlockPool) -> list[int]:
    return pool.dump()[0]


def cache(pool: BlockPool, blocks, num_full: int, hashes: BlockHashList | None = None) -> None:
    hashes = hashes_of(num_full * BLOCK_SIZE) if hashes is None else hashes
    pool.cache_full_blocks(hashes, blocks, 0, num_full, BLOCK_SIZE, 0)


def test_new_pool_keeps_block_0_back_and_hands_out_the_others_in_order():
    pool = make_pool(11)
    assert free_order(pool) == list(range(1, 11))
    assert pool.null_block.block_id == 0
    assert pool.null_block.is_null
    assert pool.get_usage() == 0.0
    assert [b.block_id for b in pool.get_new_blocks(3)] == [1, 2, 3]


def test_usage_counts_without_the_null_block():
    pool = make_pool(11)
    pool.get_new_blocks(5)
    assert pool.get_usage() == 0.5
    pool.get_new_blocks(5)
    assert pool.get_usage() == 1.0
    assert BlockPool(1, True, BLOCK_SIZE).get_usage() == 0.0


def test_freed_blocks_without_hash_go_to_the_front_and_hashed_ones_to_the_back():
    pool = make_pool(11)
    blocks = pool.get_new_blocks(4)
    cache(pool, blocks, 3)
    pool.free_blocks(reversed(blocks))
    assert free_order(pool) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]


def test_without_caching_all_freed_blocks_go_to_the_front():
    pool = make_pool(11, enable_caching=False)
    blocks = pool.get_new_blocks(5)
    pool.free_blocks(reversed(blocks))
    assert free_order(pool) == [5, 4, 3, 2, 1, 6, 7, 8, 9, 10]


def test_too_large_a_request_raises_and_changes_nothing():
    pool = make_pool(11)
    cached = pool.get_new_blocks(2)
    cache(pool, cached, 2)
    pool.free_blocks(cached)
    before = pool.dump()
    with pytest.raises(OutOfBlocksError, match="Cannot get 11 free blocks"):
        pool.get_new_blocks(11)
    assert issubclass(OutOfBlocksError, ValueError)
    assert pool.dump() == before
    assert len(pool.get_new_blocks(10)) == 10


def test_new_blocks_have_one_holder_and_no_hash():
    pool = make_pool(3)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks, 2)
    pool.free_blocks(reversed(blocks))
    again = pool.get_new_blocks(2)
    assert [b.block_id for b in again] == [2, 1]
    assert [b.ref_cnt for b in again] == [1, 1]
    assert [b.block_hash for b in again] == [None, None]
    assert pool.dump()[2] == {}


def test_touch_takes_a_free_block_out_of_the_middle_of_the_queue():
    pool = make_pool(8)
    pool.touch([4])
    assert free_order(pool) == [1, 2, 3, 5, 6, 7]
    pool.touch([4])
    pool.free_blocks([4])
    assert free_order(pool) == [1, 2, 3, 5, 6, 7]
    assert pool.dump()[1] == {4: 1}
    pool.check_integrity()


def test_null_block_is_never_queued_counted_cached_or_evicted():
    pool = make_pool(5)
    held = pool.get_new_blocks(1)
    before = pool.dump()
    for _ in range(3):
        pool.touch([pool.null_block])
    for _ in range(5):
        pool.free_blocks([0])
    pool.cache_full_blocks(hashes_of(16), [0], 0, 1, BLOCK_SIZE, 0)
    pool.evict_blocks({0})
    assert pool.dump() == before
    assert pool.null_block.ref_cnt == 0
    pool.check_integrity()
    pool.free_blocks(held)


def test_a_block_in_one_free_call_twice_needs_two_holders():
    pool = make_pool(5)
    (block,) = pool.get_new_blocks(1)
    before = pool.dump()
    with pytest.raises(ValueError, match="block 1 is freed more often than it is held"):
        pool.free_blocks([block, block])
    assert pool.dump() == before
    pool.touch([block])
    pool.free_blocks([block, block])
    assert free_order(pool) == [1, 2, 3, 4]
    drained = [b.block_id for b in pool.get_new_blocks(4)]
    assert len(set(drained)) == 4


@pytest.mark.parametrize("bad", [[5], [-1], [2], [1, 3, 3], [1, 0, 7]])
def test_a_free_call_with_one_bad_block_changes_nothing(bad):
    pool = make_pool(5)
    pool.get_new_blocks(1)
    pool.touch([3])
    before = pool.dump()
    with pytest.raises(ValueError, match="block"):
        pool.free_blocks(bad)
    assert pool.dump() == before
    pool.check_integrity()


@pytest.mark.parametrize("method", ["touch", "evict_blocks"])
@pytest.mark.parametrize("bad_id", [-1, 5, 2**31 - 1])
def test_unknown_ids_are_refused_before_anything_changes(method, bad_id):
    pool = make_pool(5)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks, 2)
    before = pool.dump()
    with pytest.raises(ValueError, match=r"block id must be in \[0, 5\)"):
        getattr(pool, method)([1, bad_id])
    assert pool.dump() == before


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        iter,
        lambda blocks: [b.block_id for b in blocks],
        lambda blocks: np.array([b.block_id for b in blocks], dtype=np.int32),
        lambda blocks: np.array([b.block_id for b in blocks], dtype=np.int64),
        lambda blocks: np.repeat([b.block_id for b in blocks], 2)[::2],
        lambda blocks: [np.int64(b.block_id) for b in blocks],
    ],
    ids=["list", "tuple", "iterator", "ints", "int32", "int64", "strided", "numpy_ints"],
)
def test_blocks_are_accepted_as_handles_ints_and_arrays(convert):
    pool = make_pool(6)
    blocks = pool.get_new_blocks(3)
    pool.touch(convert(blocks))
    assert pool.dump()[1] == {1: 2, 2: 2, 3: 2}
    pool.free_blocks(convert(blocks))
    pool.free_blocks(convert(blocks))
    assert free_order(pool) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        ([1.0], TypeError),
        (["1"], TypeError),
        ("1", TypeError),
        ([None], TypeError),
        (np.array([1.0]), TypeError),
        (np.array([True]), TypeError),
        (np.array([[1]]), ValueError),
        ([2**40], ValueError),
        (np.array([2**40]), ValueError),
        (1, TypeError),
    ],
)
def test_other_types_of_blocks_are_refused(blocks, error):
    pool = make_pool(6)
    pool.get_new_blocks(1)
    with pytest.raises(error):
        pool.touch(blocks)
    assert pool.dump()[1] == {1: 1}


def test_blocks_of_another_pool_are_refused():
    pool, other = make_pool(6), make_pool(6)
    mine, foreign = pool.get_new_blocks(1), other.get_new_blocks(1)
    for call in (pool.touch, pool.free_blocks, pool.evict_blocks):
        with pytest.raises(ValueError, match="another pool"):
            call(foreign)
        with pytest.raises(ValueError, match="several pools"):
            call(mine + foreign)
        with pytest.raises(ValueError, match="another pool"):
            call([KVCacheBlock(1)])
    assert mine != foreign


def test_new_block_ids_are_an_int32_array():
    pool = make_pool(6)
    ids = pool.get_new_block_ids(3)
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 2, 3]
    assert pool.get_new_block_ids(0).shape == (0,)
    pool.free_blocks(ids)
    assert pool.get_num_free_blocks() == 5


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((0, True, 16), ValueError),
        ((-1, True, 16), ValueError),
        ((4, True, 0), ValueError),
        ((4.0, True, 16), TypeError),
        ((4, 1, 16), TypeError),
    ],
)
def test_bad_constructor_arguments_are_refused(args, error):
    with pytest.raises(error):
        BlockPool(*args)


@pytest.mark.parametrize(("num_blocks", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_bad_numbers_of_new_blocks_are_refused(num_blocks, error):
    pool = make_pool(4)
    with pytest.raises(error):
        pool.get_new_blocks(num_blocks)
    with pytest.raises(error):
        pool.get_new_block_ids(num_blocks)
    assert pool.get_num_free_blocks() == 3


def test_handles_keep_their_pool_alive():
    pool = make_pool(4)
    block = pool.get_new_blocks(1)[0]
    del pool
    gc.collect()
    assert (block.block_id, block.ref_cnt) == (1, 1)


def test_handles_of_a_pool_are_equal_by_block_and_show_its_state():
    pool = make_pool(4)
    first = pool.get_new_blocks(1)[0]
    assert first == pool.blocks[1]
    assert first != pool.blocks[2]
    assert first != make_pool(4).blocks[1]
    assert first != 1
    assert len({first, pool.blocks[1]}) == 1
    pool.touch([first])
    assert first.ref_cnt == 2
    assert repr(first) == "KVCacheBlock(block_id=1, ref_cnt=2)"
    with pytest.raises(ValueError, match="through the pool"):
        first.reset_hash()


def test_a_million_cycles_leave_the_pool_as_it_was():
    """No chain of old blocks, no growing index: 10**6 blocks through a pool, then destruction."""
    pool = make_pool(101)
    hashes = hashes_of(50 * BLOCK_SIZE)
    for _ in range(10_000):
        ids = pool.get_new_block_ids(100)
        cache(pool, ids, 50, hashes)
        pool.free_blocks(ids[::-1])
    pool.check_integrity()
    assert len(pool.dump()[2]) == 50
    assert pool.reset_prefix_cache()
    assert pool.get_num_free_blocks() == 100
