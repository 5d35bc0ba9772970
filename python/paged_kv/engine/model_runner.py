# SPDX-License-Identifier: Apache-2.0
"""Turns a schedule into one forward pass over the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from paged_kv._core import BlockTable
from paged_kv.metadata import AttentionMetadata

if TYPE_CHECKING:
    from paged_kv.engine.cache_engine import CacheEngine
    from paged_kv.engine.scheduler import ScheduledRequest, SchedulerOutput
    from paged_kv.models import DecoderModel

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
        model: DecoderModel,
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
        hidden = self._model(
            torch.from_numpy(input_ids),
            torch.from_numpy(positions),
            self._cache_engine.kv_caches,
            metadata,
        )
        ends = metadata.query_start_loc[1:].long() - 1
        samples = torch.tensor([item.samples_token for item in output.scheduled])
        return self._model.compute_logits(hidden[ends[samples]])

    def reset(self) -> None:
        """Forget all requests."""
        self._row_of.clear()
        self._free_rows = list(range(self._max_num_seqs))[::-1]
