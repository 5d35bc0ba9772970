# SPDX-License-Identifier: Apache-2.0
"""RequestBatch does what the calls request by request do: twin managers stay equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_kv import (
    BlockTable,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    RequestBatch,
    RequestStatus,
    SlidingWindowSpec,
    get_request_block_hasher,
)

SHAPE = {"num_kv_heads": 1, "head_size": 4, "dtype": "float32"}
MAX_MODEL_LEN = 64
MAX_NUM_REQS = 6

FULL = FullAttentionSpec(block_size=4, **SHAPE)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=6, **SHAPE)
FINE_WINDOW = SlidingWindowSpec(block_size=2, sliding_window=5, **SHAPE)
CHUNKED = ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8, **SHAPE)
MODELS = ([FULL], [WINDOW], [CHUNKED], [FULL, WINDOW, WINDOW], [FULL, FINE_WINDOW])


def fields(event):
    names = [name for name in dir(event) if not name.startswith("_")]
    return type(event), [getattr(event, name) for name in names]


class Twin:
    """A manager, its tables, and its own copy of every request."""

    def __init__(self, specs, num_blocks, enable_caching):
        groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
        self.hash_block_size = min(spec.block_size for spec in specs)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, [], groups),
            MAX_MODEL_LEN,
            scheduler_block_size=4,
            hash_block_size=self.hash_block_size,
            enable_caching=enable_caching,
            enable_kv_cache_events=True,
        )
        self.tables = [
            BlockTable(
                spec.block_size,
                MAX_NUM_REQS,
                MAX_MODEL_LEN // spec.block_size,
                max_num_batched_tokens=1,
                kernel_block_size=spec.block_size // 2,  # a row holds two entries a block
            )
            for spec in specs
        ]
        self.requests: dict[int, Request] = {}  # by row

    def admit(self, row, name, tokens, num_tokens):
        """Prefills a request, with its hit. None: no blocks for it."""
        hasher = get_request_block_hasher(self.hash_block_size)
        request = Request(name, tokens, block_hasher=hasher, arrival_time=0.0)
        blocks, num_hits, _ = self.manager.get_computed_blocks(request)
        num_new = min(num_tokens, request.num_tokens - num_hits)
        if self.manager.allocate_slots(request, num_new, num_hits, blocks) is None:
            return None
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hits + num_new
        self.requests[row] = request
        return request

    def state(self):
        requests = {
            row: (
                request.num_computed_tokens,
                request.all_token_ids.tolist(),
                self.manager.get_block_ids(request.request_id),
            )
            for row, request in self.requests.items()
        }
        events = [fields(event) for event in self.manager.take_events()]
        return self.manager.block_pool.dump(), requests, events


class BatchMachine(RuleBasedStateMachine):
    """`batched` goes through RequestBatch, `single` through the manager."""

    @initialize(specs=st.sampled_from(MODELS), num_blocks=st.integers(4, 60), caching=st.booleans())
    def make(self, specs, num_blocks, caching):
        self.batched, self.single = (Twin(specs, num_blocks, caching) for _ in range(2))
        self.batch = RequestBatch(self.batched.manager, self.batched.tables)
        self.num_made = 0

    def draw_rows(self, data):
        used = sorted(self.single.requests)
        return data.draw(st.lists(st.sampled_from(used), unique=True)) if used else []

    @rule(
        row=st.integers(0, MAX_NUM_REQS - 1),
        family=st.integers(0, 1),
        num_tokens=st.integers(1, 30),
        chunk=st.integers(1, 30),
    )
    def admit(self, row, family, num_tokens, chunk):
        if row in self.single.requests:
            return
        self.num_made += 1
        tokens = [family * 1000 + i for i in range(num_tokens)]
        twins = (self.batched, self.single)
        mine, other = (twin.admit(row, str(self.num_made), tokens, chunk) for twin in twins)
        assert (mine is None) == (other is None)
        if mine is not None:
            self.batch.add(mine, row)

    @rule(data=st.data())
    def append(self, data):
        """Tokens for requests that have computed all of theirs."""
        rows = [
            row
            for row in self.draw_rows(data)
            if self.single.requests[row].num_computed_tokens == self.single.requests[row].num_tokens
        ]
        one_each = data.draw(st.booleans())
        counts = [1 if one_each else data.draw(st.integers(0, 3)) for _ in rows]
        tokens = [data.draw(st.integers(0, 3)) for _ in range(sum(counts))]
        self.batch.append_output_token_ids(
            np.array(rows, np.int32),
            np.array(tokens, np.int32),
            None if one_each else np.array(counts, np.int32),
        )
        for row, count in zip(rows, counts, strict=True):
            self.single.requests[row].append_output_token_ids(tokens[:count])
            tokens = tokens[count:]

    @rule(
        data=st.data(),
        lookahead=st.integers(0, 5),
        reserved=st.sampled_from([0, 0, 3]),
        stop=st.booleans(),
    )
    def step(self, data, lookahead, reserved, stop):
        rows = self.draw_rows(data)
        counts = [data.draw(st.integers(1, 4)) for _ in rows]
        is_even = len(set(counts)) == 1
        refused = self.batch.allocate_slots(
            np.array(rows, np.int32),
            counts[0] if is_even else np.array(counts, np.int32),
            num_lookahead_tokens=lookahead,
            reserved_blocks=reserved,
            stop_at_refusal=stop,
        )
        expected = []
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            request = self.single.requests[row]
            blocks = self.single.manager.allocate_slots(
                request, count, num_lookahead_tokens=lookahead, reserved_blocks=reserved
            )
            if blocks is not None:
                request.num_computed_tokens += count
                continue
            expected.append(i)
            if stop:
                break
        assert refused.dtype == np.int32
        assert refused.tolist() == expected

    @rule(data=st.data())
    def free(self, data):
        rows = self.draw_rows(data)
        self.batch.free(np.array(rows, np.int32))
        for row in rows:
            self.single.manager.free(self.single.requests.pop(row))
            del self.batched.requests[row]

    @precondition(lambda self: self.single.requests)
    @rule(data=st.data())
    def move_to_another_row(self, data):
        row = data.draw(st.sampled_from(sorted(self.single.requests)))
        unused = sorted(set(range(MAX_NUM_REQS)) - set(self.single.requests))
        if not unused:
            return
        self.batch.remove(row)
        target = data.draw(st.sampled_from(unused))
        for twin in (self.batched, self.single):
            twin.requests[target] = twin.requests.pop(row)
        self.batch.add(self.batched.requests[target], target)

    @precondition(lambda self: self.single.requests)
    @rule(
        data=st.data(),
        fault=st.sampled_from(["no row", "no request", "twice", "count", "lookahead", "length"]),
    )
    def call_badly(self, data, fault):
        used = sorted(self.single.requests)
        rows, counts, lookahead = [*used], [1] * len(used), 0
        if fault == "no row":
            rows[-1] = MAX_NUM_REQS
        elif fault == "no request":
            unused = set(range(MAX_NUM_REQS)) - set(used)
            if not unused:
                return
            rows[-1] = unused.pop()
        elif fault == "twice":
            rows, counts = [*rows, rows[0]], [*counts, 1]
        elif fault == "count":
            counts[-1] = 0
        elif fault == "lookahead":
            lookahead = -1
        else:
            counts.append(1)
        rows, counts = np.array(rows, np.int32), np.array(counts, np.int32)
        before = self.batched.state()
        with pytest.raises((ValueError, IndexError)):
            self.batch.allocate_slots(rows, counts, num_lookahead_tokens=lookahead)
        if fault in ("no row", "no request", "twice"):
            with pytest.raises((ValueError, IndexError)):
                self.batch.free(rows)
        if fault != "lookahead":
            tokens = np.zeros(len(rows) + (fault == "count"), np.int32)
            with pytest.raises((ValueError, IndexError)):
                self.batch.append_output_token_ids(
                    rows, tokens, counts if fault == "length" else None
                )
        assert self.batched.state()[:2] == before[:2]

    @invariant()
    def twins_are_equal(self):
        if not hasattr(self, "batch"):
            return
        self.batch.check_integrity()
        self.batched.manager.check_integrity()
        assert self.batched.state() == self.single.state()
        assert self.batch.num_reqs == len(self.batched.requests)
        self.check_rows()

    def check_rows(self):
        """Every row holds the entries of its request's blocks, and nothing after them."""
        for group, table in enumerate(self.batched.tables):
            rows = table.get_numpy_array()
            parts = np.arange(2, dtype=np.int32)
            for row in range(MAX_NUM_REQS):
                blocks: list[int] = []
                if row in self.single.requests:
                    name = self.single.requests[row].request_id
                    blocks = self.single.manager.get_block_ids(name)[group]
                entries = (np.array(blocks, np.int32)[:, None] * 2 + parts).ravel()
                assert table.num_blocks_per_row[row] == len(entries)
                assert rows[row, : len(entries)].tolist() == entries.tolist()
                assert not rows[row, len(entries) :].any()


BatchMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)
TestBatch = BatchMachine.TestCase
