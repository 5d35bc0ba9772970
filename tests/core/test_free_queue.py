# SPDX-License-Identifier: Apache-2.0
"""FreeKVCacheBlockQueue and BlockHashToBlockMap as Python sees them."""

from __future__ import annotations

import gc

import pytest

from paged_kv import (
    BlockHashToBlockMap,
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheBlocks,
    make_block_hash_with_group_id,
)


def make_queue(num_blocks: int = 5):
    blocks = [KVCacheBlock(i) for i in range(num_blocks)]
    return FreeKVCacheBlockQueue(blocks), blocks


def order(queue: FreeKVCacheBlockQueue) -> list[int]:
    queue.check_integrity()
    return [block.block_id for block in queue.get_all_free_blocks()]


def key_of(value: int, group_id: int = 0) -> bytes:
    return make_block_hash_with_group_id(bytes([value]) * 32, group_id)


def test_queue_pops_removes_and_appends():
    queue, blocks = make_queue()
    assert queue.popleft() == blocks[0]
    queue.remove(blocks[2])
    assert order(queue) == [1, 3, 4]
    assert queue.popleft_n(2) == [blocks[1], blocks[3]]
    queue.append(blocks[2])
    queue.append_n([blocks[3], blocks[0]])
    queue.prepend_n([blocks[1]])
    assert order(queue) == [1, 4, 2, 3, 0]
    assert queue.num_free_blocks == 5
    assert queue.popleft_n(0) == []


def test_queue_keeps_the_given_order_and_ids():
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in (30, 10, 20)])
    assert order(queue) == [30, 10, 20]


def test_blocks_show_their_neighbours():
    queue, blocks = make_queue(3)
    assert blocks[1].prev_free_block == blocks[0]
    assert blocks[1].next_free_block == blocks[2]
    assert blocks[0].prev_free_block is None
    queue.remove(blocks[1])
    assert blocks[1].prev_free_block is None
    assert blocks[1].next_free_block is None
    assert blocks[0].next_free_block == blocks[2]


def test_failed_calls_raise_value_error_and_change_nothing():
    queue, blocks = make_queue(3)
    first = queue.popleft()
    for call in (
        lambda: queue.popleft_n(3),
        lambda: queue.popleft_n(-1),
        lambda: queue.append(blocks[1]),
        lambda: queue.append_n([first, first]),
        lambda: queue.prepend_n([first, blocks[2]]),
        lambda: queue.remove(first),
        lambda: queue.append(KVCacheBlock(9)),
        lambda: FreeKVCacheBlockQueue([KVCacheBlock(5), blocks[1]]),
    ):
        with pytest.raises(ValueError, match="block"):
            call()
        assert order(queue) == [1, 2]
    empty = FreeKVCacheBlockQueue([])
    with pytest.raises(ValueError, match="No free blocks available"):
        empty.popleft()
    with pytest.raises(TypeError):
        FreeKVCacheBlockQueue([None])


def test_a_refused_queue_leaves_its_blocks_free_for_another():
    block = KVCacheBlock(1)
    with pytest.raises(ValueError, match="given twice"):
        FreeKVCacheBlockQueue([block, block])
    assert order(FreeKVCacheBlockQueue([block])) == [1]


def test_blocks_outlive_their_queue():
    queue, blocks = make_queue(2)
    del queue
    gc.collect()
    assert [block.block_id for block in blocks] == [0, 1]


def test_block_hash_is_set_once_and_reset():
    block = KVCacheBlock(3)
    assert (block.ref_cnt, block.is_null) == (0, False)
    assert (block.block_hash, block.block_hash_num_tokens) == (None, None)
    block.set_block_hash(key_of(1, 2), 32)
    assert (block.block_hash, block.block_hash_num_tokens) == (key_of(1, 2), 32)
    with pytest.raises(ValueError, match="has a hash already"):
        block.set_block_hash(key_of(2), 16)
    block.reset_hash()
    assert block.block_hash is None
    with pytest.raises(ValueError, match="must not be negative"):
        KVCacheBlock(-1)


def test_map_gives_the_first_inserted_and_keeps_the_others():
    index = BlockHashToBlockMap()
    first, second = KVCacheBlock(7), KVCacheBlock(3)
    index.insert(key_of(1), first)
    index.insert(key_of(1), second)
    assert len(index) == 1
    assert index.get_one_block(key_of(1)) == first
    assert index.contain(key_of(1), 3)
    assert not index.contain(key_of(1), 4)
    assert index.pop(key_of(1), 4) is None
    assert index.pop(key_of(2), 7) is None
    assert index.pop(key_of(1), 7) == first
    assert index.get_one_block(key_of(1)) == second
    assert index.pop(key_of(1), 3) == second
    assert index.get_one_block(key_of(1)) is None
    assert len(index) == 0


def test_map_takes_a_block_under_several_keys():
    index = BlockHashToBlockMap()
    block = KVCacheBlock(7)
    index.insert(key_of(1), block)
    index.insert(key_of(1), block)
    index.insert(key_of(2), block)
    assert index.pop(key_of(1), 7) == block
    assert index.get_one_block(key_of(2)) == block
    with pytest.raises(ValueError, match="another block with id 7"):
        index.insert(key_of(3), KVCacheBlock(7))
    with pytest.raises(ValueError, match="36 or 20 bytes"):
        index.insert(b"short", block)


def test_kv_cache_blocks_of_a_pool():
    pool = BlockPool(10, True, 4)
    blocks = pool.get_new_blocks(3)
    both = KVCacheBlocks((blocks[:1],)) + KVCacheBlocks((blocks[1:],))
    assert both.get_block_ids() == ([1, 2, 3],)
    assert both.blocks == (blocks,)
    pool.cache_full_blocks(type("Request", (), {"block_hashes": [bytes(32)]}), blocks, 0, 1, 4, 0)
    assert both.get_unhashed_block_ids() == [2, 3]
    empty = both.new_empty()
    assert empty.get_block_ids() == ([],)
    assert empty.get_block_ids(allow_none=True) is None
    assert both.get_block_ids(allow_none=True) == ([1, 2, 3],)
    assert (empty + both).get_block_ids() == ([1, 2, 3],)
    assert repr(both) == "KVCacheBlocks(([1, 2, 3],))"


def test_kv_cache_blocks_of_several_groups_and_of_single_blocks():
    groups = KVCacheBlocks(([KVCacheBlock(4)], [KVCacheBlock(9), KVCacheBlock(2)]))
    assert groups.get_block_ids() == ([4], [9, 2])
    assert groups.new_empty().get_block_ids() == ([], [])
    with pytest.raises(ValueError, match="expected one group, got 2"):
        groups.get_unhashed_block_ids()
    with pytest.raises(ValueError, match="groups"):
        groups + KVCacheBlocks(([],))
    one, other = BlockPool(4, True, 4), BlockPool(4, True, 4)
    with pytest.raises(ValueError, match="several pools"):
        KVCacheBlocks((one.get_new_blocks(1) + other.get_new_blocks(1),))
    with pytest.raises(ValueError, match="several pools"):
        KVCacheBlocks((one.get_new_blocks(1),)) + KVCacheBlocks((other.get_new_blocks(1),))
