# SPDX-License-Identifier: Apache-2.0
"""Block table rows on the host and their copy on a device, which follows by diffs."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, cast

import torch

from paged_kv import ops
from paged_kv._core import BlockTable as HostBlockTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from paged_kv._core import KVCacheBlock

    # The blocks of one row: a list of ids or of blocks, or an int32 or int64 array of ids.
    BlockIds = Iterable[int] | Iterable[KVCacheBlock]

__all__ = ["DeviceRows", "check_one_a_group", "commit", "write_rows"]


class DeviceRows:
    """The rows of one KV cache group.

    Attributes:
        memory: ``[max_num_reqs, width]`` int32 on the host, where the rows lie.
        host: The rows, as the last calls left them.
        table: ``[max_num_reqs, width]`` int32 on the device, as the last commit left it. The
            address does not change.
        table_on_host: ``table`` as an array, if it lies on the host; else None.
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        kernel_block_size: int | None,
        device: torch.device,
        pin_memory: bool,
    ) -> None:
        kernel_size = block_size if kernel_block_size is None else kernel_block_size
        shape = (0, 0)  # for sizes that the host's table refuses
        if kernel_size > 0 and max_num_reqs > 0 and max_num_blocks_per_req > 0:
            shape = (max_num_reqs, max_num_blocks_per_req * (block_size // kernel_size))
        self.memory = torch.zeros(shape, dtype=torch.int32, pin_memory=pin_memory)
        self.host = HostBlockTable(
            block_size,
            max_num_reqs,
            max_num_blocks_per_req,
            max_num_batched_tokens,
            kernel_size,
            self.memory.numpy(),
        )
        self.table = torch.zeros(shape, dtype=torch.int32, device=device)
        self.table_on_host: npt.NDArray[np.int32] | None = (
            self.table.numpy() if lies_on_host(device) else None
        )


def lies_on_host(device: torch.device) -> bool:
    """Whether what lies there can be written to without an op."""
    return device.type == "cpu"


def check_one_a_group(block_sizes: Sequence[int], **lists: Sequence[object]) -> None:
    """Raises ValueError unless each list has as many entries as ``block_sizes``."""
    for name, entries in lists.items():
        if len(entries) != len(block_sizes):
            msg = f"{name}: expected {len(block_sizes)} entries, one a group, got {len(entries)}"
            raise ValueError(msg)


def write_rows(
    groups: Sequence[DeviceRows], block_ids: Sequence[BlockIds], row_idx: int, *, overwrite: bool
) -> None:
    """Appends to, or overwrites, one row of every group; all of them or none.

    Raises:
        ValueError: Not one entry a group, or blocks that a row has no room for.
        IndexError: No such row.
    """
    if len(block_ids) != len(groups):
        msg = f"block_ids: expected {len(groups)} entries, one a group, got {len(block_ids)}"
        raise ValueError(msg)
    # Read twice below, which an iterator could not be.
    sized_ids = [
        ids if isinstance(ids, Sized) else cast("BlockIds", list(ids)) for ids in block_ids
    ]
    for group, ids in zip(groups, sized_ids, strict=True):
        check = group.host.check_add_row if overwrite else group.host.check_append_row
        check(ids, row_idx)
    for group, ids in zip(groups, sized_ids, strict=True):
        write = group.host.add_row if overwrite else group.host.append_row
        write(ids, row_idx)


def commit(groups: Sequence[DeviceRows], num_reqs: int, num_blocks: Tensor | None = None) -> None:
    """Brings the device's rows ``[0, num_reqs)`` up to date: one copy to the device for all groups.

    Args:
        groups: The groups, all on one device.
        num_reqs: Rows to look at; others stay as they are on the device.
        num_blocks: ``[num_groups, max_num_reqs]`` int32 on the device, the blocks of each row.

    Mutates:
        The tables of ``groups``, and ``num_blocks``.

    Notes:
        Cost: O(rows and entries changed); nothing at all if nothing has changed.
    """
    tables = [group.table_on_host for group in groups if group.table_on_host is not None]
    if len(tables) < len(groups):
        _send(groups, num_reqs, num_blocks)
        return
    has_changed = False
    for group, table in zip(groups, tables, strict=True):
        has_changed |= group.host.commit_dirty(num_reqs, table)
    if has_changed and num_blocks is not None:
        for group, counts in zip(groups, num_blocks, strict=True):
            counts.numpy()[:] = group.host.num_blocks_per_row


def _send(groups: Sequence[DeviceRows], num_reqs: int, num_blocks: Tensor | None) -> None:
    """`commit` to a device by ops.

    What is sent lies in a buffer of this call alone, so that the host may go on changing rows while
    the copy runs; torch keeps the buffer until it has been read.
    """
    dirty = [group.host.dirty(num_reqs) for group in groups]
    sizes = [3 * rows + entries for rows, entries in dirty]
    if sum(sizes) == 0:
        return
    if num_blocks is not None:
        sizes.append(num_blocks.numel())
    device = groups[0].table.device
    staged = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    parts = torch.split(staged, sizes)
    for group, part in zip(groups, parts, strict=False):
        group.host.read_dirty(num_reqs, part.numpy())
    if num_blocks is not None:
        for group, counts in zip(groups, parts[-1].view_as(num_blocks), strict=True):
            counts.numpy()[:] = group.host.num_blocks_per_row

    parts = torch.split(staged.to(device, non_blocking=True), sizes)
    for group, (rows, entries), part in zip(groups, dirty, parts, strict=False):
        if rows > 0:
            diff = torch.split(part, [rows, rows, rows, entries])
            ops.apply_block_table_writes(group.table, *diff)
    if num_blocks is not None:
        num_blocks.copy_(parts[-1].view_as(num_blocks))
    for group in groups:
        group.host.mark_clean(num_reqs)
