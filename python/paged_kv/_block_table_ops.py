# SPDX-License-Identifier: Apache-2.0
"""Block tables and slots: wrappers of ``torch.ops.paged_kv``, exported by ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["apply_block_table_writes", "compute_slot_mapping", "gather_block_tables"]


def compute_slot_mapping(
    query_start_loc: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    idx_mapping: Tensor | None = None,
) -> None:
    """Computes where in the cache each token of a batch is written.

    Slot of position p of a sequence: ``table[p // block_size] * block_size + p % block_size``.

    Args:
        query_start_loc: ``[num_seqs + 1]`` int32, starts at 0: sequence s has the tokens
            ``query_start_loc[s]`` to ``query_start_loc[s + 1]``.
        positions: ``[>= num_tokens]`` int64, position of each token in its sequence.
        block_tables: ``[num_rows, max_blocks]`` int32. Entries that no token needs are not read.
        slot_mapping: ``[>= num_tokens]`` int64.
        block_size: Tokens per block.
        idx_mapping: ``[num_seqs]`` int32, the row of ``block_tables`` of each sequence; -1 marks a
            padding sequence, whose positions are not read. None: sequence s has row s.

    Mutates:
        ``slot_mapping``, all of it: -1 for padding sequences and past the last token.

    Raises:
        RuntimeError: Shape or dtype mismatch, a position outside its row, a row out of range, a
            used table entry that is negative.

    Notes:
        Cost: O(len(slot_mapping)).

    Source:
        vLLM 0.32 v1/worker/gpu/block_table.py BlockTables.compute_slot_mappings.

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> slots = torch.empty(4, dtype=torch.int64)
        >>> ops.compute_slot_mapping(
        ...     torch.tensor([0, 2], dtype=torch.int32),
        ...     torch.tensor([15, 18]),
        ...     torch.tensor([[3, 7]], dtype=torch.int32),
        ...     slots,
        ...     block_size=16,
        ... )
        >>> slots.tolist()
        [63, 114, -1, -1]
    """
    torch.ops.paged_kv.compute_slot_mapping.default(
        query_start_loc, positions, block_tables, slot_mapping, block_size, idx_mapping
    )


def apply_block_table_writes(
    table: Tensor, rows: Tensor, starts: Tensor, cu_lens: Tensor, contents: Tensor
) -> None:
    """Applies staged changes to a block table: each puts some ids into a part of one row.

    Args:
        table: ``[max_num_reqs, max_blocks]`` int32.
        rows: ``[num_writes]`` int32, the row that is changed.
        starts: ``[num_writes]`` int32, the first column that is changed.
        cu_lens: ``[num_writes]`` int32, running sum of the lengths, the write's own included:
            write i has ``contents[cu_lens[i - 1] : cu_lens[i]]``.
        contents: ``[>= cu_lens[-1]]`` int32, block ids of all writes, one after the other.

    Mutates:
        ``table``, in the columns named. Of two writes to one place, the later wins.

    Raises:
        RuntimeError: Shape or dtype mismatch, a write that leaves the table, decreasing
            ``cu_lens``.

    Notes:
        Cost: O(ids written): a step's diffs and not whole rows.

    Source:
        vLLM 0.32 v1/worker/gpu/buffer_utils.py StagedWriteTensor.apply_write.

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> table = torch.zeros(2, 3, dtype=torch.int32)
        >>> rows, starts, cu_lens, contents = (
        ...     torch.tensor(ids, dtype=torch.int32) for ids in ([1, 0], [1, 0], [2, 3], [7, 8, 9])
        ... )
        >>> ops.apply_block_table_writes(table, rows, starts, cu_lens, contents)
        >>> table.tolist()
        [[9, 0, 0], [0, 7, 8]]
    """
    torch.ops.paged_kv.apply_block_table_writes.default(table, rows, starts, cu_lens, contents)


def gather_block_tables(
    table: Tensor, idx_mapping: Tensor, num_blocks: Tensor, out: Tensor
) -> None:
    """Gathers the rows of the requests of a batch into a table in batch order.

    Args:
        table: ``[max_num_reqs, max_blocks]`` int32.
        idx_mapping: ``[num_reqs]`` int32, the row of each request; -1 marks padding.
        num_blocks: ``[max_num_reqs]`` int32, number of valid entries in each row of ``table``.
        out: ``[>= num_reqs, any]`` int32, wide enough for every row gathered.

    Mutates:
        ``out``: of a request's row the valid entries only (what follows is stale); padding rows
        and rows from ``num_reqs`` on become 0, the null block.

    Raises:
        RuntimeError: Shape or dtype mismatch, a row out of range, a row that does not fit.

    Notes:
        Cost: O(ids gathered) and the width of each padding row.

    Source:
        vLLM 0.32 v1/worker/gpu/block_table.py BlockTables.gather_block_tables.

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> table = torch.tensor([[4, 5], [6, 7]], dtype=torch.int32)
        >>> idx_mapping = torch.tensor([1, -1], dtype=torch.int32)
        >>> num_blocks = torch.tensor([2, 1], dtype=torch.int32)
        >>> out = torch.full((3, 2), 99, dtype=torch.int32)
        >>> ops.gather_block_tables(table, idx_mapping, num_blocks, out)
        >>> out.tolist()
        [[6, 99], [0, 0], [0, 0]]
    """
    torch.ops.paged_kv.gather_block_tables.default(table, idx_mapping, num_blocks, out)
