# SPDX-License-Identifier: Apache-2.0
"""BlockManager against a model of it: any order of calls, checked after each."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paged_kv import OutOfBlocksError
from paged_kv.minivllm import BlockManager

REQUEST_IDS = st.sampled_from("abcde")


class BlockManagerMachine(RuleBasedStateMachine):
    """The model knows lengths only; which block ids come out is free as long as none is shared."""

    @initialize(num_blocks=st.integers(2, 12), block_size=st.integers(1, 5))
    def create(self, num_blocks, block_size):
        self.manager = BlockManager(num_blocks, block_size)
        self.num_usable = num_blocks - 1
        self.block_size = block_size
        self.num_tokens: dict[str, int] = {}
        self.slots: dict[str, list[int]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    @property
    def num_held(self) -> int:
        return sum(map(self.blocks_for, self.num_tokens.values()))

    def has_blocks(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_usable - self.num_held

    @rule(request_id=REQUEST_IDS, num_tokens=st.integers(-1, 30))
    def prefill_allocate(self, request_id, num_tokens):
        if request_id in self.num_tokens or num_tokens < 1:
            with pytest.raises(ValueError, match=r"already holds|at least 1"):
                self.manager.prefill_allocate(request_id, num_tokens)
        elif not self.has_blocks(self.blocks_for(num_tokens)):
            with pytest.raises(OutOfBlocksError):
                self.manager.prefill_allocate(request_id, num_tokens)
        else:
            self.manager.prefill_allocate(request_id, num_tokens)
            self.num_tokens[request_id] = num_tokens
            self.slots[request_id] = self.manager.slot_mapping(request_id, 0, num_tokens).tolist()

    @rule(request_id=REQUEST_IDS)
    def decode_append(self, request_id):
        num_tokens = self.num_tokens.get(request_id)
        if num_tokens is None:
            with pytest.raises(ValueError, match="holds no blocks"):
                self.manager.decode_append(request_id)
        elif num_tokens % self.block_size == 0 and not self.has_blocks(1):
            with pytest.raises(OutOfBlocksError):
                self.manager.decode_append(request_id)
        else:
            self.slots[request_id].append(self.manager.decode_append(request_id))
            self.num_tokens[request_id] += 1

    @rule(request_id=REQUEST_IDS)
    def free_request(self, request_id):
        if request_id not in self.num_tokens:
            with pytest.raises(ValueError, match="holds no blocks"):
                self.manager.free_request(request_id)
        else:
            self.manager.free_request(request_id)
            del self.num_tokens[request_id], self.slots[request_id]

    @invariant()
    def blocks_are_conserved(self):
        assert self.manager.num_free_blocks == self.num_usable - self.num_held

    @invariant()
    def fragmentation_follows_the_formula(self):
        num_slots = self.num_held * self.block_size
        num_used = sum(self.num_tokens.values())
        expected = (num_slots - num_used) / num_slots if num_slots else 0.0
        assert self.manager.fragmentation_ratio() == expected

    @invariant()
    def tokens_never_move(self):
        for request_id, slots in self.slots.items():
            assert self.manager.num_tokens(request_id) == len(slots)
            assert self.manager.slot_mapping(request_id, 0, len(slots)).tolist() == slots

    @invariant()
    def no_slot_has_two_owners(self):
        slots = [slot for request_slots in self.slots.values() for slot in request_slots]
        assert len(set(slots)) == len(slots)
        # Slots below block_size belong to the null block.
        assert all(self.block_size <= s < (self.num_usable + 1) * self.block_size for s in slots)


BlockManagerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
test_any_order_of_calls = BlockManagerMachine.TestCase
