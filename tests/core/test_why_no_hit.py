# SPDX-License-Identifier: Apache-2.0
"""KVCacheManager.why_no_hit: each reason, on the smallest case that has it."""

from __future__ import annotations

import numpy as np
import pytest

from paged_kv import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    LoRARequest,
    MultiModalFeatureSpec,
    NoHitReason,
    PlaceholderRange,
    Request,
    SlidingWindowSpec,
    get_request_block_hasher,
)

BLOCK = 16
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
HASHER = get_request_block_hasher(BLOCK)
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=32)
CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
PICTURE = MultiModalFeatureSpec(None, "image", "picture", PlaceholderRange(3, 5))


def make_manager(*specs, num_blocks=64, **options):
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs or [FULL])]
    config = KVCacheConfig(num_blocks, [], groups)
    return KVCacheManager(config, 1024, BLOCK, BLOCK, **options)


def make_request(num_tokens, name="r", *, block_hasher=HASHER, **arguments):
    return Request(name, np.arange(num_tokens), block_hasher=block_hasher, **arguments)


def compute(manager, request, *, keep=False):
    """Compute all tokens of a request; returns its blocks in each group."""
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, blocks)
    ids = manager.get_block_ids(request.request_id)
    if not keep:
        manager.free(request)
    return ids


def place(report):
    return report.kv_cache_group_id, report.block_index, report.token_range


def test_caching_is_off():
    report = make_manager(enable_caching=False).why_no_hit(make_request(40))
    assert report.reason == NoHitReason.CACHING_DISABLED
    assert place(report) == (None, None, (0, 40))
    assert (report.num_hit_blocks, report.num_group_hit_tokens) == ([0], [0])


def test_the_request_does_not_read_the_cache():
    manager = make_manager()
    compute(manager, make_request(40))
    params = type("Params", (), {"skip_reading_prefix_cache": True})()
    report = manager.why_no_hit(make_request(40, sampling_params=params))
    assert report.reason == NoHitReason.REQUEST_SKIPS_CACHE
    assert report.num_hit_tokens == 0


def test_the_request_has_no_hashes():
    manager = make_manager()
    compute(manager, make_request(40))
    report = manager.why_no_hit(make_request(40, block_hasher=None))
    assert report.reason == NoHitReason.NO_BLOCK_HASHES


@pytest.mark.parametrize("num_tokens", [1, 15])
def test_a_prompt_shorter_than_a_block(num_tokens):
    report = make_manager().why_no_hit(make_request(num_tokens))
    assert report.reason == NoHitReason.NO_WHOLE_BLOCK_LEFT
    assert place(report) == (None, None, (0, num_tokens))


def test_all_whole_blocks_were_found():
    manager = make_manager()
    compute(manager, make_request(40))
    report = manager.why_no_hit(make_request(40))
    assert report.reason == NoHitReason.NO_WHOLE_BLOCK_LEFT
    assert (report.num_hit_tokens, report.num_hit_blocks) == (32, [2])
    assert place(report) == (None, None, (32, 40))


def test_the_last_token_must_be_computed():
    manager = make_manager()
    compute(manager, make_request(48))
    report = manager.why_no_hit(make_request(48))
    assert report.reason == NoHitReason.LAST_TOKEN
    assert (report.num_hit_tokens, report.token_range) == (32, (32, 48))


def test_eagle_drops_a_block():
    manager = make_manager(use_eagle=True)
    compute(manager, make_request(100))
    report = manager.why_no_hit(make_request(100))
    assert report.reason == NoHitReason.EAGLE_DROP
    assert place(report) == (0, 5, (80, 96))
    assert (report.num_hit_tokens, report.num_group_hit_tokens) == (80, [96])


def test_a_block_was_never_cached():
    manager = make_manager()
    report = manager.why_no_hit(make_request(40))
    assert report.reason == NoHitReason.NOT_CACHED
    assert place(report) == (0, 0, (0, 16))
    compute(manager, make_request(40))
    other = np.arange(70)
    other[20] = 999
    report = manager.why_no_hit(Request("other", other, block_hasher=HASHER))
    assert report.reason == NoHitReason.NOT_CACHED
    assert place(report) == (0, 1, (16, 32))


def test_an_eviction_is_known_if_it_is_remembered():
    for num_remembered, reason in [(0, NoHitReason.NOT_CACHED), (8, NoHitReason.EVICTED)]:
        manager = make_manager(num_remembered_evictions=num_remembered)
        (ids,) = compute(manager, make_request(70))
        manager.evict_blocks([ids[2]])
        report = manager.why_no_hit(make_request(70))
        assert report.reason == reason
        assert place(report) == (0, 2, (32, 48))
    assert manager.reset_prefix_cache()
    assert manager.why_no_hit(make_request(70)).reason == NoHitReason.NOT_CACHED


def test_only_the_last_evictions_are_remembered():
    manager = make_manager(num_remembered_evictions=1)
    (ids,) = compute(manager, make_request(70))
    manager.evict_blocks([ids[2]])
    assert manager.why_no_hit(make_request(70)).reason == NoHitReason.EVICTED
    manager.evict_blocks([ids[3]])
    assert manager.why_no_hit(make_request(70)).reason == NoHitReason.NOT_CACHED


def test_reuse_of_a_block_is_an_eviction():
    manager = make_manager(num_blocks=4, num_remembered_evictions=1)
    compute(manager, make_request(40))
    compute(manager, Request("other", np.arange(100, 140), block_hasher=HASHER))
    report = manager.why_no_hit(make_request(40))
    assert report.reason == NoHitReason.EVICTED


def test_a_window_has_lost_a_block_that_full_attention_has():
    """And others before the window, which no hit needs."""
    manager = make_manager(FULL, WINDOW)
    ids = compute(manager, make_request(160))
    manager.evict_blocks([ids[1][2], ids[1][8]])
    report = manager.why_no_hit(make_request(161))
    assert report.reason == NoHitReason.ONLY_IN_OTHER_GROUP
    assert place(report) == (1, 8, (128, 144))
    assert report.num_group_hit_tokens == [160, 128]
    assert report.num_hit_tokens == 128
    assert report.num_hit_blocks == [8, 2]


def test_an_eviction_is_that_of_the_group_that_lacks_the_block():
    for group, other in ((0, 1), (1, 0)):
        manager = make_manager(FULL, WINDOW, num_remembered_evictions=8)
        ids = compute(manager, make_request(160))
        manager.evict_blocks([ids[group][8]])
        report = manager.why_no_hit(make_request(161))
        assert report.reason == NoHitReason.EVICTED
        assert place(report) == (group, 8, (128, 144))
        assert report.num_group_hit_tokens[other] == 160


def test_full_attention_has_lost_a_block_that_a_window_has():
    manager = make_manager(FULL, WINDOW)
    ids = compute(manager, make_request(160))
    manager.evict_blocks([ids[0][4]])
    report = manager.why_no_hit(make_request(161))
    assert report.reason == NoHitReason.ONLY_IN_OTHER_GROUP
    assert place(report) == (0, 4, (64, 80))
    assert report.num_hit_tokens == 64


def test_a_window_alone():
    manager = make_manager(WINDOW)
    compute(manager, make_request(100))
    report = manager.why_no_hit(make_request(200))
    assert report.reason == NoHitReason.NOT_CACHED
    assert (report.num_hit_tokens, place(report)) == (96, (0, 6, (96, 112)))


def test_a_chunk_alone():
    manager = make_manager(CHUNKED)
    report = manager.why_no_hit(make_request(100))
    assert report.reason == NoHitReason.NOT_CACHED
    assert (report.num_hit_tokens, report.num_hit_blocks) == (64, [0])
    assert place(report) == (0, 4, (64, 80))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"lora_request": LoRARequest("l", 1, "/l")}, NoHitReason.ONLY_WITHOUT_ADAPTER),
        ({"cache_salt": "salt"}, NoHitReason.ONLY_WITHOUT_SALT),
        ({"mm_features": [PICTURE]}, NoHitReason.ONLY_WITHOUT_MEDIA),
        ({"cache_salt": "salt", "mm_features": [PICTURE]}, NoHitReason.ONLY_WITHOUT_EXTRA_KEYS),
    ],
)
def test_a_key_separates_the_request_from_what_is_cached(arguments, reason):
    manager = make_manager()
    compute(manager, make_request(40))
    report = manager.why_no_hit(make_request(40, **arguments))
    assert report.reason == reason
    assert place(report) == (0, 0, (0, 16))


def test_a_medium_further_on_separates_only_from_there_on():
    manager = make_manager()
    compute(manager, make_request(60))
    picture = MultiModalFeatureSpec(None, "image", "picture", PlaceholderRange(30, 5))
    report = manager.why_no_hit(make_request(60, mm_features=[picture]))
    assert report.reason == NoHitReason.ONLY_WITHOUT_MEDIA
    assert place(report) == (0, 1, (16, 32))


def test_keys_are_not_tried_with_another_hash_function():
    """What it would give without a key is not known: no guess."""
    manager = make_manager()

    def hasher(request):
        done, full = request.num_block_hashes, request.num_tokens // BLOCK
        salt = 100 if request.cache_salt else 0
        return [bytes([i + salt]) * 32 for i in range(done, full)]

    compute(manager, make_request(40, block_hasher=hasher))
    report = manager.why_no_hit(make_request(40, block_hasher=hasher, cache_salt="s"))
    assert report.reason == NoHitReason.NOT_CACHED


@pytest.mark.parametrize(
    ("specs", "use_eagle"),
    [
        ([FULL], False),
        ([FULL], True),
        ([WINDOW], False),
        ([WINDOW], True),
        ([CHUNKED], False),
        ([FULL, WINDOW], False),
        ([FULL, WINDOW], True),
        ([WINDOW, CHUNKED], False),
    ],
)
def test_it_agrees_with_the_lookup_and_changes_nothing(specs, use_eagle):
    """At every length, after random evictions; the block that it names is not cached."""
    rng = np.random.default_rng(0)
    manager = make_manager(*specs, use_eagle=use_eagle, log_stats=True, enable_kv_cache_events=True)
    for step in range(30):
        cached = make_request(int(rng.integers(1, 200)), f"cached-{step}")
        ids = compute(manager, cached)
        manager.evict_blocks(rng.choice(64, size=int(rng.integers(0, 6)), replace=False))
        manager.take_events()
        for num_tokens in rng.integers(1, 220, size=12):
            request = make_request(int(num_tokens))
            before = manager.block_pool.dump()
            report = manager.why_no_hit(request)
            assert manager.block_pool.dump() == before
            assert report.num_hit_tokens == manager.get_computed_blocks(request)[1]
            if report.block_index is None:
                continue
            index = before[2]
            block_hash = request.block_hashes[report.block_index].hex()
            key = block_hash + report.kv_cache_group_id.to_bytes(4, "big").hex()
            assert (key in index) == (report.reason == NoHitReason.EAGLE_DROP)
        assert len(ids) == len(specs)
    assert manager.take_events() == []
    assert manager.make_prefix_cache_stats().requests == 0


def test_a_report_can_be_read():
    manager = make_manager()
    compute(manager, make_request(40))
    report = manager.why_no_hit(make_request(70))
    assert str(report) == (
        "32 of 70 tokens are cached. Block 2 of group 0, tokens [32, 48): no block with this "
        "content and these keys is cached: it was never computed, or it has been evicted."
    )
    assert str(report) in repr(report)


def test_bad_arguments_are_refused():
    manager = make_manager()
    with pytest.raises(TypeError):
        manager.why_no_hit("r")
    for number in (-1, 2**31):
        with pytest.raises(ValueError, match="num_remembered_evictions"):
            make_manager(num_remembered_evictions=number)
