# SPDX-License-Identifier: Apache-2.0
"""Block tables of a batch with a copy on the device where attention runs.

Three classes over the same rows (`paged_kv.BlockTable`, C++) and the same ops:

`BlockTable`
    Row r of the table is request r of the batch.
`MultiGroupBlockTable`
    The same for models whose layers form several KV cache groups.
`BlockTables`
    A request keeps its row for life; each step gathers the rows of its batch.

Methods change rows on the host. The device follows when told (`commit_block_table`,
`apply_staged_writes`), by what has changed and not by whole rows: through `paged_kv.ops`, or on
the CPU by the rows themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged_kv import ops
from paged_kv._block_tables import BlockTables
from paged_kv._core import get_block_table_width
from paged_kv._device_rows import DeviceRows, check_one_a_group, commit, write_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from paged_kv._core import BlockTable as HostBlockTable
    from paged_kv._device_rows import BlockIds

__all__ = ["BlockTable", "BlockTables", "MultiGroupBlockTable"]

_PAD_SLOT = -1


class BlockTable:
    """The block tables of a batch, one row a request, on the host and on a device.

    Where kernels work on smaller blocks than the pool hands out, block b of the pool is split into
    ``ratio = block_size / kernel_block_size`` kernel blocks ``b * ratio + j``. Methods take blocks
    of the pool; tensors hold kernel blocks. Entries after a row's blocks are 0, the null block.

    Args:
        block_size: Tokens per block of the pool.
        max_num_reqs: Number of rows.
        max_num_blocks_per_req: Blocks of the pool that fit in a row.
        max_num_batched_tokens: Length of ``slot_mapping``.
        pin_memory: Whether the host's memory is pinned. Default: if the device is a GPU.
        device: Where the second copy of the rows lies.
        kernel_block_size: Tokens per kernel block; divides ``block_size``. Default: the same.

    Attributes:
        slot_mapping: ``[max_num_batched_tokens]`` int64 on the device, from
            `compute_slot_mapping`. The address does not change.

    Raises:
        ValueError: A size that is not positive, or blocks that do not divide.

    Source:
        vLLM 0.32 v1/worker/block_table.py::BlockTable.

    Example:
        >>> table = BlockTable(16, 2, 4, max_num_batched_tokens=3)
        >>> table.append_row([3, 7], row_idx=0)
        >>> table.commit_block_table(num_reqs=1)
        >>> table.get_device_tensor(1).tolist()
        [[3, 7, 0, 0]]
        >>> starts = torch.tensor([0, 2], dtype=torch.int32)
        >>> table.compute_slot_mapping(1, starts, torch.tensor([15, 18]))
        >>> table.slot_mapping.tolist()
        [63, 114, -1]
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool | None = None,
        device: torch.device | str = "cpu",
        kernel_block_size: int | None = None,
    ) -> None:
        device = torch.device(device)
        self._rows = DeviceRows(
            block_size,
            max_num_reqs,
            max_num_blocks_per_req,
            max_num_batched_tokens,
            kernel_block_size,
            device,
            _is_pinned(pin_memory, device),
        )
        self.slot_mapping = torch.full(
            (max_num_batched_tokens,), _PAD_SLOT, dtype=torch.int64, device=device
        )

    @property
    def host_table(self) -> HostBlockTable:
        """The rows on the host, in the memory of `get_cpu_tensor`.

        What is written to them is sent by the next `commit_block_table`; `paged_kv.RequestBatch`
        writes a step's blocks there.
        """
        return self._rows.host

    @property
    def block_size(self) -> int:
        """Tokens per block of the pool."""
        return self._rows.host.block_size

    @property
    def kernel_block_size(self) -> int:
        """Tokens per kernel block."""
        return self._rows.host.kernel_block_size

    @property
    def num_blocks_per_row(self) -> npt.NDArray[np.int32]:
        """``[max_num_reqs]`` int32, in kernel blocks. A copy."""
        return self._rows.host.num_blocks_per_row

    def append_row(self, block_ids: BlockIds, row_idx: int) -> None:
        """Adds blocks at the end of a row.

        Raises:
            ValueError: Blocks that do not fit, or an id out of range. Nothing has changed.
            IndexError: No such row.
        """
        self._rows.host.append_row(block_ids, row_idx)

    def add_row(self, block_ids: BlockIds, row_idx: int) -> None:
        """Makes ``block_ids`` the row. Raises as `append_row` does."""
        self._rows.host.add_row(block_ids, row_idx)

    def replace_blocks(self, block_ids: BlockIds, row_idx: int, start: int) -> None:
        """Puts ``block_ids`` in the place of as many blocks of a row, from block ``start`` on.

        For a block that was copied before a write, or null blocks (0) for those that have left a
        sliding window: what the pool hands to others must leave the device's table too.

        Raises:
            ValueError: More blocks than the row has from there on. Nothing has changed.
            IndexError: No such row.
        """
        self._rows.host.replace_blocks(block_ids, row_idx, start)

    def clear_row(self, row_idx: int) -> None:
        """Empties a row."""
        self._rows.host.clear_row(row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        """Makes row ``tgt`` what row ``src`` is, and empties ``src``."""
        self._rows.host.move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchanges two rows."""
        self._rows.host.swap_row(src, tgt)

    def clear(self) -> None:
        """Empties all rows, on the device too."""
        self._rows.host.clear()
        self._rows.table.zero_()
        self._rows.host.mark_clean(self._rows.host.max_num_reqs)

    def commit_block_table(self, num_reqs: int) -> None:
        """Brings the device's first ``num_reqs`` rows up to date.

        Notes:
            Cost: O(entries changed since the last commit); no device synchronisation.
        """
        commit([self._rows], num_reqs)

    def compute_slot_mapping(
        self, num_reqs: int, query_start_loc: Tensor, positions: Tensor
    ) -> None:
        """Computes where each token of a batch is written, from the device's rows.

        Args:
            num_reqs: Row r of the table is request r of the batch.
            query_start_loc: ``[>= num_reqs + 1]`` int32 on the device, starts at 0.
            positions: ``[>= num_tokens]`` int64 on the device, position of each token in its
                sequence.

        Mutates:
            ``slot_mapping``, all of it: -1 after the last token.

        Raises:
            RuntimeError: Shape or dtype mismatch; on the CPU also a position outside its row.
        """
        if query_start_loc.shape[0] <= num_reqs:
            msg = (
                f"query_start_loc: expected at least {num_reqs + 1} entries, "
                f"got {query_start_loc.shape[0]}"
            )
            raise RuntimeError(msg)
        ops.compute_slot_mapping(
            query_start_loc[: num_reqs + 1],
            positions,
            self._rows.table,
            self.slot_mapping,
            self.kernel_block_size,
        )

    def get_device_tensor(self, num_reqs: int) -> Tensor:
        """The first ``num_reqs`` rows on the device, as the last commit left them. A view."""
        return self._rows.table[:num_reqs]

    def get_cpu_tensor(self) -> Tensor:
        """The rows on the host: ``[max_num_reqs, width]`` int32. Read only: a view."""
        return self._rows.memory

    def get_numpy_array(self) -> npt.NDArray[np.int32]:
        """The rows on the host as an array. Read only: a view."""
        return self._rows.host.get_numpy_array()


class MultiGroupBlockTable:
    """One `BlockTable` for each KV cache group; a request has the same row in all.

    Args:
        max_num_reqs: Number of rows.
        max_num_batched_tokens: Length of each ``slot_mapping``.
        pin_memory: As in `BlockTable`.
        device: As in `BlockTable`.
        block_sizes: Tokens per block of each group.
        max_num_blocks: Blocks of each group that a request may have. Rows are made wider, to whole
            tiles of 128 tokens (`paged_kv.get_block_table_width`).
        kernel_block_sizes: Tokens per kernel block of each group. Default: ``block_sizes``.

    Raises:
        ValueError: Lists of different length, or a size that `BlockTable` refuses.

    Source:
        vLLM 0.32 v1/worker/block_table.py::MultiGroupBlockTable.

    Example:
        >>> tables = MultiGroupBlockTable(2, 8, None, "cpu", [16, 32], [8, 4])
        >>> tables.add_row(([1, 2], [3]), row_idx=1)
        >>> tables.commit_block_table(2)
        >>> tables[1].get_device_tensor(2).tolist()
        [[0, 0, 0, 0], [3, 0, 0, 0]]

        `paged_kv.RequestBatch` writes the blocks of a step straight into these rows:

        >>> from paged_kv import (
        ...     FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request,
        ...     RequestBatch,
        ... )
        >>> import numpy as np
        >>> spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")
        >>> config = KVCacheConfig(10, [], [KVCacheGroupSpec(["layer.0"], spec)])
        >>> manager = KVCacheManager(config, 128, 16, 16, enable_caching=False)
        >>> tables = MultiGroupBlockTable(2, 32, None, "cpu", [16], [8])
        >>> batch = RequestBatch(manager, tables)
        >>> batch.add(Request("a", list(range(20))), row_idx=1)
        >>> batch.allocate_slots(np.array([1], np.int32), 20)
        array([], dtype=int32)
        >>> tables.commit_block_table(2)
        >>> tables[0].get_device_tensor(2)[:, :3].tolist()
        [[0, 0, 0], [1, 2, 0]]
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        pin_memory: bool | None,
        device: torch.device | str,
        block_sizes: Sequence[int],
        max_num_blocks: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
    ) -> None:
        kernel_sizes = block_sizes if kernel_block_sizes is None else kernel_block_sizes
        check_one_a_group(
            block_sizes, max_num_blocks=max_num_blocks, kernel_block_sizes=kernel_sizes
        )
        self.block_tables = [
            BlockTable(
                block_size,
                max_num_reqs,
                get_block_table_width(num_blocks, block_size),
                max_num_batched_tokens,
                pin_memory,
                device,
                kernel_size,
            )
            for block_size, num_blocks, kernel_size in zip(
                block_sizes, max_num_blocks, kernel_sizes, strict=True
            )
        ]
        self._rows = [table._rows for table in self.block_tables]

    def __getitem__(self, idx: int) -> BlockTable:
        """The table of a group."""
        return self.block_tables[idx]

    def __iter__(self) -> Iterator[BlockTable]:
        """The tables, group after group: `paged_kv.RequestBatch` takes them."""
        return iter(self.block_tables)

    def __len__(self) -> int:
        """The number of groups."""
        return len(self.block_tables)

    def append_row(self, block_ids: Sequence[BlockIds], row_idx: int) -> None:
        """Adds blocks at the end of a row: one entry of ``block_ids`` a group.

        Raises:
            ValueError: Blocks that do not fit into one of the groups. No group has changed.
            IndexError: No such row.
        """
        write_rows(self._rows, block_ids, row_idx, overwrite=False)

    def add_row(self, block_ids: Sequence[BlockIds], row_idx: int) -> None:
        """Makes ``block_ids`` the row, one entry a group. Raises as `append_row` does."""
        write_rows(self._rows, block_ids, row_idx, overwrite=True)

    def clear_row(self, row_idx: int) -> None:
        """Empties a row of every group."""
        for table in self.block_tables:
            table.clear_row(row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        """Makes row ``tgt`` what row ``src`` is, and empties ``src``, in every group."""
        for table in self.block_tables:
            table.move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchanges two rows of every group."""
        for table in self.block_tables:
            table.swap_row(src, tgt)

    def clear(self) -> None:
        """Empties all rows of every group, on the device too."""
        for table in self.block_tables:
            table.clear()

    def commit_block_table(self, num_reqs: int) -> None:
        """Brings the device's first ``num_reqs`` rows of every group up to date, in one copy."""
        commit(self._rows, num_reqs)

    def compute_slot_mapping(
        self, num_reqs: int, query_start_loc: Tensor, positions: Tensor
    ) -> None:
        """`BlockTable.compute_slot_mapping` of every group."""
        for table in self.block_tables:
            table.compute_slot_mapping(num_reqs, query_start_loc, positions)


def _is_pinned(pin_memory: bool | None, device: torch.device) -> bool:
    return device.type == "cuda" if pin_memory is None else pin_memory
