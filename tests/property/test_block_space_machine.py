# SPDX-License-Identifier: Apache-2.0
"""BlockSpaceManager against a model in which every sequence has its tokens to itself.

The caches hold one number a slot and change by the returned copies and by writes of new tokens
alone. So a block that is shared, freed or copied at a wrong moment shows as a token that does not
read back.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_kv import AllocStatus, BlockDevice, BlockSpaceManager, OutOfBlocksError

UNWRITTEN = -1


class BlockSpaceMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_gpu_blocks=st.integers(2, 12),
        num_cpu_blocks=st.integers(1, 8),
        watermark=st.sampled_from([0.0, 0.2]),
    )
    def make(self, block_size, num_gpu_blocks, num_cpu_blocks, watermark):
        self.block_size = block_size
        self.num_blocks = {BlockDevice.GPU: num_gpu_blocks, BlockDevice.CPU: num_cpu_blocks}
        self.reserve = int(watermark * num_gpu_blocks)
        self.manager = BlockSpaceManager(block_size, num_gpu_blocks, num_cpu_blocks, watermark)
        self.caches = {
            device: np.full((num_blocks, block_size), UNWRITTEN)
            for device, num_blocks in self.num_blocks.items()
        }
        self.tokens: dict[int, list[int]] = {}
        self.num_seqs = 0
        self.num_tokens = 0

    def new_seq(self) -> int:
        self.num_seqs += 1
        return self.num_seqs

    def seqs_on(self, device: BlockDevice) -> list[int]:
        return [seq for seq in self.tokens if self.manager.get_device(seq) is device]

    def draw_group(self, data, device: BlockDevice) -> list[int]:
        seqs = self.seqs_on(device)
        return data.draw(st.lists(st.sampled_from(seqs), unique=True)) if seqs else []

    def slot(self, seq: int, position: int) -> tuple[BlockDevice, int, int]:
        block = self.manager.get_block_table(seq)[position // self.block_size]
        return self.manager.get_device(seq), int(block), position % self.block_size

    def write(self, seq: int, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.num_tokens += 1
            device, block, offset = self.slot(seq, len(self.tokens[seq]))
            self.caches[device][block, offset] = self.num_tokens
            self.tokens[seq].append(self.num_tokens)

    def copy(self, copies, source: BlockDevice, target: BlockDevice) -> None:
        """As copy_blocks and swap_blocks do it: pairs have no order."""
        sources, targets = copies[:, 0].tolist(), copies[:, 1].tolist()
        assert len(set(targets)) == len(targets)
        assert 0 not in targets
        if source is target:
            assert not set(sources) & set(targets)
        self.caches[target][targets] = self.caches[source][sources]

    @rule(num_seqs=st.integers(1, 3), num_tokens=st.integers(0, 12))
    def allocate(self, num_seqs, num_tokens):
        seqs = [self.new_seq() for _ in range(num_seqs)]
        need = -(-num_tokens // self.block_size)
        status = self.manager.can_allocate(num_tokens)
        assert status is self.expected_status(need)
        if need > self.manager.get_num_free_gpu_blocks():
            assert status is not AllocStatus.OK
            with pytest.raises(OutOfBlocksError):
                self.manager.allocate(seqs, num_tokens)
            return
        self.manager.allocate(seqs, num_tokens)
        self.tokens[seqs[0]] = []
        self.write(seqs[0], num_tokens)
        for seq in seqs[1:]:
            self.tokens[seq] = list(self.tokens[seqs[0]])

    def expected_status(self, need: int) -> AllocStatus:
        if need + self.reserve > self.num_blocks[BlockDevice.GPU] - 1:
            return AllocStatus.NEVER
        fits = need + self.reserve <= self.manager.get_num_free_gpu_blocks()
        return AllocStatus.OK if fits else AllocStatus.LATER

    @rule(data=st.data(), num_tokens=st.integers(0, 6))
    def append(self, data, num_tokens):
        seqs = self.draw_group(data, BlockDevice.GPU)
        if not self.manager.can_append_slots(seqs, num_tokens):
            with pytest.raises(OutOfBlocksError):
                self.manager.append_slots(seqs, num_tokens)
            return
        copies = self.manager.append_slots(seqs, num_tokens)
        self.copy(copies, BlockDevice.GPU, BlockDevice.GPU)
        for seq in seqs:
            self.write(seq, num_tokens)

    @precondition(lambda self: getattr(self, "tokens", None))
    @rule(data=st.data())
    def fork(self, data):
        parent, child = data.draw(st.sampled_from(sorted(self.tokens))), self.new_seq()
        self.manager.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])

    @precondition(lambda self: getattr(self, "tokens", None))
    @rule(data=st.data())
    def free(self, data):
        seq = data.draw(st.sampled_from(sorted(self.tokens)))
        self.manager.free(seq)
        del self.tokens[seq]

    @rule(data=st.data())
    def swap_out(self, data):
        seqs = self.draw_group(data, BlockDevice.GPU)
        if self.manager.can_swap_out(seqs):
            self.copy(self.manager.swap_out(seqs), BlockDevice.GPU, BlockDevice.CPU)
        else:
            with pytest.raises(OutOfBlocksError):
                self.manager.swap_out(seqs)

    @rule(data=st.data(), num_tokens=st.integers(0, 6))
    def swap_in(self, data, num_tokens):
        seqs = self.draw_group(data, BlockDevice.CPU)
        need = len({block for seq in seqs for block in self.manager.get_block_table(seq).tolist()})
        status = self.manager.can_swap_in(seqs, num_tokens)
        if need > self.manager.get_num_free_gpu_blocks():
            assert status is not AllocStatus.OK
            with pytest.raises(OutOfBlocksError):
                self.manager.swap_in(seqs)
            return
        assert self.manager.can_swap_in(seqs, 0) is self.expected_status(need)
        free_before = self.manager.get_num_free_gpu_blocks()
        self.copy(self.manager.swap_in(seqs), BlockDevice.CPU, BlockDevice.GPU)
        if not self.manager.can_append_slots(seqs, num_tokens):
            assert status is not AllocStatus.OK
            return
        copies = self.manager.append_slots(seqs, num_tokens)
        self.copy(copies, BlockDevice.GPU, BlockDevice.GPU)
        for seq in seqs:
            self.write(seq, num_tokens)
        # The status counted exactly the blocks that both calls took.
        taken = free_before - self.manager.get_num_free_gpu_blocks()
        assert (status is AllocStatus.OK) == (taken + self.reserve <= free_before)

    @rule()
    def reset(self):
        self.manager.reset()
        self.tokens.clear()

    @invariant()
    def every_token_reads_back(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert sorted(self.manager.get_seq_ids()) == sorted(self.tokens)
        for seq, tokens in self.tokens.items():
            assert self.manager.get_num_tokens(seq) == len(tokens)
            cache = self.caches[self.manager.get_device(seq)]
            blocks = self.manager.get_block_table(seq)
            assert cache[blocks].flatten()[: len(tokens)].tolist() == tokens


BlockSpaceMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True
)
TestBlockSpaceManager = BlockSpaceMachine.TestCase
