# SPDX-License-Identifier: Apache-2.0
"""`BlockTables`, exported by ``block_table``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged_kv import ops
from paged_kv._device_rows import DeviceRows, check_one_a_group, commit, write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paged_kv._core import BlockTable as HostBlockTable
    from paged_kv._device_rows import BlockIds

__all__ = ["BlockTables"]

_PAD_SLOT = -1


class BlockTables:
    """Block tables in which a request keeps its row; each step gathers the rows of its batch.

    Rows are changed on the host and sent as diffs by `apply_staged_writes`. Tensors that a step
    reads have addresses that do not change, so that a captured graph can be replayed. Methods take
    blocks of the pool; tensors hold kernel blocks (see `paged_kv.block_table.BlockTable`).

    Args:
        block_sizes: Tokens per block of each KV cache group.
        max_num_reqs: Number of rows.
        max_num_batched_tokens: Tokens of a step at most.
        max_num_blocks_per_group: Blocks of each group that fit in a row.
        device: Where the tables lie.
        slot_mapping_enabled: For each group whether its tokens have slots; those of the others are
            all -1. Default: all have.
        kernel_block_sizes: Tokens per kernel block of each group. Default: ``block_sizes``.

    Attributes:
        input_block_tables: For each group ``[max_num_reqs, width]`` int32, what
            `gather_block_tables` fills.
        slot_mappings: ``[num_groups, max_num_batched_tokens]`` int64, what
            `compute_slot_mappings` fills.
        num_blocks: ``[num_groups, max_num_reqs]`` int32 on the device, kernel blocks of each row.

    Raises:
        ValueError: Lists of different length, or a size that is not positive.

    Source:
        vLLM 0.32 v1/worker/gpu/block_table.py::BlockTables.

    Example:
        >>> tables = BlockTables([16], 4, 8, [3], "cpu")
        >>> tables.append_block_ids(2, ([5, 6],), overwrite=True)
        >>> tables.apply_staged_writes()
        >>> rows = torch.tensor([2], dtype=torch.int32)
        >>> tables.gather_block_tables(rows, num_reqs_padded=2)[0].tolist()
        [[5, 6, 0], [0, 0, 0]]
        >>> starts = torch.tensor([0, 1], dtype=torch.int32)
        >>> tables.compute_slot_mappings(rows, starts, torch.tensor([17]), 3).tolist()
        [[97, -1, -1]]
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: Sequence[int],
        device: torch.device | str,
        slot_mapping_enabled: Sequence[bool] | None = None,
        kernel_block_sizes: Sequence[int] | None = None,
    ) -> None:
        kernel_sizes = block_sizes if kernel_block_sizes is None else kernel_block_sizes
        enabled = (
            [True] * len(block_sizes) if slot_mapping_enabled is None else slot_mapping_enabled
        )
        check_one_a_group(
            block_sizes,
            max_num_blocks_per_group=max_num_blocks_per_group,
            slot_mapping_enabled=enabled,
            kernel_block_sizes=kernel_sizes,
        )
        device = torch.device(device)
        self.max_num_reqs = max_num_reqs
        self._groups = [
            DeviceRows(
                block_size,
                max_num_reqs,
                num_blocks,
                max_num_batched_tokens,
                kernel_size,
                device,
                pin_memory=False,  # what is sent is staged elsewhere
            )
            for block_size, num_blocks, kernel_size in zip(
                block_sizes, max_num_blocks_per_group, kernel_sizes, strict=True
            )
        ]
        self._slot_mapping_enabled = list(enabled)
        self.input_block_tables = [torch.zeros_like(group.table) for group in self._groups]
        num_groups = len(self._groups)
        self.num_blocks = torch.zeros(num_groups, max_num_reqs, dtype=torch.int32, device=device)
        self.slot_mappings = torch.full(
            (num_groups, max_num_batched_tokens), _PAD_SLOT, dtype=torch.int64, device=device
        )

    @property
    def host_tables(self) -> list[HostBlockTable]:
        """The rows of each group on the host, for `paged_kv.RequestBatch`.

        What is written to them is staged, and sent by the next `apply_staged_writes`.
        """
        return [group.host for group in self._groups]

    @property
    def num_kv_cache_groups(self) -> int:
        """The number of groups."""
        return len(self._groups)

    def append_block_ids(
        self, req_index: int, new_block_ids: Sequence[BlockIds], overwrite: bool
    ) -> None:
        """Stages new blocks of a request: one entry of ``new_block_ids`` a group.

        Args:
            req_index: The request's row.
            new_block_ids: Blocks of the pool, for each group.
            overwrite: Whether these are all its blocks (a new request in the row), or further ones.

        Raises:
            ValueError: Blocks that do not fit into a row of one of the groups, or an id out of
                range. Nothing has been staged.
            IndexError: No such row.
        """
        write_rows(self._groups, new_block_ids, req_index, overwrite=overwrite)

    def replace_block_ids(
        self, req_index: int, group_id: int, block_ids: BlockIds, start: int
    ) -> None:
        """Stages other blocks in the place of those that a request has, from ``start`` on.

        For a block that was copied before a write, or null blocks (0) for those that have left a
        sliding window.

        Raises:
            ValueError: More blocks than the row has from there on. Nothing has been staged.
            IndexError: No such row or group.
        """
        self._groups[group_id].host.replace_blocks(block_ids, req_index, start)

    def clear_row(self, req_index: int) -> None:
        """Stages the removal of a request's blocks from every group."""
        for group in self._groups:
            group.host.clear_row(req_index)

    def apply_staged_writes(self) -> None:
        """Brings the device's rows up to date: one copy to the device and one op a group.

        Notes:
            Cost: O(entries staged); nothing if nothing is staged. No device synchronisation.
        """
        commit(self._groups, self.max_num_reqs, self.num_blocks)

    def gather_block_tables(
        self,
        idx_mapping: Tensor,
        num_reqs_padded: int,
        out: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Gathers the rows of the requests of a batch, in batch order.

        Args:
            idx_mapping: ``[num_reqs]`` int32 on the device, the row of each request; -1 is padding.
            num_reqs_padded: Rows of the result.
            out: For each group ``[>= num_reqs_padded, width]`` int32 to write to. Default:
                ``input_block_tables``.

        Returns:
            For each group a view ``[num_reqs_padded, width]``. Entries past a row's blocks are
            stale; padding rows are 0, the null block.

        Raises:
            ValueError: ``num_reqs_padded`` is less than the requests, or more than the rows of
                ``out``; not one tensor a group.
            RuntimeError: Shape or dtype mismatch, a row out of range (CPU).
        """
        tables = self.input_block_tables if out is None else out
        if len(tables) != self.num_kv_cache_groups:
            msg = (
                f"out: expected {self.num_kv_cache_groups} tensors, one a group, got {len(tables)}"
            )
            raise ValueError(msg)
        max_rows = min((table.shape[0] for table in tables), default=num_reqs_padded)
        if not idx_mapping.shape[0] <= num_reqs_padded <= max_rows:
            msg = (
                f"num_reqs_padded must be in [{idx_mapping.shape[0]}, {max_rows}], "
                f"got {num_reqs_padded}"
            )
            raise ValueError(msg)
        gathered = tuple(table[:num_reqs_padded] for table in tables)
        for group, num_blocks, table in zip(self._groups, self.num_blocks, gathered, strict=True):
            ops.gather_block_tables(group.table, idx_mapping, num_blocks, table)
        return gathered

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[Tensor, ...]:
        """``input_block_tables`` with ``num_reqs`` rows of null blocks, to capture a graph."""
        return tuple(table[:num_reqs].zero_() for table in self.input_block_tables)

    def compute_slot_mappings(
        self,
        idx_mapping: Tensor,
        query_start_loc: Tensor,
        positions: Tensor,
        num_tokens_padded: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """Computes where each token of a batch is written, for each group.

        Args:
            idx_mapping: ``[num_reqs]`` int32 on the device, the row of each request; the tokens of
                -1 get no slot.
            query_start_loc: ``[>= num_reqs + 1]`` int32 on the device, starts at 0.
            positions: ``[>= num_tokens]`` int64 on the device.
            num_tokens_padded: Columns of the result.
            out: ``[num_groups, >= num_tokens_padded]`` int64 to write to. Default:
                ``slot_mappings``.

        Returns:
            A view ``[num_groups, num_tokens_padded]``. All columns of ``out`` after the last token
            are -1, so that a batch padded to any size writes nothing there.

        Raises:
            RuntimeError: Shape or dtype mismatch; on the CPU also a position outside its row.
        """
        num_reqs = idx_mapping.shape[0]
        if query_start_loc.shape[0] <= num_reqs:
            msg = (
                f"query_start_loc: expected at least {num_reqs + 1} entries, "
                f"got {query_start_loc.shape[0]}"
            )
            raise RuntimeError(msg)
        slots = self.slot_mappings if out is None else out
        if slots.shape[0] != self.num_kv_cache_groups or slots.shape[1] < num_tokens_padded:
            msg = (
                f"out: expected [{self.num_kv_cache_groups}, >= {num_tokens_padded}], "
                f"got {list(slots.shape)}"
            )
            raise RuntimeError(msg)
        for group, is_enabled, row in zip(
            self._groups, self._slot_mapping_enabled, slots, strict=True
        ):
            if not is_enabled:
                row.fill_(_PAD_SLOT)
                continue
            ops.compute_slot_mapping(
                query_start_loc[: num_reqs + 1],
                positions,
                group.table,
                row,
                group.host.kernel_block_size,
                idx_mapping,
            )
        return slots[:, :num_tokens_padded]

    def get_dummy_slot_mappings(self, num_tokens: int) -> Tensor:
        """``slot_mappings`` without any slot, ``[num_groups, num_tokens]``, to capture a graph."""
        self.slot_mappings.fill_(_PAD_SLOT)
        return self.slot_mappings[:, :num_tokens]
