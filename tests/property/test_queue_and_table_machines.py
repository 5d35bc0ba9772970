# SPDX-License-Identifier: Apache-2.0
"""FreeKVCacheBlockQueue and BlockTable against lists, over random calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paged_kv import BlockTable, FreeKVCacheBlockQueue, KVCacheBlock

SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
NUM_BLOCKS = 6
NUM_ROWS = 3
ROW_BLOCKS = 4


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [KVCacheBlock(i) for i in range(NUM_BLOCKS)]
        self.queue = FreeKVCacheBlockQueue(self.blocks)
        self.model = list(range(NUM_BLOCKS))

    def outside(self, ids: list[int]) -> bool:
        return len(set(ids)) == len(ids) and not set(ids) & set(self.model)

    @rule()
    def popleft(self):
        if self.model:
            assert self.queue.popleft().block_id == self.model.pop(0)
        else:
            with pytest.raises(ValueError, match="No free blocks"):
                self.queue.popleft()

    @rule(n=st.integers(-1, NUM_BLOCKS + 1))
    def popleft_n(self, n):
        if 0 <= n <= len(self.model):
            assert [block.block_id for block in self.queue.popleft_n(n)] == self.model[:n]
            del self.model[:n]
        else:
            with pytest.raises(ValueError, match="cannot pop"):
                self.queue.popleft_n(n)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def remove(self, block):
        if block in self.model:
            self.queue.remove(self.blocks[block])
            self.model.remove(block)
        else:
            with pytest.raises(ValueError, match="not in the free queue"):
                self.queue.remove(self.blocks[block])

    @rule(ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4), at_front=st.booleans())
    def put_back(self, ids, at_front):
        put = self.queue.prepend_n if at_front else self.queue.append_n
        if self.outside(ids):
            put([self.blocks[i] for i in ids])
            self.model = ids + self.model if at_front else self.model + ids
        else:
            with pytest.raises(ValueError, match="in the free queue already"):
                put([self.blocks[i] for i in ids])

    @invariant()
    def queue_is_as_the_model_says(self):
        self.queue.check_integrity()
        assert [block.block_id for block in self.queue.get_all_free_blocks()] == self.model
        assert self.queue.num_free_blocks == len(self.model)


class BlockTableMachine(RuleBasedStateMachine):
    @initialize(ratio=st.sampled_from([1, 2, 4]))
    def make(self, ratio):
        self.ratio = ratio
        self.table = BlockTable(8, NUM_ROWS, ROW_BLOCKS, 64, 8 // ratio)
        self.model: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self.mirror = np.zeros((NUM_ROWS, self.table.width), dtype=np.int32)
        self.committed = self.mirror.copy()

    rows = st.integers(0, NUM_ROWS - 1)

    @rule(ids=st.lists(st.integers(0, 50), max_size=ROW_BLOCKS + 1), row=rows, add=st.booleans())
    def write(self, ids, row, add):
        write = self.table.add_row if add else self.table.append_row
        new = ids if add else self.model[row] + ids
        if len(new) <= ROW_BLOCKS:
            write(ids, row)
            self.model[row] = new
        else:
            with pytest.raises(ValueError, match="room for 4 blocks"):
                write(ids, row)

    @rule(ids=st.lists(st.integers(0, 50), max_size=2), row=rows, start=st.integers(0, ROW_BLOCKS))
    def replace_blocks(self, ids, row, start):
        if start + len(ids) <= len(self.model[row]):
            self.table.replace_blocks(ids, row, start)
            self.model[row][start : start + len(ids)] = ids
        else:
            with pytest.raises(ValueError, match="cannot replace"):
                self.table.replace_blocks(ids, row, start)

    @rule(num_reqs=st.integers(0, NUM_ROWS))
    def commit_by_diff(self, num_reqs):
        """A mirror that gets the diffs alone is, in these rows, what whole rows would make it."""
        num_rows, num_entries = self.table.dirty(num_reqs)
        diff = np.zeros(3 * num_rows + num_entries, dtype=np.int32)
        self.table.read_dirty(num_reqs, diff)
        self.table.mark_clean(num_reqs)
        rows, starts, ends = diff[: 3 * num_rows].reshape(3, num_rows)
        for row, start, ids in zip(
            rows, starts, np.split(diff[3 * num_rows :], ends[:-1]), strict=False
        ):
            self.mirror[row, start : start + len(ids)] = ids
        self.committed[:num_reqs] = self.table.get_numpy_array()[:num_reqs]
        assert (self.mirror == self.committed).all()
        assert self.table.dirty(num_reqs) == (0, 0)

    @rule(row=rows)
    def clear_row(self, row):
        self.table.clear_row(row)
        self.model[row] = []

    @rule(src=rows, tgt=rows)
    def move_row(self, src, tgt):
        self.table.move_row(src, tgt)
        if src != tgt:
            self.model[tgt], self.model[src] = self.model[src], []

    @rule(src=rows, tgt=rows)
    def swap_row(self, src, tgt):
        self.table.swap_row(src, tgt)
        self.model[src], self.model[tgt] = self.model[tgt], self.model[src]

    @rule()
    def map_all_slots(self):
        """Each row's last tokens, up to 16 of them."""
        lens = [min(16, len(row) * 8) for row in self.model]
        positions = [
            len(row) * 8 - n + i for row, n in zip(self.model, lens, strict=True) for i in range(n)
        ]
        starts = np.cumsum([0, *lens]).astype(np.int32)
        self.table.compute_slot_mapping(NUM_ROWS, starts, np.array(positions, dtype=np.int64))
        rows_of_tokens = [row for row, n in zip(self.model, lens, strict=True) for _ in range(n)]
        expected = [
            row[position // 8] * 8 + position % 8
            for row, position in zip(rows_of_tokens, positions, strict=True)
        ]
        assert self.table.slot_mapping.tolist() == expected + [-1] * (64 - len(expected))

    @invariant()
    def table_is_as_the_model_says(self):
        if not hasattr(self, "table"):
            return
        self.table.check_integrity()
        for row, entries in zip(self.model, self.table.get_numpy_array().tolist(), strict=True):
            parts = [block * self.ratio + part for block in row for part in range(self.ratio)]
            assert entries == parts + [0] * (ROW_BLOCKS * self.ratio - len(parts))


QueueMachine.TestCase.settings = SETTINGS
BlockTableMachine.TestCase.settings = SETTINGS
TestFreeQueue = QueueMachine.TestCase
TestBlockTable = BlockTableMachine.TestCase
