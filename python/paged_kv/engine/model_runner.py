# SPDX-License-Identifier: Apache-2.0
"""Turns a schedule into one forward pass over the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged_kv._core import BlockTable
from paged_kv.metadata import AttentionMetadata

if TYPE_CHECKING:
    from paged_kv.engine.cache_engine import CacheEngine
    from paged_kv.engine.scheduler import ScheduledRequest, SchedulerOutput
    from paged_kv.models import DecoderForCausalLM

__all__ = ["ModelRunner"]


class ModelRunner:
    """Keeps the block table of each running request and runs the model over a batch.

    Prefill, chunks of it and decode go through the same pass: the tokens of all requests are laid
    end to end, and the metadata says where each request begins and where its keys and values are.

    Args:
        model: The decoder.
        cache_engine: Its key and value caches, written in each pass.
        max_num_seqs: Most requests in a pass.
        max_num_batched_tokens: Most tokens in a pass.
        max_model_len: Most tokens of a request; sets the width of the block table.

    Source:
        vLLM 0.32 ``v1/worker/gpu_model_runner.py::GPUModelRunner`` (names).
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        cache_engine: CacheEngine,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._cache_engine = cache_engine
        self._max_num_seqs = max_num_seqs
        block_size = cache_engine.block_size
        self._block_table = BlockTable(
            block_size, max_num_seqs, -(-max_model_len // block_size), max_num_batched_tokens
        )
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))[::-1]

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> torch.Tensor:
        """Compute the scheduled tokens.

        Args:
            output: The step's work; block tables are brought up to date from it first.

        Returns:
            ``[num_sampling, vocab_size]`` logits of the last token of each request that samples,
            in the order of ``output.scheduled``.
        """
        self._update_block_table(output)
        input_ids, positions = _flatten_tokens(output.scheduled)
        metadata = self._build_metadata(output.scheduled, positions)
        kv_caches = self._cache_engine.kv_caches
        hidden = self._model(input_ids, positions, kv_caches, [metadata] * len(kv_caches))
        samples = torch.tensor([item.samples_token for item in output.scheduled], dtype=torch.bool)
        last_tokens = metadata.query_start_loc[1:][samples] - 1
        return self._model.compute_logits(hidden[last_tokens])

    def reset(self) -> None:
        """Forget all requests."""
        self._row_of.clear()
        self._free_rows = list(range(self._max_num_seqs))[::-1]

    def _update_block_table(self, output: SchedulerOutput) -> None:
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            # A request may end before it was ever scheduled.
            row = self._row_of.pop(request_id, None)
            if row is not None:
                self._free_rows.append(row)
        for item in output.scheduled:
            request_id = item.request.request_id
            if item.is_new:
                row = self._row_of[request_id] = self._free_rows.pop()
                self._block_table.add_row(item.new_block_ids, row)
            elif item.new_block_ids:
                self._block_table.append_row(item.new_block_ids, self._row_of[request_id])

    def _build_metadata(
        self, scheduled: list[ScheduledRequest], positions: torch.Tensor
    ) -> AttentionMetadata:
        query_lens = [item.num_scheduled_tokens for item in scheduled]
        seq_lens = [
            item.request.num_computed_tokens + n
            for item, n in zip(scheduled, query_lens, strict=True)
        ]
        query_start_loc = torch.zeros(len(scheduled) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(query_lens), 0, out=query_start_loc[1:])

        block_size = self._cache_engine.block_size
        max_blocks = -(-max(seq_lens) // block_size)
        rows = [self._row_of[item.request.request_id] for item in scheduled]
        block_tables = torch.from_numpy(self._block_table.get_numpy_array()[rows, :max_blocks])
        slot_mapping = torch.empty(len(positions), dtype=torch.int64)
        torch.ops.paged_kv.compute_slot_mapping(
            query_start_loc, positions, block_tables, slot_mapping, block_size
        )
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )


def _flatten_tokens(scheduled: list[ScheduledRequest]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions of the scheduled tokens of all requests, end to end."""
    input_ids: list[int] = []
    positions: list[int] = []
    for item in scheduled:
        start = item.request.num_computed_tokens
        end = start + item.num_scheduled_tokens
        input_ids.extend(item.request.all_token_ids[start:end])
        positions.extend(range(start, end))
    return torch.tensor(input_ids), torch.tensor(positions)
