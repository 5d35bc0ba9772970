# SPDX-License-Identifier: Apache-2.0
"""The front door: a model, prompts in, text out."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from paged_kv.engine.config import EngineConfig
from paged_kv.engine.inputs import (
    ChatMessage,
    EncodedPrompt,
    PromptLike,
    encode_chat,
    encode_prompt,
    split_prompts,
)
from paged_kv.engine.llm_engine import LLMEngine
from paged_kv.engine.sampling_params import SamplingParams
from paged_kv.models import LoadedModel, load_model

if TYPE_CHECKING:
    from pathlib import Path

    from paged_kv.engine.kv_scales import KVScales
    from paged_kv.engine.outputs import RequestOutput, RequestUpdate
    from paged_kv.models import Tokenizer

__all__ = ["LLM", "ChatMessage"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LLM:
    """A model with a paged KV cache that generates text.

    Blocks of a finished request stay in the prefix cache, so later calls on the same object reuse
    equal prefixes.

    Args:
        model: What :func:`paged_kv.models.load_model` takes (a folder, a GGUF file, a hub id or a
            known name), or a model that it has loaded.
        dtype: ``"float32"`` or ``"bfloat16"``: type of weights and cache. Not used for a model
            that is loaded already.
        block_size: Tokens per KV block.
        num_blocks: Blocks in the pool, the null block included; ``None``: from free memory.
        enable_prefix_caching: Reuse the blocks of equal prefixes.
        max_num_seqs: Most requests that run at once.
        max_num_batched_tokens: Most tokens in one forward pass, at least ``max_num_seqs``.
        max_model_len: Most tokens of a request, prompt and output together. A prompt has to be at
            least one token shorter; a longer output is cut with ``finish_reason="length"``.
            ``None``: the model's own limit, or what the pool holds if that is less.
        seed: Seeds of requests that give none are drawn from this one.
        kv_scales: Scales of a quantised cache, see
            :func:`~paged_kv.engine.kv_scales.calibrate_kv_scales`. ``None``: found by a pass over
            random tokens.
        options: Any other field of :class:`~paged_kv.engine.config.EngineConfig`, such as
            ``device``, ``kv_cache_dtype``, ``scheduling_policy`` or ``preemption_mode``. A model
            that is loaded already is moved to the device.

    Attributes:
        engine: The loop behind :meth:`generate`, to drive step by step.
        tokenizer: The model's tokenizer, ``None`` if it has none.

    Raises:
        ValueError: A size out of range, or a model that cannot be loaded.
        OSError: A file that cannot be read.
        ImportError: A library is missing that this kind of model needs.
        MemoryError: The cache cannot be allocated.

    Source:
        vLLM 0.32 ``vllm/entrypoints/llm.py::LLM`` (names and shapes).

    Example:
        >>> from paged_kv import LLM, SamplingParams
        >>> llm = LLM("smollm2-135m", num_blocks=64)
        >>> params = SamplingParams(temperature=0.0, max_tokens=2)
        >>> llm.generate("The capital of France is", params)[0].outputs[0].text
        ' Paris.'
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        dtype: str | torch.dtype = "float32",
        block_size: int = 16,
        num_blocks: int | None = None,
        enable_prefix_caching: bool = True,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        seed: int = 0,
        kv_scales: KVScales | None = None,
        **options: Any,  # noqa: ANN401  (EngineConfig checks them)
    ) -> None:
        # Sizes are checked before anything is loaded.
        config = EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            seed=seed,
            **options,
        )
        torch_dtype = _parse_dtype(dtype)
        loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=torch_dtype)
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.engine = LLMEngine(loaded, config, kv_scales=kv_scales)
        self._request_ids = map(str, itertools.count())
        # Where the iterator of each running request finds what it has not given out yet.
        self._inboxes: dict[str, deque[RequestUpdate]] = {}

    def generate(
        self,
        prompts: PromptLike | EncodedPrompt | Sequence[PromptLike | EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[LLMEngine], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate a completion for each prompt.

        Args:
            prompts: A string, a list of token ids, ``{"prompt": ...}``,
                ``{"prompt_token_ids": ...}``, or a list of these.
            sampling_params: One for all prompts or one for each; default ``SamplingParams()``.
            on_step: Called with the engine after every step, e.g. to show progress from
                ``engine.stats``. An exception from it ends the call.

        Returns:
            One output for each prompt, in the order of the prompts.

        Raises:
            ValueError: A prompt that is empty, too long or has ids outside the vocabulary, or
                wrong parameters. Nothing was allocated and no other prompt has run.
            TypeError: Something that is no prompt.
        """
        updates = self.stream(prompts, sampling_params, on_step=on_step)
        results = [update.result for update in updates if update.result is not None]
        # Ids count up in the order of the prompts.
        return sorted(results, key=lambda result: int(result.request_id))

    def stream(
        self,
        prompts: PromptLike | EncodedPrompt | Sequence[PromptLike | EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[LLMEngine], None] | None = None,
    ) -> Iterator[RequestUpdate]:
        """Like :meth:`generate`, but give out each token as soon as it is there.

        Prompts are checked at once, the model runs as the iterator advances. Closing the iterator
        early aborts what is left and frees its blocks. Several iterators of one object may be
        advanced in turn, in one thread: their requests share steps.

        Returns:
            An iterator of updates; the last one of each request carries its
            :class:`~paged_kv.engine.outputs.RequestOutput`.

        Raises:
            ValueError: As :meth:`generate`.
            TypeError: As :meth:`generate`.
        """
        return self._run(self._check_requests(prompts, sampling_params), on_step)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[LLMEngine], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of conversations.

        Args:
            messages: ``[{"role": "user", "content": "Hello"}]``, or a list of such lists.
            sampling_params: As in :meth:`generate`.
            on_step: As in :meth:`generate`.

        Returns:
            One output for each conversation; ``prompt`` is the templated text.

        Raises:
            ValueError: The model has no tokenizer or no chat template, or as :meth:`generate`.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        encoded = [self.encode_chat(cast("Sequence[ChatMessage]", c)) for c in conversations]
        return self.generate(encoded, sampling_params, on_step=on_step)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> EncodedPrompt:
        """Turn one conversation into a prompt for :meth:`generate` or :meth:`stream`.

        Args:
            messages: The turns, oldest first; the model's turn is next.

        Raises:
            ValueError: The model has no tokenizer or no chat template, or refuses the messages.
        """
        return encode_chat(messages, self.tokenizer, self.engine.vocab_size)

    def _check_requests(
        self,
        prompts: PromptLike | EncodedPrompt | Sequence[PromptLike | EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[EncodedPrompt, SamplingParams]]:
        encoded = [
            encode_prompt(prompt, self.tokenizer, self.engine.vocab_size)
            for prompt in split_prompts(prompts)
        ]
        requests = list(zip(encoded, _one_for_each(sampling_params, len(encoded)), strict=True))
        for prompt, params in requests:
            self.engine.check_request(prompt, params)
        return requests

    def _run(
        self,
        requests: list[tuple[EncodedPrompt, SamplingParams]],
        on_step: Callable[[LLMEngine], None] | None,
    ) -> Iterator[RequestUpdate]:
        # Queued here and not by the caller: an iterator that is never advanced leaves no trace.
        remaining: set[str] = set()
        inbox: deque[RequestUpdate] = deque()
        try:
            for prompt, params in requests:
                request_id = next(self._request_ids)
                self.engine.add_request(request_id, prompt, params)
                remaining.add(request_id)
                self._inboxes[request_id] = inbox
            while remaining:
                if not inbox:
                    self._step(remaining, on_step)
                while inbox:
                    update = inbox.popleft()
                    if update.result is not None:
                        remaining.discard(update.request_id)
                        del self._inboxes[update.request_id]
                    yield update
        finally:
            self.engine.abort_request(remaining)
            for request_id in remaining:
                self._inboxes.pop(request_id, None)

    def _step(self, request_ids: set[str], on_step: Callable[[LLMEngine], None] | None) -> None:
        """Run one step for these requests; it advances those of other iterators too."""
        gone = [i for i in request_ids if not self.engine.has_request(i)]
        if gone:
            msg = f"request {min(gone, key=int)} was aborted, or a step of another call failed"
            raise RuntimeError(msg)
        for update in self.engine.step(on_step):
            # A request that was added to the engine directly has no inbox.
            if update.request_id in self._inboxes:
                self._inboxes[update.request_id].append(update)


def _one_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if len(sampling_params) != num_prompts:
        msg = f"{num_prompts} prompts need as many sampling_params, got {len(sampling_params)}"
        raise ValueError(msg)
    return list(sampling_params)


def _parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    parsed = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if parsed is None or parsed not in _DTYPES.values():
        msg = f"dtype must be one of {', '.join(_DTYPES)}, got {dtype}"
        raise ValueError(msg)
    return parsed
