# SPDX-License-Identifier: Apache-2.0
"""The loop that takes requests from their prompt to their last token."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from paged_kv._core import KVCacheManager
from paged_kv.engine.cache_engine import CacheEngine, check_kv_scales
from paged_kv.engine.input_batch import InputBatch
from paged_kv.engine.kv_scales import choose_kv_scales
from paged_kv.engine.memory import check_model_limit, plan_kv_cache
from paged_kv.engine.memory_profile import choose_kv_cache_bytes
from paged_kv.engine.model_runner import ModelRunner
from paged_kv.engine.outputs import RequestUpdate
from paged_kv.engine.request import Request, RequestStatus
from paged_kv.engine.request_factory import RequestFactory
from paged_kv.engine.sampler import SampledTokens, Sampler
from paged_kv.engine.scheduler import Scheduler
from paged_kv.engine.scheduler_config import SchedulerConfig
from paged_kv.engine.stats import BlockMap, EngineStats, RequestBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from paged_kv.engine.completion import CompletionBuilder, RequestState
    from paged_kv.engine.config import EngineConfig
    from paged_kv.engine.inputs import EncodedPrompt
    from paged_kv.engine.kv_scales import KVScales
    from paged_kv.engine.outputs import RequestOutput
    from paged_kv.engine.sampling_params import SamplingParams
    from paged_kv.engine.scheduler_output import SchedulerOutput
    from paged_kv.models import LoadedModel

__all__ = ["LLMEngine"]

# Rows of logits that are held at once for the log probabilities of a prompt.
_LOGPROB_ROWS = 256


class LLMEngine:
    """Continuous batching over one model and one block pool.

    Args:
        loaded: Model, its configuration and its tokenizer.
        config: Sizes and limits.
        kv_scales: For layers of a quantised cache, by name: ``(k_scale, v_scale)``; others have 1.
            ``None``: found by a pass over random tokens
            (:func:`~paged_kv.engine.kv_scales.calibrate_kv_scales`).

    Attributes:
        stats: Totals since the engine was made.
        max_model_len: Most tokens of a request, prompt and output together. A prompt has to be at
            least one token shorter.

    Raises:
        ValueError: ``max_model_len`` is more than the model or the pool allows, or, without chunked
            prefill, than ``max_num_batched_tokens``; ``kv_scales`` that do not fit.
        MemoryError: The cache cannot be allocated.

    Notes:
        One thread may use an engine at a time.

    Source:
        vLLM 0.32 ``v1/engine/llm_engine.py::LLMEngine`` (names).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        kv_scales: KVScales | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = loaded.config.vocab_size
        self._model_limit = loaded.config.max_position_embeddings
        dtype = loaded.model.dtype
        specs = loaded.model.kv_cache_specs(config.block_size, dtype, config.kv_cache_dtype)
        # Mistakes are told before what takes seconds: copying weights, a step to measure.
        check_model_limit(config.max_model_len, self._model_limit)
        check_kv_scales(kv_scales, specs, config.kv_cache_dtype)
        device = torch.device(config.device)
        loaded.model.to(device)
        loaded.model.prepare_weights(batch_invariant=config.batch_invariant)
        plan = plan_kv_cache(
            specs,
            num_blocks=config.num_blocks,
            num_bytes=choose_kv_cache_bytes(loaded, config),
            max_model_len=config.max_model_len,
            model_limit=self._model_limit,
            max_num_batched_tokens=config.max_num_batched_tokens,
            device=device,
        )
        self.max_model_len = plan.max_model_len
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < self.max_model_len:
            msg = f"max_num_batched_tokens is {config.max_num_batched_tokens}: without chunked "
            msg += f"prefill it must be at least max_model_len, here {self.max_model_len}"
            raise ValueError(msg)
        num_swap_blocks = config.usable_swap_space_bytes // plan.block_bytes
        self.cache_engine = CacheEngine(
            plan.kv_cache_config,
            kv_cache_dtype=config.kv_cache_dtype,
            kv_scales=choose_kv_scales(loaded, config, kv_scales),
            num_swap_blocks=num_swap_blocks,
            device=device,
            touch=config.has_cache_size,
        )
        self.kv_cache_manager = KVCacheManager(
            plan.kv_cache_config,
            max_model_len=plan.max_model_len,
            scheduler_block_size=plan.scheduler_block_size,
            hash_block_size=plan.hash_block_size,
            max_in_flight_tokens=config.max_num_batched_tokens,
            enable_caching=config.enable_prefix_caching,
            watermark=config.watermark,
        )
        self._batch = InputBatch(
            self.kv_cache_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            device=device,
        )
        self.scheduler = Scheduler(
            self.kv_cache_manager,
            self._batch,
            SchedulerConfig(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                policy=config.scheduling_policy,
                enable_chunked_prefill=config.enable_chunked_prefill,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                num_swap_blocks=num_swap_blocks,
            ),
        )
        self.model_runner = ModelRunner(
            loaded.model,
            list(specs),
            plan.kv_cache_config,
            self.cache_engine,
            self._batch,
            config,
        )
        self.stats = EngineStats()
        self._sampler = Sampler()
        self._factory = RequestFactory(
            loaded,
            max_model_len=self.max_model_len,
            hash_block_size=plan.hash_block_size if config.enable_prefix_caching else None,
            seed=config.seed,
        )
        self._states: dict[str, RequestState] = {}  # by the caller's id
        self._builders: dict[Request, tuple[RequestState, CompletionBuilder]] = {}
        self._sequence_ids: set[str] = set()
        self._num_prompt_logprobs = 0  # requests that ask for them
        self._is_stepping = False

    # ---- requests

    def check_request(self, prompt: EncodedPrompt, sampling_params: SamplingParams) -> None:
        """Raise ``ValueError`` if the request cannot be served, whatever else is running."""
        num_tokens = len(prompt.token_ids)
        if num_tokens >= self.max_model_len:
            msg = (
                f"prompt has {num_tokens} tokens, at most {self.max_model_len - 1} fit: "
                f"{self._describe_limit()}, and at least one token is generated"
            )
            raise ValueError(msg)
        self._factory.check(prompt.token_ids, sampling_params)

    def add_request(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request; it holds no blocks before a step admits it.

        Args:
            request_id: Names the request in updates and results.
            prompt: Text and token ids.
            sampling_params: How to sample; ``n`` completions share the prompt's blocks.
            priority: Lower is served sooner, with ``scheduling_policy="priority"``.
            arrival_time: Seconds; decides among equal priorities. ``None``: now.

        Raises:
            ValueError: The id is in use, or see :meth:`check_request`.
        """
        self.check_request(prompt, sampling_params)
        state = self._factory.make(request_id, prompt, sampling_params, priority, arrival_time)
        requests = [builder.request for builder in state.builders]
        for request in requests:
            if request.request_id in self._sequence_ids:
                msg = f"request id {request.request_id!r} is in use"
                raise ValueError(msg)
        self.scheduler.add_request(requests[0], requests[1:])
        self._sequence_ids.update(request.request_id for request in requests)
        self._states[request_id] = state
        self._builders.update((builder.request, (state, builder)) for builder in state.builders)
        self._num_prompt_logprobs += state.prompt_logprobs is not None
        self.stats.num_requests += 1

    def abort_request(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests now and free their blocks; return what they had. Unknown ids are skipped."""
        outputs = []
        for request_id in list(request_ids):
            state = self._states.get(request_id)
            if state is None:
                continue
            ids = [builder.request.request_id for builder in state.builders]
            self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
            outputs.append(self._finish(state))
        return outputs

    def has_request(self, request_id: str) -> bool:
        """Whether the request waits or runs."""
        return request_id in self._states

    def get_output(self, request_id: str) -> RequestOutput:
        """What a request that waits or runs has so far. Cost: linear in its tokens."""
        return self._states[request_id].result()

    def has_unfinished_requests(self) -> bool:
        """Whether a step has work to do."""
        return self.scheduler.has_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; ``False`` and no change while a request runs."""
        return self.scheduler.reset_prefix_cache()

    # ---- steps

    def step(self, on_step: Callable[[LLMEngine], None] | None = None) -> list[RequestUpdate]:
        """Run one forward pass and sample.

        Args:
            on_step: Called with the engine at the end of the step, before requests that have
                finished give back their blocks.

        Returns:
            One update for each completion that got a token; none if no request is left.

        Raises:
            RuntimeError: A step is running: this call comes from ``on_step`` or another thread.
                Nothing has changed.
            BaseException: Whatever the model or ``on_step`` raises. All requests are aborted
                then, no block stays allocated, and the prefix cache is emptied, since blocks may
                be findable whose content was never computed.
        """
        if self._is_stepping:
            msg = "a step of this engine is running: on_step or another thread cannot start one"
            raise RuntimeError(msg)
        if not self.scheduler.has_unfinished_requests():
            return []
        self._is_stepping = True
        started = time.perf_counter()
        try:
            output = self.scheduler.schedule()
            all_tokens = self._num_prompt_logprobs > 0
            hidden = self.model_runner.execute_model(output, last_tokens_only=not all_tokens)
            self._add_prompt_logprobs(output, hidden)
            sampled = self._sample(output, hidden)
            self._record_step(output, len(sampled.token_ids), time.perf_counter() - started)
            if on_step is not None:
                on_step(self)
            return self._update(output, sampled)
        except BaseException:
            self._discard_all_requests()
            raise
        finally:
            self._is_stepping = False

    def block_map(self) -> BlockMap:
        """Who holds which block now. Cost: linear in the pool."""
        requests = tuple(
            RequestBlocks(
                request.request_id,
                tuple(map(tuple, self.kv_cache_manager.get_block_ids(request.request_id))),
                request.num_computed_tokens,
            )
            for request in self.scheduler.running
        )
        pool = self.kv_cache_manager.block_pool
        return BlockMap(
            num_blocks=self.cache_engine.num_blocks,
            block_size=self.config.block_size,
            requests=requests,
            idle_cached_block_ids=frozenset(
                block.block_id
                for block in pool.blocks
                if block.ref_cnt == 0 and block.block_hash is not None
            ),
        )

    def _sample(self, output: SchedulerOutput, hidden: Tensor) -> SampledTokens:
        """Choose a token for each sequence whose last token was computed, forks included."""
        if not output.samples.any():
            return SampledTokens([], [])
        # Rows are those of all tokens, or of the last one of each request.
        has_all = len(hidden) == output.total_num_scheduled_tokens
        counts = output.num_scheduled_tokens if has_all else np.ones_like(output.rows)
        last = torch.from_numpy(np.cumsum(counts)[output.samples] - 1).to(hidden.device)
        logits = self.model_runner.compute_logits(hidden[last])
        forks, copies = self.scheduler.fork_requests(output)
        self.cache_engine.copy_blocks(copies)
        if forks:
            logits = torch.cat([logits, logits[[place for _, place in forks]]])
        rows = [self._builders[request][1].row for request in output.sampling_requests()]
        return self._sampler.sample(logits, rows)

    def _update(self, output: SchedulerOutput, sampled: SampledTokens) -> list[RequestUpdate]:
        """Give the tokens to their requests, and take out those that have finished."""
        requests = output.sampling_requests()
        self.scheduler.update_from_output(output, np.array(sampled.token_ids, np.int32))
        updates = []
        tokens = zip(requests, sampled.token_ids, sampled.logprobs, strict=True)
        for request, token_id, logprobs in tokens:
            if request not in self._builders:
                continue  # on_step has aborted it
            state, builder = self._builders[request]
            text = builder.append(token_id, logprobs)
            result = None
            if builder.is_finished:
                # One that a token has ended is out already.
                self.scheduler.finish_requests([request.request_id], request.status)
                result = self._finish(state) if state.is_complete else None
            updates.append(RequestUpdate(state.request_id, request.index, text, token_id, result))
        return updates

    def _add_prompt_logprobs(self, output: SchedulerOutput, hidden: Tensor) -> None:
        """Keep what a step has computed of prompts whose log probabilities are asked for."""
        if not self._num_prompt_logprobs:
            return
        ends = np.cumsum(output.num_scheduled_tokens)
        for i, request in enumerate(output.requests):
            logprobs = self._builders[request][0].prompt_logprobs
            if logprobs is None or logprobs.is_complete or request.index > 0:
                continue
            # Some positions may be known already, from before the request was preempted.
            num_known = max(logprobs.next_position - int(output.num_computed_tokens[i]), 0)
            begin = ends[i] - output.num_scheduled_tokens[i] + num_known
            end = min(ends[i], begin + logprobs.num_missing_rows)
            for rows in torch.split(hidden[begin:end], _LOGPROB_ROWS):
                if len(rows):
                    logprobs.append(logprobs.next_position, self.model_runner.compute_logits(rows))

    def _finish(self, state: RequestState) -> RequestOutput:
        del self._states[state.request_id]
        self._num_prompt_logprobs -= state.prompt_logprobs is not None
        for builder in state.builders:
            del self._builders[builder.request]
            self._sequence_ids.discard(builder.request.request_id)
        self.stats.num_finished_requests += 1
        return state.result()

    def _discard_all_requests(self) -> None:
        self.stats.num_finished_requests += len(self._states)
        self._states.clear()
        self._num_prompt_logprobs = 0
        self._builders.clear()
        self._sequence_ids.clear()
        self.scheduler.abort_all_requests()
        self.kv_cache_manager.reset_prefix_cache()

    def _record_step(self, output: SchedulerOutput, num_new_tokens: int, seconds: float) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.step_seconds += seconds
        stats.num_generated_tokens += num_new_tokens
        stats.num_preemptions += len(output.preempted)
        for request in output.admitted:
            if request.num_preemptions == 0 and request.index == 0:
                stats.num_prompt_tokens += request.num_prompt_tokens
                stats.num_cached_prompt_tokens += request.num_cached_tokens
        num_used_blocks = self.cache_engine.num_blocks - 1
        num_used_blocks -= self.kv_cache_manager.block_pool.get_num_free_blocks()
        if num_used_blocks >= stats.peak_num_used_blocks:
            stats.peak_num_used_blocks = num_used_blocks
            stats.peak_fragmentation = self._batch.fragmentation(
                self.scheduler.running_rows(), num_used_blocks
            )

    def _describe_limit(self) -> str:
        if self.max_model_len == self.config.max_model_len:
            return f"max_model_len is {self.max_model_len}"
        if self.max_model_len == self._model_limit:
            return f"the model's length is {self.max_model_len} tokens"
        num_blocks = self.cache_engine.num_blocks - 1
        return f"the KV cache has {num_blocks} blocks of {self.config.block_size} tokens"
