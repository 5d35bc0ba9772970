# SPDX-License-Identifier: Apache-2.0
"""Turns a schedule into one forward pass over the model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from paged_kv.engine.decode_graphs import DecodeGraphs
from paged_kv.engine.decode_recordings import MAX_RECORDED_SIZE, DecodeRecordings
from paged_kv.engine.forward_pass import ForwardPass
from paged_kv.engine.step_inputs import StepArrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paged_kv._core import KVCacheConfig
    from paged_kv.engine.cache_engine import CacheEngine
    from paged_kv.engine.config import EngineConfig
    from paged_kv.engine.input_batch import InputBatch
    from paged_kv.engine.scheduler_output import SchedulerOutput
    from paged_kv.models import DecoderForCausalLM

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs the model over the tokens of a step.

    Prefill, chunks of it and decode go through the same pass: the tokens of all requests are laid
    end to end, and the metadata says where each request begins and where its keys and values are,
    for each KV cache group.

    Args:
        model: The decoder.
        layer_names: Its layers, in order.
        kv_cache_config: The same by KV cache group.
        cache_engine: Its key and value caches, written in each pass.
        batch: Tokens and block tables of the running requests.
        config: Where these are (``device``); ``batch_invariant``, which is set before each pass, as
            engines may share a model; and how passes in which each request has one token are
            repeated: `DecodeGraphs`, captured here, two passes a size, or `DecodeRecordings`.

    Source:
        vLLM 0.32 ``v1/worker/gpu_model_runner.py::GPUModelRunner`` (names).
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        layer_names: Sequence[str],
        kv_cache_config: KVCacheConfig,
        cache_engine: CacheEngine,
        batch: InputBatch,
        config: EngineConfig,
    ) -> None:
        self._model = model
        self._device = torch.device(config.device)
        self._batch_invariant = config.batch_invariant
        self._cache_engine = cache_engine
        self._batch = batch
        self._forward = ForwardPass(
            model, layer_names, kv_cache_config, cache_engine.kv_caches, batch.block_tables
        )
        # Nothing that is repeated may depend on the lengths of one step.
        self._forward_decode = partial(
            self._forward, max_query_len=1, max_seq_len=batch.max_model_len
        )
        self._decode_steps: DecodeGraphs | DecodeRecordings | None = None
        self._captured_weights: list[Tensor] = []
        if config.decode_graph_sizes:
            self._capture_decode_steps(config.decode_graph_sizes)
        elif config.records_decode_steps:
            hidden = self._make_hidden(min(config.max_num_seqs, MAX_RECORDED_SIZE))
            self._decode_steps = DecodeRecordings(self._forward_decode, hidden)

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput, *, last_tokens_only: bool = False) -> Tensor:
        """Make the step's copies of blocks, and compute its tokens.

        Args:
            output: The step's work.
            last_tokens_only: Whether only the last token of each request is asked for: the last
                layer computes little else of the others than keys and values.

        Returns:
            ``[num_tokens, hidden_size]``, the hidden state of each token, request after request, or
            ``[num_requests, hidden_size]`` with `last_tokens_only` (the same where each request has
            one token); no row if the step has no tokens. The next call may overwrite it.
        """
        self._cache_engine.swap_out(output.blocks_to_swap_out)
        self._cache_engine.swap_in(output.blocks_to_swap_in)
        if not output.requests:
            return torch.empty(0, self._model.config.hidden_size, device=self._device)
        self._set_batch_invariant()
        self._batch.block_tables.apply_staged_writes()
        step = self._lay_out_tokens(output)
        if self._decode_steps is not None and self._decode_steps.fits(step):
            return self._decode_steps.run(step)
        return self._forward(
            step.to_device(self._device),
            max_query_len=int(output.num_scheduled_tokens.max()),
            max_seq_len=int(step.seq_lens.max()),
            last_tokens_only=last_tokens_only and not step.is_decode(),
        )

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Score every token of the vocabulary: ``[n, hidden_size]`` to ``[n, vocab_size]``."""
        return self._model.compute_logits(hidden)

    @torch.inference_mode()
    def _capture_decode_steps(self, sizes: Sequence[int]) -> None:
        weights = [*self._model.parameters(), *self._model.buffers()]
        # A graph reads them where they are now: that memory is theirs even if the model is moved.
        self._captured_weights = [weight.detach() for weight in weights]
        self._set_batch_invariant()
        self._decode_steps = DecodeGraphs(self._forward_decode, sizes, self._make_hidden(sizes[-1]))

    def _make_hidden(self, num_seqs: int) -> Tensor:
        shape = (num_seqs, self._model.config.hidden_size)
        return torch.zeros(shape, dtype=self._model.dtype, device=self._device)

    def _set_batch_invariant(self) -> None:
        if self._model.batch_invariant != self._batch_invariant:
            self._model.set_batch_invariant(self._batch_invariant)

    def _lay_out_tokens(self, output: SchedulerOutput) -> StepArrays:
        """The step's tokens, and where each request begins."""
        rows, counts = output.rows, output.num_scheduled_tokens
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        positions = output.num_computed_tokens
        if query_start_loc[-1] != len(rows):  # not one token each
            offsets = output.num_computed_tokens - query_start_loc[:-1]
            rows = np.repeat(rows, counts)
            positions = np.arange(len(rows)) + np.repeat(offsets, counts)
        input_ids = self._batch.token_ids[rows, positions].astype(np.int64)
        seq_lens = (output.num_computed_tokens + counts).astype(np.int32)
        return StepArrays(input_ids, positions, query_start_loc, output.rows, seq_lens)
