# SPDX-License-Identifier: Apache-2.0
"""What one forward pass needs to know about the batch to find its keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

__all__ = ["AttentionMetadata"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Where a batch's tokens lie in the paged cache.

    One batch may mix prefill, chunked prefill and decode: sequence ``i`` owns the query tokens
    ``query_start_loc[i]:query_start_loc[i + 1]`` of the flat token dimension.

    Attributes:
        query_start_loc: ``[num_seqs + 1]`` int32, first query token of each sequence, then the
            total.
        seq_lens: ``[num_seqs]`` int32, tokens of each sequence in the cache once this step's are
            written.
        block_tables: ``[num_seqs, max_blocks]`` int32, block ids. Entries past a sequence's blocks
            are never used.
        slot_mapping: ``[num_tokens]`` int64, the slot each token is written to
            (``block_id * block_size + offset``); a negative slot is skipped.
        max_query_len: the longest query of the batch, in tokens.
        max_seq_len: the longest sequence of the batch, in tokens.

    Source:
        vLLM 0.32 v1/attention/backend.py::CommonAttentionMetadata (the same field names).
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int

    @property
    def last_tokens(self) -> torch.Tensor:
        """``[num_seqs]`` int64, where the last query token of each sequence is.

        A sequence without any has no such place: its number is of no use.
        """
        return (self.query_start_loc[1:] - 1).long()

    def of_last_tokens(self) -> AttentionMetadata:
        """The same sequences with a query of one token each, their last, to attend from.

        Keys are as before, and `slot_mapping` still is that of all tokens.
        """
        one_each = torch.arange(
            len(self.query_start_loc), dtype=torch.int32, device=self.query_start_loc.device
        )
        return replace(self, query_start_loc=one_each, max_query_len=1)
