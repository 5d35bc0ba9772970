# SPDX-License-Identifier: Apache-2.0
"""KVCacheManager over random calls: hits hold the right tokens, nothing leaks, no half failures.

A model of the cache's content says which tokens each slot was computed from; forks copy slots.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_kv import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    RequestStatus,
    SlidingWindowSpec,
    get_request_block_hasher,
)

SHAPE = {"num_kv_heads": 1, "head_size": 4, "dtype": "float32"}
MAX_MODEL_LEN = 64


def full(block_size):
    return FullAttentionSpec(block_size=block_size, **SHAPE)


def window(block_size, size):
    return SlidingWindowSpec(block_size=block_size, sliding_window=size, **SHAPE)


def chunked(block_size, size):
    return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=size, **SHAPE)


# Groups, and whether hits may drop their last block.
MODELS = (
    ([full(4)], True),
    ([window(4, 9)], True),
    ([window(2, 1)], False),
    ([chunked(4, 8)], False),
    ([full(4), window(4, 6)], True),
    ([full(4), window(2, 5), window(2, 5)], True),
    ([window(4, 6), full(2)], True),
    ([full(4), chunked(4, 8), window(4, 9)], False),
)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        model=st.sampled_from(MODELS),
        num_blocks=st.integers(2, 30),
        enable_caching=st.sampled_from([True, True, True, False]),
        use_eagle=st.booleans(),
        retention=st.sampled_from([None, 0, 8]),
        watermark=st.sampled_from([0.0, 0.1]),
    )
    def make(self, model, num_blocks, enable_caching, use_eagle, retention, watermark):
        specs, allows_eagle = model
        has_window = any(isinstance(spec, SlidingWindowSpec) for spec in specs)
        groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
        self.block_sizes = [spec.block_size for spec in specs]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, [], groups, retention if has_window else None),
            MAX_MODEL_LEN,
            scheduler_block_size=max(self.block_sizes),
            hash_block_size=min(self.block_sizes),
            enable_caching=enable_caching,
            use_eagle=use_eagle and allows_eagle,
            enable_kv_cache_events=True,
            watermark=watermark,
        )
        self.num_blocks = num_blocks
        self.requests: list[Request] = []
        self.popped: list[list] = []
        self.num_made = 0
        # Per group: which prefix each slot (block, offset) was computed from.
        self.slots: list[dict[tuple[int, int], int]] = [{} for _ in specs]
        self.prefix_ids: dict[tuple, int] = {}  # (number of the prefix before, token) -> number
        # Per group: salt and tokens of a cached block, from the request's first token on.
        self.contents: list[dict[int, tuple]] = [{} for _ in specs]

    def state(self):
        tables = [self.manager.get_block_ids(request.request_id) for request in self.requests]
        return self.manager.block_pool.dump(), tables

    def note_contents(self, request: Request, start: int) -> None:
        """What the blocks of a request hold once its tokens from `start` on are computed."""
        tokens = request.all_token_ids.tolist()
        self.write_slots(request, start)
        tables = self.manager.get_block_ids(request.request_id)
        for group, (ids, block_size) in enumerate(zip(tables, self.block_sizes, strict=True)):
            for i, block in enumerate(ids):
                end = (i + 1) * block_size
                if block and end <= request.num_computed_tokens:
                    self.contents[group][block] = (request.cache_salt, tokens[:end])

    def write_slots(self, request: Request, start: int) -> None:
        for slots, slot, prefix, position in self.computed_slots(request):
            if position >= start:
                slots[slot] = prefix

    def computed_slots(self, request: Request):
        """Of each computed token that is held: its group's slots, slot, prefix and position."""
        prefixes = [request.cache_salt]
        for token in request.all_token_ids.tolist():
            key = (prefixes[-1], token)
            prefixes.append(self.prefix_ids.setdefault(key, len(self.prefix_ids)))
        tables = self.manager.get_block_ids(request.request_id)
        for slots, ids, block_size in zip(self.slots, tables, self.block_sizes, strict=True):
            for position in range(request.num_computed_tokens):
                block = ids[position // block_size]
                if block:
                    yield slots, (block, position % block_size), prefixes[position + 1], position

    @rule(
        family=st.integers(0, 2), num_tokens=st.integers(1, 40), salt=st.sampled_from([None, "s"])
    )
    def add_request(self, family, num_tokens, salt):
        """Requests of a family share prefixes."""
        self.num_made += 1
        tokens = [family * 1000 + i for i in range(num_tokens)]
        hasher = get_request_block_hasher(min(self.block_sizes))
        self.requests.append(
            Request(str(self.num_made), tokens, cache_salt=salt, block_hasher=hasher)
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), chunk=st.integers(1, 40), lookahead=st.integers(0, 5), fit=st.booleans())
    def schedule(self, data, chunk, lookahead, fit):
        request = data.draw(st.sampled_from(self.requests))
        is_new = request.num_computed_tokens == 0
        blocks, num_hits = None, 0
        if is_new:
            blocks, num_hits, boundary = self.manager.get_computed_blocks(request)
            request.shared_prefix_boundary = boundary
            self.check_hit(request, blocks, num_hits)
        num_new = min(chunk, request.num_tokens - request.num_computed_tokens - num_hits)
        if num_new <= 0:
            return
        free_before = self.manager.block_pool.get_num_free_blocks()
        taken = self.manager.allocate_slots(
            request, num_new, num_hits, blocks, lookahead, full_sequence_must_fit=fit
        )
        if taken is None:
            assert self.manager.block_pool.get_num_free_blocks() >= free_before
            return
        request.status = RequestStatus.RUNNING
        start = request.num_computed_tokens + num_hits
        request.num_computed_tokens = start + num_new
        self.note_contents(request, start)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data):
        """The child has the parent's tokens; some of its last ones may be missing or others."""
        parent = data.draw(st.sampled_from(self.requests))
        tokens = parent.all_token_ids.tolist()
        num_computed = parent.num_computed_tokens
        if num_computed == 0:
            return
        hasher = get_request_block_hasher(min(self.block_sizes))
        name = str(self.num_made + 1)
        child = Request(
            name,
            tokens[:num_computed] + data.draw(st.sampled_from([[], [7777], tokens[num_computed:]])),
            cache_salt=parent.cache_salt,
            block_hasher=hasher,
        )
        if child.num_tokens > MAX_MODEL_LEN:
            return
        before = self.state()
        num_free = self.manager.block_pool.get_num_free_blocks()
        copies = self.manager.fork(parent, child)
        num_copies = sum(
            num_computed % block_size != 0 and ids[num_computed // block_size] != 0
            for ids, block_size in zip(
                self.manager.get_block_ids(parent.request_id), self.block_sizes, strict=True
            )
        )
        if copies is None:
            assert num_copies > num_free
            assert self.state() == before
            return
        assert len(copies) == num_copies
        self.num_made += 1
        child.status = RequestStatus.RUNNING
        assert child.num_computed_tokens == num_computed
        self.requests.append(child)
        for group, source, target in copies:
            for offset in range(self.block_sizes[group]):
                if (source, offset) in self.slots[group]:
                    self.slots[group][target, offset] = self.slots[group][source, offset]
        self.check_shared(parent, child)

    def check_shared(self, parent: Request, child: Request) -> None:
        """All full blocks of the computed tokens, and no others."""
        tables = (self.manager.get_block_ids(r.request_id) for r in (parent, child))
        for of_parent, of_child, block_size in zip(*tables, self.block_sizes, strict=True):
            num_full, is_part = divmod(child.num_computed_tokens, block_size)
            assert len(of_child) == num_full + (is_part > 0)
            assert of_child[:num_full] == of_parent[:num_full]
            assert not set(of_child[num_full:]) & set(of_parent) - {0}

    def check_hit(self, request: Request, blocks, num_hits: int) -> None:
        assert 0 <= num_hits < request.num_tokens
        tokens = request.all_token_ids.tolist()
        for group, ids in enumerate(blocks.get_block_ids()):
            block_size = self.block_sizes[group]
            assert len(ids) * block_size == num_hits
            for i, block in enumerate(ids):
                if block:
                    content = (request.cache_salt, tokens[: (i + 1) * block_size])
                    assert self.contents[group][block] == content

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(1, 3))
    def decode(self, data, num_tokens):
        request = data.draw(st.sampled_from(self.requests))
        is_running = request.num_computed_tokens == request.num_tokens
        if is_running and request.num_tokens + num_tokens <= MAX_MODEL_LEN:
            request.append_output_token_ids(list(range(num_tokens)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_external=st.integers(1, 20))
    def load_from_outside(self, data, num_external):
        request = data.draw(st.sampled_from(self.requests))
        if request.num_computed_tokens or request.num_tokens <= num_external:
            return
        taken = self.manager.allocate_slots(
            request, 0, num_external_computed_tokens=num_external, delay_cache_blocks=True
        )
        if taken is not None:
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_external
            self.note_contents(request, 0)
            self.manager.cache_blocks(request, num_external)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), is_preempted=st.booleans())
    def release(self, data, is_preempted):
        request = data.draw(st.sampled_from(self.requests))
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        if not is_preempted:
            self.requests.remove(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def pop(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.popped.append(self.manager.pop_blocks_for_free(request))
        self.requests.remove(request)

    @precondition(lambda self: self.popped)
    @rule()
    def free_popped(self):
        self.manager.block_pool.free_blocks(reversed(self.popped.pop(0)))

    @rule(ids=st.sets(st.integers(0, 29), max_size=4))
    def evict(self, ids):
        self.manager.evict_blocks(sorted(block for block in ids if block < self.num_blocks))

    @rule()
    def reset(self):
        held = self.manager.block_pool.get_num_free_blocks() != self.num_blocks - 1
        assert self.manager.reset_prefix_cache() != held

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        arguments=st.sampled_from(
            [
                {"num_new_tokens": 0},
                {"num_new_tokens": -1},
                {"num_new_tokens": 1, "num_lookahead_tokens": -1},
                {"num_new_tokens": 1, "num_external_computed_tokens": 1000},
                {"num_new_tokens": 1, "reserved_blocks": -1},
            ]
        ),
    )
    def call_badly(self, data, arguments):
        request = data.draw(st.sampled_from(self.requests))
        before = self.state()
        with pytest.raises(ValueError, match=r"must|holds"):
            self.manager.allocate_slots(request, **arguments)
        assert self.state() == before

    @invariant()
    def is_sound(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        self.check_holders()
        self.check_slots()

    def check_slots(self) -> None:
        """Nobody has written to a slot of another: each holds its request's own prefix."""
        for request in self.requests:
            for slots, slot, prefix, _ in self.computed_slots(request):
                assert slots[slot] == prefix

    def check_holders(self) -> None:
        """Every place of a table, and every popped block, is one holder: none is lost."""
        places = Counter(block.block_id for blocks in self.popped for block in blocks)
        for request in self.requests:
            for ids in self.manager.get_block_ids(request.request_id):
                places.update(ids)
        del places[0]
        assert dict(places) == self.manager.block_pool.dump()[1]

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for request in self.requests:
            self.manager.free(request)
        for blocks in self.popped:
            self.manager.block_pool.free_blocks(reversed(blocks))
        assert self.manager.block_pool.get_num_free_blocks() == self.num_blocks - 1


ManagerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestManager = ManagerMachine.TestCase
