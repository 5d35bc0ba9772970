# SPDX-License-Identifier: Apache-2.0
"""Block hashes that can be made to collide: equal to vLLM's, and no hit without equal tokens.

`xxh3_collisions` gives two salts whose requests have the same hashes from the first block to the
last, so every place that takes a hash for the content is met with a real collision.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
from xxh3_collisions import TOKENS, colliding_salts

from paged_kv import (
    BlockHashList,
    BlockPool,
    BlockTable,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    NoHitReason,
    Request,
    RequestBatch,
    SlidingWindowSpec,
    get_hash_fn_by_name,
    get_request_block_hasher,
    hash_block_tokens,
    hashing,
    init_none_hash,
    sha256_cbor,
    xxhash_cbor,
)
from paged_kv._core import num_prefix_contents

BLOCK = len(TOKENS)
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(sliding_window=BLOCK + 1, **SHAPE)
CHUNKS = ChunkedLocalAttentionSpec(attention_chunk_size=4 * BLOCK, **SHAPE)
ONE, OTHER = colliding_salts()
GROUPS = {
    "full": [FULL],
    "window": [WINDOW],
    "chunked": [CHUNKS],
    "hybrid": [FULL, WINDOW],
    "three groups": [FULL, WINDOW, CHUNKS],
}


@pytest.fixture(autouse=True)
def none_hash(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    init_none_hash(xxhash_cbor)
    yield
    monkeypatch.undo()
    init_none_hash()


@pytest.fixture(autouse=True)
def _no_content_is_left_behind(none_hash):
    gc.collect()
    before = num_prefix_contents()
    yield
    gc.collect()
    assert num_prefix_contents() == before


def make_manager(specs, num_blocks=64, **options):
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks, [], groups)
    return KVCacheManager(config, 64, BLOCK, BLOCK, **options)


def make_request(name, salt, num_blocks=3):
    tokens = [token + i for i in range(num_blocks) for token in TOKENS] + [9]
    hasher = get_request_block_hasher(BLOCK, xxhash_cbor)
    return Request(name, tokens, cache_salt=salt, block_hasher=hasher)


def run(manager, request):
    """Compute all tokens of a request. Returns the blocks that it took over, and all it has."""
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, blocks)
    request.num_computed_tokens = request.num_tokens
    manager.check_integrity()
    return blocks.get_block_ids(), manager.get_block_ids(request.request_id)


def held(block_ids):
    return {block_id for group in block_ids for block_id in group} - {0}


def test_hashes_are_those_of_vllm():
    """Recorded with vLLM 0.32 and xxhash 4.1, PYTHONHASHSEED=0."""
    assert hashing.NONE_HASH.hex() == "1ebe36576dcb573f26b99533a20aaeca"
    assert xxhash_cbor("text").hex() == "df41b6e6534f40bb6b8052afb0768545"
    chain = [
        ([1, 2, 3, 4], None, "0a8577df5ee3430515a8cc1f6e3ac52e"),
        ([5, 6, 7, 300], None, "07c6efaa8d26f7ca3b42370a081c9460"),
        (
            [70000, 2**31 - 1, 23, 24],
            (("lora", "L", "/p"), ("mm", "abc", -2)),
            "6b4fb6564fce7e5f567bb32672a446f7",
        ),
        (list(range(200)), (("prompt_embeds", bytes(32)),), "2558187d241ca686d5bf1fdd81bc2614"),
    ]
    parent = None
    for tokens, extra_keys, expected in chain:
        parent = hash_block_tokens(xxhash_cbor, parent, tokens, extra_keys)
        assert parent.hex() == expected
    first_block = hash_block_tokens(
        xxhash_cbor, None, [1, 2, 3, 4], (("lora", "L", "/p"), ("cache_salt", "s"))
    )
    assert first_block.hex() == "d8aed372f0d49e614494f19ccfac92b7"


def test_a_request_hashes_natively_what_the_function_gives():
    request = make_request("a", "salt")
    request.append_output_token_ids([7] * 3)
    expected, parent = [], None
    for start in range(0, 16, BLOCK):
        tokens = request.all_token_ids[start : start + BLOCK]
        keys = (("cache_salt", "salt"),) if start == 0 else None
        parent = hash_block_tokens(xxhash_cbor, parent, tokens, keys)
        expected.append(parent)
    assert list(request.block_hashes) == expected
    assert {len(block_hash) for block_hash in expected} == {16}


def test_functions_have_vllms_names():
    assert get_hash_fn_by_name("sha256_cbor") is sha256_cbor
    assert get_hash_fn_by_name("xxhash_cbor") is xxhash_cbor
    with pytest.raises(ValueError, match="sha256_cbor, xxhash_cbor, got 'sha256'"):
        get_hash_fn_by_name("sha256")


def test_the_seed_is_random_unless_it_is_given(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED")
    seen = set()
    for _ in range(3):
        init_none_hash(xxhash_cbor)
        seen.add(hashing.NONE_HASH)
    assert len(seen) == 3
    init_none_hash(sha256_cbor)
    assert sha256_cbor("vllm-none-hash") == hashing.NONE_HASH


def test_the_collision_is_one():
    one, other = make_request("a", ONE), make_request("b", OTHER)
    assert list(one.block_hashes) == list(other.block_hashes)
    assert one.block_hashes != other.block_hashes, "BlockHashList knows the contents"
    assert make_request("c", ONE).block_hashes == one.block_hashes


@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
def test_a_collision_is_a_miss_and_equal_tokens_are_a_hit(specs):
    manager = make_manager(specs)
    run(manager, make_request("a", ONE))
    blocks, num_tokens, _ = manager.get_computed_blocks(make_request("b", OTHER))
    assert held(blocks.get_block_ids()) == set()
    _, num_hits, _ = manager.get_computed_blocks(make_request("c", ONE))
    assert num_hits == 3 * BLOCK
    # A chunk that is not needed counts as a hit without a lookup; this one is needed.
    assert num_tokens == 0


@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
def test_requests_that_collide_are_cached_side_by_side(specs):
    manager = make_manager(specs)
    _, of_one = run(manager, make_request("a", ONE))
    _, of_other = run(manager, make_request("b", OTHER))
    assert not held(of_one) & held(of_other)
    for salt, ids in ((ONE, of_one), (OTHER, of_other)):
        hits, num_tokens, _ = manager.get_computed_blocks(make_request("again", salt))
        assert num_tokens == 3 * BLOCK
        assert held(hits.get_block_ids()) <= held(ids)


def test_each_of_two_that_collide_is_evicted_alone():
    manager = make_manager([FULL])
    one, other = make_request("a", ONE), make_request("b", OTHER)
    _, of_one = run(manager, one)
    _, of_other = run(manager, other)
    manager.evict_blocks(held(of_one))
    manager.check_integrity()
    assert manager.get_computed_blocks(make_request("again", ONE))[1] == 0
    assert manager.get_computed_blocks(make_request("again", OTHER))[1] == 3 * BLOCK
    manager.free(one)
    manager.free(other)
    hits, again = run(manager, make_request("c", OTHER))
    assert hits[0] == of_other[0][:3]
    assert set(hits[0]) <= set(again[0])
    assert not manager.reset_prefix_cache()
    manager.free(make_request("c", OTHER))
    assert manager.reset_prefix_cache()
    manager.check_integrity()
    assert manager.get_computed_blocks(make_request("again", OTHER))[1] == 0


def test_reused_blocks_do_not_come_back_under_a_hash_that_collides():
    """All blocks of one are taken for others, the last by a request of the same hashes."""
    manager = make_manager([FULL], num_blocks=5)
    one, other = make_request("a", ONE), make_request("b", OTHER)
    run(manager, one)
    manager.free(one)
    hits, _ = run(manager, other)
    assert hits == ([],)
    manager.free(other)
    assert manager.get_computed_blocks(make_request("again", ONE))[1] == 0
    assert manager.get_computed_blocks(make_request("again", OTHER))[1] == 3 * BLOCK


def test_a_content_outlives_its_requests_as_long_as_it_is_cached():
    manager = make_manager([FULL])
    request = make_request("a", ONE)
    run(manager, request)
    manager.free(request)
    del request
    gc.collect()
    assert manager.get_computed_blocks(make_request("b", ONE))[1] == 3 * BLOCK
    assert manager.get_computed_blocks(make_request("b", OTHER))[1] == 0


def test_a_window_alone_keeps_the_whole_prefix_apart():
    """Its first blocks are evicted; what is left must not serve another prefix of equal hashes."""
    manager = make_manager([WINDOW])
    request = make_request("a", ONE)
    _, ids = run(manager, request)
    manager.evict_blocks([ids[0][0]])
    assert manager.get_computed_blocks(make_request("b", OTHER))[1] == 0
    assert manager.get_computed_blocks(make_request("b", ONE))[1] == 3 * BLOCK


def test_events_show_the_digests():
    manager = make_manager([FULL], enable_kv_cache_events=True, use_int_block_hashes=False)
    one, other = make_request("a", ONE), make_request("b", OTHER)
    _, of_one = run(manager, one)
    run(manager, other)
    stored = manager.take_events()
    assert [event.block_hashes for event in stored] == [list(one.block_hashes)] * 2
    assert [event.extra_keys[0] for event in stored] == [(ONE,), (OTHER,)]
    manager.evict_blocks(of_one[0])
    removed = [block_hash for event in manager.take_events() for block_hash in event.block_hashes]
    assert removed == list(one.block_hashes)

    manager = make_manager([FULL], enable_kv_cache_events=True)
    run(manager, one)
    (event,) = manager.take_events()
    assert event.block_hashes[0] == int.from_bytes(one.block_hashes[0][-8:], "big")


def test_a_step_of_a_batch_caches_and_finds_by_content():
    manager = make_manager([FULL])
    table = BlockTable(BLOCK, max_num_reqs=2, max_num_blocks_per_req=16, max_num_batched_tokens=64)
    batch = RequestBatch(manager, [table])
    requests = [make_request("a", ONE), make_request("b", OTHER)]
    for row, request in enumerate(requests):
        batch.add(request, row)
    rows = np.arange(2, dtype=np.int32)
    assert len(batch.allocate_slots(rows, np.array([13, 13], np.int32))) == 0
    batch.append_output_token_ids(rows, np.repeat(np.int32(7), 6), np.array([3, 3], np.int32))
    assert len(batch.allocate_slots(rows, 3)) == 0
    assert list(requests[0].block_hashes) == list(requests[1].block_hashes)
    for salt, row in ((ONE, 0), (OTHER, 1)):
        again = make_request("again", salt)
        again.append_output_token_ids([7] * 4)
        hits, num_tokens, _ = manager.get_computed_blocks(again)
        assert num_tokens == 4 * BLOCK
        assert hits.get_block_ids()[0] == table.get_numpy_array()[row, :4].tolist()


def test_a_pool_caches_and_finds_by_content():
    pool = BlockPool(16, True, BLOCK)
    one, other = make_request("a", ONE), make_request("b", OTHER)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(one, blocks, 0, 3, BLOCK, 0)
    assert pool.find_cached_prefix(one.block_hashes, 3).tolist() == [1, 2, 3]
    assert pool.find_cached_prefix(other.block_hashes, 3).tolist() == []
    others = pool.get_new_blocks(3)
    pool.cache_full_blocks(other, others, 0, 3, BLOCK, 0)
    assert pool.find_cached_prefix(one.block_hashes, 3).tolist() == [1, 2, 3]
    assert pool.find_cached_prefix(other.block_hashes, 3).tolist() == [4, 5, 6]
    assert sorted(pool.dump()[2].values()) == [[1, 4], [2, 5], [3, 6]]
    with pytest.raises(ValueError, match="as another content"):
        pool.cache_full_blocks(other, blocks, 0, 3, BLOCK, 0)
    pool.check_integrity()
    pool.free_blocks(others[::-1])
    pool.get_new_blocks(12)
    assert pool.find_cached_prefix(one.block_hashes, 3).tolist() == [1, 2, 3]
    assert pool.find_cached_prefix(other.block_hashes, 3).tolist() == []
    pool.check_integrity()


def test_a_hash_without_its_tokens_is_refused():
    """Bytes alone, or hashes of a request that is gone: nothing could be compared."""
    pool = BlockPool(16, True, BLOCK)
    blocks = pool.get_new_blocks(3)
    request = make_request("a", ONE)
    for hashes in (list(request.block_hashes), BlockHashList(list(request.block_hashes))):
        with pytest.raises(ValueError, match="living Request"):
            pool.cache_full_blocks(type("R", (), {"block_hashes": hashes}), blocks, 0, 3, BLOCK, 0)
        assert pool.find_cached_prefix(hashes, 3).tolist() == []
    with pytest.raises(ValueError, match="16 bytes do not tell"):
        pool.get_cached_block(request.block_hashes[0], [0])
    kept = request.block_hashes
    del request
    gc.collect()
    with pytest.raises(ValueError, match="living Request"):
        pool.cache_full_blocks(kept, blocks, 0, 3, BLOCK, 0)
    assert pool.dump()[2] == {}


def test_a_request_refuses_hashes_without_tokens_and_a_change_of_hasher():
    hasher = get_request_block_hasher(BLOCK, xxhash_cbor)
    with pytest.raises(ValueError, match="not safe without the tokens"):
        Request("a", TOKENS, block_hasher=lambda request: hasher(request))
    request = make_request("a", ONE)
    with pytest.raises(ValueError, match="only its present hasher can continue"):
        request.set_block_hasher(BLOCK, hashing.NONE_HASH)
    by_sha256 = Request("b", TOKENS, block_hasher=get_request_block_hasher(BLOCK))
    before = list(by_sha256.block_hashes)
    with pytest.raises(ValueError, match="made by another hasher"):
        by_sha256.set_block_hasher(BLOCK, hashing.NONE_HASH, "xxhash_cbor")
    with pytest.raises(ValueError, match="algorithm must be"):
        by_sha256.set_block_hasher(BLOCK, hashing.NONE_HASH, "md5")
    by_sha256.append_output_token_ids(TOKENS)
    assert list(by_sha256.block_hashes)[:1] == before
    assert len(by_sha256.block_hashes[1]) == 32


def test_why_no_hit_does_not_take_a_collision_for_a_hit():
    manager = make_manager([FULL], num_remembered_evictions=8)
    request = make_request("a", ONE)
    _, ids = run(manager, request)
    report = manager.why_no_hit(make_request("b", OTHER))
    assert (report.num_hit_tokens, report.reason) == (0, NoHitReason.NOT_CACHED)
    plain = make_request("c", None)
    run(manager, plain)
    report = manager.why_no_hit(make_request("b", OTHER))
    assert report.reason == NoHitReason.ONLY_WITHOUT_SALT
    manager.evict_blocks(ids[0])
    assert manager.why_no_hit(request).reason == NoHitReason.EVICTED


def test_equal_tokens_hit_whatever_way_they_came():
    """Prompt and output tokens of one request are the prompt of another."""
    manager = make_manager([FULL])
    first = Request(
        "a",
        TOKENS[:1],
        block_hasher=get_request_block_hasher(BLOCK, get_hash_fn_by_name("xxhash_cbor")),
    )
    assert manager.allocate_slots(first, 1)
    first.num_computed_tokens = 1
    for token in [*TOKENS[1:], *TOKENS, 7]:
        first.append_output_token_ids(token)
        assert manager.allocate_slots(first, 1)
        first.num_computed_tokens += 1
    whole = Request(
        "b",
        np.array([*TOKENS, *TOKENS, 8]),
        block_hasher=get_request_block_hasher(BLOCK, xxhash_cbor),
    )
    assert manager.get_computed_blocks(whole)[1] == 2 * BLOCK
