# SPDX-License-Identifier: Apache-2.0
"""BlockSpaceManager: sharing, copy-on-write and swapping, as Python sees them."""

from __future__ import annotations

import numpy as np
import pytest

from paged_kv import AllocStatus, BlockDevice, BlockSpaceManager, OutOfBlocksError


def make_manager(num_gpu_blocks: int = 11, num_cpu_blocks: int = 11, watermark: float = 0.0):
    return BlockSpaceManager(4, num_gpu_blocks, num_cpu_blocks, watermark)


def tables(manager: BlockSpaceManager) -> dict[int, list[int]]:
    manager.check_integrity()
    return {seq: manager.get_block_table(seq).tolist() for seq in sorted(manager.get_seq_ids())}


def test_a_group_shares_its_prompt_and_copies_the_part_filled_block():
    manager = make_manager()
    manager.allocate([5, 6], 6)
    assert tables(manager) == {5: [1, 2], 6: [1, 2]}
    copies = manager.append_slots([5, 6])
    assert (copies.dtype, copies.tolist()) == (np.int64, [[2, 3]])
    assert tables(manager) == {5: [1, 3], 6: [1, 2]}
    assert manager.append_slots([5, 6]).shape == (0, 2)
    assert [manager.get_num_tokens(seq) for seq in (5, 6)] == [8, 8]


@pytest.mark.parametrize("num_tokens", range(9))
def test_a_fork_at_every_offset_copies_only_what_is_part_filled(num_tokens):
    manager = make_manager()
    manager.allocate([0], num_tokens)
    manager.fork(0, 1)
    assert len(manager.append_slots([1])) == (num_tokens % 4 != 0)
    assert len(manager.append_slots([0])) == 0
    first, second = tables(manager).values()
    assert first[: num_tokens // 4] == second[: num_tokens // 4]
    assert first[num_tokens // 4] != second[num_tokens // 4]


def test_allocation_statuses():
    manager = make_manager(11, watermark=0.2)  # 10 blocks, 2 of them kept free
    assert manager.can_allocate(33) is AllocStatus.NEVER
    assert manager.can_allocate(32) is AllocStatus.OK
    manager.allocate([0], 1)
    assert manager.can_allocate(32) is AllocStatus.LATER
    manager.free(0)
    assert manager.can_allocate(32) is AllocStatus.OK


def test_swapping_gives_the_mappings_of_swap_blocks():
    manager = make_manager()
    manager.allocate([0, 1], 8)
    manager.append_slots([0])
    assert manager.can_swap_out([0, 1])
    assert manager.swap_out([0, 1]).tolist() == [[1, 1], [2, 2], [3, 3]]
    assert manager.get_device(0) is BlockDevice.CPU
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (10, 7)
    assert manager.can_swap_in([0, 1]) is AllocStatus.OK
    assert sorted(row[0] for row in manager.swap_in([0, 1]).tolist()) == [1, 2, 3]
    assert manager.get_device(1) is BlockDevice.GPU
    first, second = tables(manager).values()
    assert first[:2] == second


def test_swap_in_is_refused_when_the_free_blocks_are_those_that_it_needs():
    """The append after it counts too, so a sequence let in is not thrown out at once."""
    manager = make_manager(num_gpu_blocks=4)
    manager.allocate([0], 8)
    manager.swap_out([0])
    manager.allocate([1], 4)
    assert manager.can_swap_in([0]) is AllocStatus.LATER
    assert manager.can_swap_in([0], 0) is AllocStatus.OK
    assert manager.can_swap_in([0], 5) is AllocStatus.NEVER


@pytest.mark.parametrize(
    ("num_gpu_blocks", "status"), [(3, AllocStatus.NEVER), (4, AllocStatus.OK)]
)
def test_swap_in_leaves_room_for_the_copy_of_a_shared_block(num_gpu_blocks, status):
    manager = make_manager(num_gpu_blocks=num_gpu_blocks)
    manager.allocate([0, 1], 6)
    manager.swap_out([0, 1])
    assert manager.can_swap_in([0, 1]) is status
    assert manager.can_swap_in([0, 1], 0) is AllocStatus.OK


def test_failed_calls_change_nothing():
    manager = make_manager(num_gpu_blocks=4, num_cpu_blocks=2)
    manager.allocate([0, 1], 10)
    before = tables(manager)
    for call, error in (
        (lambda: manager.allocate([2], 1), OutOfBlocksError),
        (lambda: manager.append_slots([0, 1]), OutOfBlocksError),
        (lambda: manager.swap_out([0]), OutOfBlocksError),
        (lambda: manager.allocate([2, 0], 0), ValueError),
        (lambda: manager.allocate([2, 2], 0), ValueError),
        (lambda: manager.allocate([], 0), ValueError),
        (lambda: manager.allocate([2], -1), ValueError),
        (lambda: manager.append_slots([0, 0]), ValueError),
        (lambda: manager.append_slots([0], -1), ValueError),
        (lambda: manager.append_slots([9]), ValueError),
        (lambda: manager.swap_in([0]), ValueError),
        (lambda: manager.fork(0, 1), ValueError),
        (lambda: manager.fork(9, 2), ValueError),
        (lambda: manager.get_block_table(9), ValueError),
        (lambda: manager.append_slots(["0"]), TypeError),
        (lambda: manager.append_slots([0], 1.0), TypeError),
    ):
        with pytest.raises(error):
            call()
        assert tables(manager) == before
    assert not manager.can_append_slots([0, 1])
    assert not manager.can_swap_out([0])


def test_freeing_what_does_not_exist_is_no_error():
    manager = make_manager()
    manager.free(3)
    manager.allocate([3], 5)
    assert 3 in manager
    manager.free(3)
    manager.free(3)
    assert 3 not in manager
    manager.allocate([3, 4], 5)
    manager.swap_out([4])
    manager.reset()
    assert tables(manager) == {}
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (10, 10)


@pytest.mark.parametrize("args", [(0, 2), (4, 0), (4, 2, 0), (4, 2, 1, 1.0), (4, 2, 1, -0.1)])
def test_bad_constructor_arguments_are_refused(args):
    with pytest.raises(ValueError, match="must be"):
        BlockSpaceManager(*args)
