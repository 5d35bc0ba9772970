# SPDX-License-Identifier: Apache-2.0
"""The loop that takes requests from their prompt to their last token."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paged_kv.engine.bad_words import encode_bad_words
from paged_kv.engine.cache_engine import CacheEngine
from paged_kv.engine.completion import CompletionBuilder
from paged_kv.engine.kv_cache_manager import KVCacheManager
from paged_kv.engine.memory import bytes_per_block, default_num_blocks
from paged_kv.engine.model_runner import ModelRunner
from paged_kv.engine.request import Request, RequestStatus
from paged_kv.engine.sampler import Sampler
from paged_kv.engine.sampling_checks import check_sampling_params
from paged_kv.engine.sampling_row import SamplingRow
from paged_kv.engine.scheduler import Scheduler, SchedulerOutput
from paged_kv.engine.stats import BlockMap, EngineStats, RequestBlocks
from paged_kv.engine.token_texts import TokenTexts
from paged_kv.hashing import get_request_block_hasher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paged_kv.engine.config import EngineConfig
    from paged_kv.engine.inputs import EncodedPrompt
    from paged_kv.engine.outputs import RequestOutput
    from paged_kv.engine.sampling_params import SamplingParams
    from paged_kv.models import LoadedModel

__all__ = ["LLMEngine", "RequestUpdate"]


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one step added to one request.

    Attributes:
        request_id: Which request.
        text: New text, often empty: a token may end inside a character, and text that may become
            a stop string is held back. All pieces joined are the final text.
        token_id: The new token.
        result: The request's output once it is finished, ``None`` before.
    """

    request_id: str
    text: str
    token_id: int
    result: RequestOutput | None


class LLMEngine:
    """Continuous batching over one model and one block pool.

    Args:
        loaded: Model, its configuration and its tokenizer.
        config: Sizes and limits.

    Attributes:
        stats: Totals since the engine was made.
        max_model_len: Most tokens of a request, prompt and output together. A prompt has to be at
            least one token shorter.

    Raises:
        ValueError: ``max_model_len`` is more than the model or the pool allows.
        MemoryError: The cache cannot be allocated.

    Notes:
        One thread may use an engine at a time.

    Source:
        vLLM 0.32 ``v1/engine/llm_engine.py::LLMEngine`` (names).
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        model_config = loaded.config
        dtype = next(loaded.model.parameters()).dtype
        num_blocks = _choose_num_blocks(loaded, config, dtype)
        self.config = config
        self.vocab_size = model_config.vocab_size
        self.max_model_len = _choose_max_model_len(
            config, model_config.max_position_embeddings, num_blocks
        )
        self.cache_engine = CacheEngine(
            model_config, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype
        )
        self.kv_cache_manager = KVCacheManager(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            enable_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            self.kv_cache_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.model_runner = ModelRunner(
            loaded.model,
            self.cache_engine,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        self.stats = EngineStats()
        self._tokenizer = loaded.tokenizer
        self._token_texts = TokenTexts(loaded.tokenizer) if loaded.tokenizer is not None else None
        self._sampler = Sampler()
        # A configuration may name an id that the embedding does not have; it never comes out.
        self._eos_token_ids = frozenset(i for i in loaded.eos_token_ids if i < self.vocab_size)
        self._block_hasher = (
            get_request_block_hasher(config.block_size) if config.enable_prefix_caching else None
        )
        self._seeds = torch.Generator().manual_seed(config.seed)
        self._builders: dict[str, CompletionBuilder] = {}
        self._is_stepping = False

    def check_request(self, prompt: EncodedPrompt, sampling_params: SamplingParams) -> None:
        """Raise ``ValueError`` if the request cannot be served, whatever else is running."""
        num_tokens = len(prompt.token_ids)
        if num_tokens >= self.max_model_len:
            msg = (
                f"prompt has {num_tokens} tokens, at most {self.max_model_len - 1} fit: "
                f"{self._describe_limit()}, and at least one token is generated"
            )
            raise ValueError(msg)
        check_sampling_params(
            sampling_params, self.vocab_size, self._tokenizer, self._eos_token_ids
        )
        if sampling_params.n > 1 or sampling_params.prompt_logprobs is not None:
            msg = "the engine gives one completion a prompt (n=1) and no prompt_logprobs"
            raise ValueError(msg)

    def add_request(
        self, request_id: str, prompt: EncodedPrompt, sampling_params: SamplingParams
    ) -> None:
        """Queue a request; it holds no blocks before a step admits it.

        Raises:
            ValueError: The id is in use, or see :meth:`check_request`.
        """
        self.check_request(prompt, sampling_params)
        max_num_tokens = self.max_model_len
        if sampling_params.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, len(prompt.token_ids) + sampling_params.max_tokens)
        request = Request(
            request_id,
            prompt.token_ids,
            sampling_params,
            max_num_tokens=max_num_tokens,
            prompt=prompt.text,
            block_hasher=self._block_hasher,
            skip_reading_prefix_cache=bool(sampling_params.skip_reading_prefix_cache),
        )
        self.scheduler.add_request(request)
        self._builders[request_id] = CompletionBuilder(
            request,
            self._tokenizer,
            self._eos_token_ids,
            self._make_row(request),
            self._token_texts,
        )
        self.stats.num_requests += 1

    def step(self, on_step: Callable[[LLMEngine], None] | None = None) -> list[RequestUpdate]:
        """Run one forward pass and sample.

        Args:
            on_step: Called with the engine at the end of the step, before requests that have
                finished give back their blocks.

        Returns:
            One update for each request that got a token; none if no request is left.

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
            logits = self.model_runner.execute_model(output)
            self.scheduler.update_from_output(output)
            new_tokens = self._sample(output, logits)
            self._record_step(output, len(new_tokens), time.perf_counter() - started)
            if on_step is not None:
                on_step(self)
        except BaseException:
            self._discard_all_requests()
            raise
        finally:
            self._is_stepping = False
        return [
            self._make_update(builder, token_id, text)
            for builder, token_id, text in new_tokens
            if builder.request.request_id in self._builders  # on_step may have aborted it
        ]

    def abort_request(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests now and free their blocks; return what they had. Unknown ids are skipped."""
        outputs = []
        for request_id in list(request_ids):
            if request_id in self._builders:
                outputs.append(self._finish(request_id, RequestStatus.FINISHED_ABORTED))
        return outputs

    def has_request(self, request_id: str) -> bool:
        """Whether the request waits or runs."""
        return request_id in self._builders

    def has_unfinished_requests(self) -> bool:
        """Whether a step has work to do."""
        return self.scheduler.has_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; ``False`` and no change while a request runs."""
        return self.kv_cache_manager.reset_prefix_cache()

    def block_map(self) -> BlockMap:
        """Who holds which block now. Cost: linear in the pool."""
        manager = self.kv_cache_manager
        requests = tuple(
            RequestBlocks(
                request.request_id,
                tuple(manager.get_block_ids(request.request_id)[0]),
                request.num_computed_tokens,
            )
            for request in self.scheduler.running
        )
        return BlockMap(
            num_blocks=self.cache_engine.num_blocks,
            block_size=self.config.block_size,
            requests=requests,
            idle_cached_block_ids=manager.get_idle_cached_block_ids(),
        )

    def _sample(
        self, output: SchedulerOutput, logits: torch.Tensor
    ) -> list[tuple[CompletionBuilder, int, str]]:
        """Give each request whose last token was computed its next token and text."""
        builders = [
            self._builders[item.request.request_id]
            for item in output.scheduled
            if item.request.num_computed_tokens == item.request.num_tokens
        ]
        sampled = self._sampler.sample(logits, [builder.row for builder in builders])
        return [
            (builder, token_id, builder.append(token_id, logprobs))
            for builder, token_id, logprobs in zip(
                builders, sampled.token_ids, sampled.logprobs, strict=True
            )
        ]

    def _make_update(self, builder: CompletionBuilder, token_id: int, text: str) -> RequestUpdate:
        request_id = builder.request.request_id
        result = self._finish(request_id, builder.status) if builder.status is not None else None
        return RequestUpdate(request_id, text, token_id, result)

    def _finish(self, request_id: str, status: RequestStatus) -> RequestOutput:
        builder = self._builders.pop(request_id)
        self.scheduler.finish_requests([request_id], status)
        self.stats.num_finished_requests += 1
        return builder.result()

    def _discard_all_requests(self) -> None:
        self.stats.num_finished_requests += len(self._builders)
        self._builders.clear()
        self.scheduler.abort_all_requests()
        self.model_runner.reset()
        self.kv_cache_manager.reset_prefix_cache()

    def _record_step(self, output: SchedulerOutput, num_new_tokens: int, seconds: float) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.step_seconds += seconds
        stats.num_generated_tokens += num_new_tokens
        stats.num_preemptions += len(output.preempted_req_ids)
        for item in output.scheduled:
            if item.is_new and item.request.num_preemptions == 0:
                stats.num_prompt_tokens += item.request.num_prompt_tokens
                stats.num_cached_prompt_tokens += item.request.num_cached_tokens
        usage = self.kv_cache_manager.get_slot_usage(self.scheduler.running)
        if usage.num_used_blocks >= stats.peak_num_used_blocks:
            stats.peak_num_used_blocks = usage.num_used_blocks
            stats.peak_fragmentation = usage.fragmentation

    def _make_row(self, request: Request) -> SamplingRow:
        params = request.sampling_params
        seed = params.seed
        if seed is None:
            seed = 0
            if not params.is_greedy:
                seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
        end_token_ids = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            end_token_ids |= self._eos_token_ids
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words and self._tokenizer is not None:
            bad_words = encode_bad_words(params.bad_words, self._tokenizer, self.vocab_size)
        return SamplingRow(
            params,
            request.all_token_ids,
            request.num_prompt_tokens,
            seed=seed,
            end_token_ids=sorted(end_token_ids),
            bad_words=bad_words,
        )

    def _describe_limit(self) -> str:
        slots = self.kv_cache_manager.num_token_slots
        if slots == self.max_model_len:
            num_blocks = slots // self.config.block_size
            return f"the KV cache has {num_blocks} blocks of {self.config.block_size} tokens"
        return f"the model's length is {self.max_model_len} tokens"


def _choose_num_blocks(loaded: LoadedModel, config: EngineConfig, dtype: torch.dtype) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    max_model_len = config.max_model_len or loaded.config.max_position_embeddings
    return default_num_blocks(
        bytes_per_block(loaded.config, config.block_size, dtype),
        blocks_per_sequence=-(-max_model_len // config.block_size),
    )


def _choose_max_model_len(config: EngineConfig, model_limit: int, num_blocks: int) -> int:
    """A request of this length always fits into the pool alone: no request can block forever."""
    pool_limit = (num_blocks - 1) * config.block_size
    if config.max_model_len is None:
        return min(model_limit, pool_limit)
    if config.max_model_len > model_limit:
        msg = f"max_model_len must be at most the model's {model_limit}, got {config.max_model_len}"
        raise ValueError(msg)
    if config.max_model_len > pool_limit:
        msg = (
            f"max_model_len must be at most the {pool_limit} tokens that {num_blocks - 1} usable "
            f"blocks hold, got {config.max_model_len}: use more blocks (num_blocks)"
        )
        raise ValueError(msg)
    return config.max_model_len
