# SPDX-License-Identifier: Apache-2.0
"""The running requests, a row each: what a step looks at for all of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from paged_kv._core import RequestBatch
from paged_kv.block_table import BlockTables
from paged_kv.engine.request import NO_ROW

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from paged_kv._core import KVCacheManager
    from paged_kv.engine.request import Request

__all__ = ["InputBatch"]

Rows: TypeAlias = "npt.NDArray[np.int32]"

_NO_TOKEN = -1


class InputBatch:
    """A row for each running request, in arrays that scheduler, model runner and sampler share.

    A request keeps its row from `add` to `free`. All arrays are indexed by row; entries
    of rows without a request mean nothing. Counters are those of the requests themselves, kept a
    second time where a step can read and change all of them in a few vector operations.

    Args:
        kv_cache_manager: The manager of all requests.
        max_num_seqs: Number of rows.
        max_num_batched_tokens: Most tokens of a step.
        max_model_len: Most tokens of a request.
        device: Where the block tables are needed.

    Attributes:
        block_tables: Block tables of every KV cache group, on the host and on the device.
        token_ids: ``[max_num_seqs, max_model_len]`` int32, prompt and output.
        num_tokens: int64, prompt and output tokens.
        num_computed_tokens: int64, tokens whose keys and values are in the cache, or will be after
            the step that has been scheduled.
        max_num_tokens: int64, the length that ends the request.

    Source:
        vLLM 0.32 ``v1/worker/gpu_input_batch.py::InputBatch``.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        groups = kv_cache_manager.kv_cache_config.kv_cache_groups
        block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self.block_tables = BlockTables(
            block_sizes,
            max_num_seqs,
            max_num_batched_tokens,
            [-(-max_model_len // block_size) for block_size in block_sizes],
            device,
        )
        self._blocks = RequestBatch(kv_cache_manager, self.block_tables.host_tables)
        # Zero pages cost no memory before they are written.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.max_num_tokens = np.zeros(max_num_seqs, np.int64)
        # As wide as the running request with most end tokens: every step compares all of it.
        self._end_token_ids = np.full((max_num_seqs, 1), _NO_TOKEN, np.int32)
        self._num_end_token_ids = np.zeros(max_num_seqs, np.int64)
        self._requests: list[Request | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs))[::-1]

    @property
    def num_rows(self) -> int:
        """Requests that can run at once."""
        return len(self._requests)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request."""
        return self.token_ids.shape[1]

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be added."""
        return len(self._free_rows)

    def requests_of(self, rows: Rows) -> list[Request]:
        """The requests of rows that have one."""
        requests = self._requests
        return [requests[row] for row in rows.tolist()]

    def add(self, request: Request) -> None:
        """Give a request a row, with the blocks that it holds.

        Raises:
            IndexError: All rows are taken.
        """
        row = self._free_rows[-1]
        self._blocks.add(request, row)
        self._free_rows.pop()
        self._requests[row] = request
        request.row = row
        num_tokens = request.num_tokens
        self.token_ids[row, :num_tokens] = request.all_token_ids
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.max_num_tokens[row] = request.max_num_tokens
        self._set_end_token_ids(row, sorted(request.end_token_ids))

    def free(self, request: Request) -> None:
        """Give back the request's blocks and its row."""
        self._blocks.free(np.array([request.row], np.int32))
        self._requests[request.row] = None
        self._num_end_token_ids[request.row] = 0
        self._free_rows.append(request.row)
        request.row = NO_ROW

    def allocate_slots(self, rows: Rows, num_new_tokens: Rows) -> int:
        """Allocate slots for requests in this order, up to the first that gets none.

        Args:
            rows: int32 ``[n]``.
            num_new_tokens: int32 ``[n]``, at least 1 each; they count as computed from then on.

        Returns:
            How many requests were served.
        """
        refused = self._blocks.allocate_slots(rows, num_new_tokens, stop_at_refusal=True)
        num_served = int(refused[0]) if len(refused) else len(rows)
        self.num_computed_tokens[rows[:num_served]] += num_new_tokens[:num_served]
        return num_served

    def append_token_ids(self, rows: Rows, token_ids: Rows) -> npt.NDArray[np.bool_]:
        """Append one token to the request of each row.

        Args:
            rows: int32 ``[n]``.
            token_ids: int32 ``[n]``.

        Returns:
            bool ``[n]``: which requests this token ends, by what it is or by the length.
        """
        self._blocks.append_output_token_ids(rows, token_ids)
        lengths = self.num_tokens[rows]
        self.token_ids[rows, lengths] = token_ids
        lengths += 1
        self.num_tokens[rows] = lengths
        is_end: npt.NDArray[np.bool_] = (self._end_token_ids[rows] == token_ids[:, None]).any(1)
        is_end |= lengths >= self.max_num_tokens[rows]
        return is_end

    def set_num_computed_tokens(self, request: Request, num_tokens: int) -> None:
        """Change how far a running request has come."""
        request.num_computed_tokens = num_tokens
        self.num_computed_tokens[request.row] = num_tokens

    def fragmentation(self, rows: Rows, num_used_blocks: int) -> float:
        """Share of the slots of ``num_used_blocks`` blocks that hold no token.

        Args:
            rows: Of all requests that hold blocks. Blocks that are not full are never shared, so
                each empty slot belongs to one of them.
            num_used_blocks: Blocks that they hold together.
        """
        num_tokens = self.num_computed_tokens[rows].sum()
        num_empty, num_slots = 0, 0
        for table in self.block_tables.host_tables:
            num_empty += int(table.num_blocks_per_row[rows].sum()) * table.block_size - num_tokens
            num_slots = num_used_blocks * table.block_size
        return float(num_empty) / num_slots if num_slots else 0.0

    def check_integrity(self) -> None:
        """Raise InvariantError or AssertionError unless arrays and requests agree; for tests."""
        self._blocks.check_integrity()
        for row, request in enumerate(self._requests):
            if request is None:
                continue
            expected = (row, request.num_tokens, request.num_computed_tokens)
            found = (request.row, self.num_tokens[row], self.num_computed_tokens[row])
            if found != expected:
                msg = f"row {row}: expected (row, tokens, computed) {expected}, got {found}"
                raise AssertionError(msg)

    def _set_end_token_ids(self, row: int, token_ids: list[int]) -> None:
        self._num_end_token_ids[row] = len(token_ids)
        width = max(int(self._num_end_token_ids.max()), 1)
        old = self._end_token_ids
        if width != old.shape[1]:
            self._end_token_ids = np.full((len(old), width), _NO_TOKEN, np.int32)
            self._end_token_ids[:, : old.shape[1]] = old[:, :width]
        self._end_token_ids[row] = _NO_TOKEN
        self._end_token_ids[row, : len(token_ids)] = token_ids
