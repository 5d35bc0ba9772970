# SPDX-License-Identifier: Apache-2.0
"""Every public method of Request and KVCacheManager: bad input raises, and nothing changes."""

from __future__ import annotations

import numpy as np
import pytest

from paged_kv import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    get_request_block_hasher,
)

BAD_REQUESTS = [(None, TypeError), ("r", TypeError), (1, TypeError)]
BAD_COUNTS = [(-1, ValueError), (2**41, ValueError), (2**70, TypeError), (1.5, TypeError)]
BAD_IDS = [(None, TypeError), (1, TypeError)]
NO_ARGUMENTS = []


class Setting:
    """A manager with one request that runs, and another manager's hit."""

    def __init__(self):
        self.manager, self.request = make_manager_and_request()
        other_manager, other = make_manager_and_request()
        self.foreign_hit, _, _ = other_manager.get_computed_blocks(other)

    def state(self):
        blocks = self.manager.get_block_ids("r")
        tokens = self.request.all_token_ids.tolist()
        return self.manager.block_pool.dump(), blocks, tokens, list(self.request.block_hashes)


def make_manager_and_request():
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    config = KVCacheConfig(9, [], [KVCacheGroupSpec(["layer.0"], spec)])
    manager = KVCacheManager(config, 64, 4, 4, log_stats=True)
    request = Request("r", np.arange(10), block_hasher=get_request_block_hasher(4))
    manager.allocate_slots(request, 10)
    return manager, request


def requests_first(*rest):
    return [((bad, *rest), error) for bad, error in BAD_REQUESTS]


# Each method, with the arguments that it must refuse; R is the request, H another pool's blocks.
R, H = object(), object()
MANAGER_CALLS = {
    "get_computed_blocks": requests_first(),
    "why_no_hit": requests_first(),
    "allocate_slots": requests_first(1)
    + [((R, bad), error) for bad, error in BAD_COUNTS]
    + [((R, 1, bad), error) for bad, error in BAD_COUNTS]
    + [((R, 1, 4, H), ValueError), ((R, 1, 0, [1]), TypeError)]
    + [((R, 1, 0, None, bad), error) for bad, error in BAD_COUNTS]
    + [((R, 1, 0, None, 0, bad), error) for bad, error in BAD_COUNTS],
    "fork": requests_first(R)
    + [((R, bad), error) for bad, error in BAD_REQUESTS]
    + [((R, R), ValueError)],
    "cache_blocks": requests_first(4) + [((R, bad), error) for bad, error in BAD_COUNTS],
    "free": requests_first(),
    "pop_blocks_for_free": requests_first(),
    "remove_skipped_blocks": [((bad, 0), error) for bad, error in BAD_IDS]
    + [(("r", bad), error) for bad, error in BAD_COUNTS],
    "evict_blocks": [
        (([1, 9],), ValueError),
        (([1, -1],), ValueError),
        (([1, 1.5],), TypeError),
        ((np.array([1.0]),), TypeError),
        ((None,), TypeError),
    ],
    "reset_prefix_cache": NO_ARGUMENTS,
    "get_blocks": [((bad,), error) for bad, error in BAD_IDS],
    "get_block_ids": [((bad,), error) for bad, error in BAD_IDS],
    "get_block_ids_for_computed_tokens": [((bad, 0), error) for bad, error in BAD_IDS]
    + [(("r", bad), error) for bad, error in BAD_COUNTS],
    "estimate_cached_tokens": requests_first(),
    "truncate_computed_blocks": [((None, 4), TypeError), ((H, 4), ValueError)],
    "prefix_cache_lookup_enabled": requests_first(),
    "record_prefix_cache_stats": [
        *requests_first(0),
        ((R, 1.5), TypeError),
        ((R, 2**70), TypeError),
    ],
    "make_prefix_cache_stats": NO_ARGUMENTS,
    "take_events": NO_ARGUMENTS,
    "check_integrity": NO_ARGUMENTS,
}
REQUEST_CALLS = {
    "append_output_token_ids": [
        ((2**31,), (ValueError, TypeError)),
        (([1, 2**31],), ValueError),
        (([1, "x"],), TypeError),
        ((None,), TypeError),
        ((np.array([1.5]),), TypeError),
    ],
    "set_block_hasher": [
        ((0, bytes(32)), ValueError),
        ((-4, bytes(32)), ValueError),
        ((4, bytes(31)), (ValueError, TypeError)),
        ((4, "x" * 32), TypeError),
        ((None,), TypeError),
        ((lambda _: 3,), TypeError),
        ((lambda _: [b"short"],), (ValueError, TypeError)),
    ],
    "is_finished": NO_ARGUMENTS,
}


def cases(calls):
    return [(name, *case) for name, list_of_cases in calls.items() for case in list_of_cases]


@pytest.mark.parametrize(("name", "arguments", "error"), cases(MANAGER_CALLS))
def test_a_bad_call_of_a_manager_changes_nothing(name, arguments, error):
    setting = Setting()
    named = {id(R): setting.request, id(H): setting.foreign_hit}
    before = setting.state()
    with pytest.raises(error):
        getattr(setting.manager, name)(*(named.get(id(value), value) for value in arguments))
    assert setting.state() == before
    setting.manager.check_integrity()
    assert setting.manager.make_prefix_cache_stats().requests == 0


@pytest.mark.parametrize(("name", "arguments", "error"), cases(REQUEST_CALLS))
def test_a_bad_call_of_a_request_changes_nothing(name, arguments, error):
    setting = Setting()
    before = setting.state()
    with pytest.raises(error):
        getattr(setting.request, name)(*arguments)
    assert setting.state() == before
    setting.request.append_output_token_ids([10, 11])
    assert setting.request.num_block_hashes == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", 3),
        ("num_computed_tokens", "x"),
        ("num_in_flight_tokens", None),
        ("spec_token_ids", ["x"]),
        ("spec_token_ids", [2**31]),
    ],
)
def test_a_field_of_another_type_is_refused(name, value):
    request = make_manager_and_request()[1]
    before = getattr(request, name)
    with pytest.raises(TypeError):
        setattr(request, name, value)
    assert getattr(request, name) == before


@pytest.mark.parametrize("field", ["num_computed_tokens", "num_in_flight_tokens"])
@pytest.mark.parametrize("value", [-1, 2**41])
def test_a_count_out_of_range_is_refused_where_it_is_used(field, value):
    setting = Setting()
    setattr(setting.request, field, value)
    before = setting.state()
    with pytest.raises(ValueError, match=field):
        setting.manager.allocate_slots(setting.request, 1)
    assert setting.state() == before


@pytest.mark.parametrize(
    ("owner", "calls"), [(KVCacheManager, MANAGER_CALLS), (Request, REQUEST_CALLS)]
)
def test_every_public_method_is_tried(owner, calls):
    public = {
        name for name in dir(owner) if not name.startswith("_") and callable(getattr(owner, name))
    }
    assert public == set(calls)
