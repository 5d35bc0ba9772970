# SPDX-License-Identifier: Apache-2.0
"""The argument eviction_policy: where freed blocks go in the free queue."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from paged_kv import (
    BlockHashList,
    BlockPool,
    FreePlace,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    get_request_block_hasher,
)

HASHES = BlockHashList([bytes([i]) * 32 for i in range(1, 9)])


def keep_what_was_found(block):
    return FreePlace.BACK if block.num_hits else FreePlace.FRONT


def make_pool(policy=None):
    """Blocks 1 .. 3 of five are held; 1 and 2 are cached, and 2 was found once."""
    pool = BlockPool(6, True, 4, policy)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(HASHES, blocks, 0, 2, 4, 0)
    pool.touch([2])
    pool.free_blocks([2])
    return pool


def free_order(pool):
    return pool.dump()[0]


def test_the_default_is_lru():
    pool = make_pool()
    pool.free_blocks([3, 2, 1])
    assert free_order(pool) == [3, 4, 5, 2, 1]


def test_a_policy_decides_front_or_back():
    pool = make_pool(keep_what_was_found)
    pool.free_blocks([3, 2, 1])
    assert free_order(pool) == [3, 1, 4, 5, 2]
    pool.check_integrity()


def test_a_policy_sees_a_copy_of_each_block_that_becomes_free():
    seen = []

    def policy(block):
        seen.append(block)
        return FreePlace.BACK

    pool = make_pool(policy)
    pool.touch([1])
    pool.free_blocks([3, 1, 0])
    assert [(b.block_id, b.ref_cnt, b.num_hits) for b in seen] == [(3, 0, 0)]
    assert seen[0].block_hash is None
    pool.free_blocks([2])
    assert seen[1].num_hits == 1
    assert seen[1].block_hash[:32] == HASHES[1]
    pool.get_new_blocks(4)
    assert seen[1].ref_cnt == 0
    assert (pool.blocks[2].ref_cnt, pool.blocks[2].num_hits) == (1, 0)


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (lambda block: block.no_such_field, AttributeError),
        (lambda block: "front", TypeError),
        (lambda: FreePlace.FRONT, TypeError),
    ],
)
def test_a_policy_that_fails_is_reported_and_lru_takes_over(monkeypatch, policy, error):
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reports.append(report.exc_type))
    pool = make_pool(policy)
    pool.free_blocks([3, 2, 1])
    assert free_order(pool) == [3, 4, 5, 2, 1]
    assert reports == [error] * 3
    pool.check_integrity()


@pytest.mark.parametrize("policy", ["lru", 1, FreePlace.BACK])
def test_what_cannot_be_called_is_no_policy(policy):
    with pytest.raises(TypeError):
        BlockPool(6, True, 4, policy)


def test_a_manager_keeps_a_prompt_that_was_found_once():
    """A document as large as the pool pushes it out under LRU only."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")
    config = KVCacheConfig(9, [], [KVCacheGroupSpec(["layer.0"], spec)])

    def hits_after_a_document(policy):
        manager = KVCacheManager(config, 1024, 16, 16, eviction_policy=policy)
        hits = 0
        for start in (0, 0, 1000, 2000, 0):
            tokens = np.arange(start, start + (33 if start == 0 else 96))
            request = Request("r", tokens, block_hasher=get_request_block_hasher(16))
            blocks, hits, _ = manager.get_computed_blocks(request)
            assert manager.allocate_slots(request, len(tokens) - hits, hits, blocks)
            manager.free(request)
        manager.check_integrity()
        return hits

    assert hits_after_a_document(None) == 0
    assert hits_after_a_document(keep_what_was_found) == 32
