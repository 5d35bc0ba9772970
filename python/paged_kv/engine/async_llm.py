# SPDX-License-Identifier: Apache-2.0
"""The front door for asyncio: many callers, one engine."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING, Any, cast

from paged_kv.engine.engine_thread import Call, EngineThread
from paged_kv.engine.errors import EngineDeadError
from paged_kv.engine.inputs import encode_prompt
from paged_kv.engine.llm import LLM
from paged_kv.engine.outputs import RequestOutput
from paged_kv.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from paged_kv.engine.inputs import EncodedPrompt, PromptLike
    from paged_kv.engine.llm import ChatMessage
    from paged_kv.engine.outputs import RequestUpdate
    from paged_kv.engine.stats import EngineStats
    from paged_kv.models import LoadedModel, Tokenizer

__all__ = ["AsyncLLM"]


class AsyncLLM:
    """:class:`~paged_kv.engine.llm.LLM` for many concurrent callers in asyncio.

    One background thread steps the engine while a request runs and sleeps while none does. Callers
    of any event loop share its steps and its prefix cache; no event loop waits for a step.

    - **Leaving early** aborts: a cancelled task, ``break`` out of the loop or ``aclose()``; blocks
      are free once the step that is running has ended.
    - **A slow caller** never holds up the others: the engine does not wait for it.
      :meth:`generate` then gives it fewer and longer snapshots, at most one is kept;
      :meth:`stream` keeps every update, as many as tokens the request generates.
    - **A step that fails** raises :class:`~paged_kv.engine.errors.EngineGenerateError`, caused by
      its error, to every caller that waits; the engine goes on.

    Args:
        model: As for :class:`~paged_kv.engine.llm.LLM`.
        options: As for :class:`~paged_kv.engine.llm.LLM`.

    Attributes:
        tokenizer: The model's tokenizer, ``None`` if it has none.
        max_model_len: Most tokens of a request, prompt and output together.

    Raises:
        ValueError: As :class:`~paged_kv.engine.llm.LLM`, and so are the others.
        TypeError: A wrong option.
        OSError: A file that cannot be read.
        ImportError: A library is missing that this kind of model needs.
        MemoryError: The cache cannot be allocated.

    Source:
        vLLM 0.32 ``v1/engine/async_llm.py::AsyncLLM`` (names).

    Example:
        >>> import asyncio
        >>> from paged_kv import SamplingParams
        >>> async def complete(llm, prompt):
        ...     async for output in llm.generate(prompt, SamplingParams(max_tokens=2, seed=0)):
        ...         pass
        ...     return output.outputs[0]
        >>> async def main():
        ...     async with AsyncLLM("smollm2-135m", num_blocks=64) as llm:
        ...         return await asyncio.gather(*(complete(llm, p) for p in ("One", "Two")))
        >>> [len(completion.token_ids) for completion in asyncio.run(main())]
        [2, 2]
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        **options: Any,  # noqa: ANN401  (LLM checks them)
    ) -> None:
        self._llm = LLM(model, **options)
        self.tokenizer: Tokenizer | None = self._llm.tokenizer
        self.max_model_len = self._llm.engine.max_model_len
        self._thread = EngineThread(self._llm.engine)
        # Not joined here: this may run inside of the garbage collector.
        weakref.finalize(self, self._thread.stop)
        self._numbers = itertools.count()

    @property
    def stats(self) -> EngineStats:
        """A copy of the engine's totals."""
        return dataclasses.replace(self._llm.engine.stats)

    def generate(
        self,
        prompt: PromptLike | EncodedPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate a completion; give out all of it that is there, again and again.

        The arguments are checked at once; the request starts when the iterator is first advanced.

        Args:
            prompt: A string, token ids, a dict, or what :meth:`encode_chat` returns.
            sampling_params: How to sample; default ``SamplingParams()``.
            request_id: Any text that no running request has; ``None``: one is made up.
            priority: Lower is served sooner, with ``scheduling_policy="priority"``.

        Returns:
            An iterator of snapshots; the last one has ``finished`` set. That of a request which
            :meth:`abort` has ended has ``finish_reason="abort"``.

        Raises:
            ValueError: A bad prompt, bad parameters, or (as the iterator is advanced) an id that
                is in use. No other request notices.
            TypeError: Something that is no prompt.
            EngineDeadError: The engine was shut down, before or (as the iterator is advanced)
                since; a ``RuntimeError``.
            EngineGenerateError: As the iterator is advanced: a step failed; a ``RuntimeError``.
        """
        generator = self._start(prompt, sampling_params, request_id, priority, snapshots=True)
        return cast("AsyncGenerator[RequestOutput, None]", generator)

    def stream(
        self,
        prompt: PromptLike | EncodedPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestUpdate, None]:
        """Like :meth:`generate`, but give out each token once. Costs less for long outputs.

        Returns:
            An iterator of updates; the last one carries the
            :class:`~paged_kv.engine.outputs.RequestOutput`.

        Raises:
            RuntimeError: :meth:`abort` has ended the request.
            ValueError: As :meth:`generate`, and so are the others.
            TypeError: Something that is no prompt.
            EngineDeadError: The engine was shut down.
            EngineGenerateError: A step failed.
        """
        generator = self._start(prompt, sampling_params, request_id, priority, snapshots=False)
        return cast("AsyncGenerator[RequestUpdate, None]", generator)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> EncodedPrompt:
        """Turn a conversation into a prompt: :meth:`paged_kv.engine.llm.LLM.encode_chat`.

        Raises:
            ValueError: The model has no tokenizer or no chat template, or refuses the messages.
        """
        return self._llm.encode_chat(messages)

    async def abort(self, request_id: str) -> None:
        """End a request; when this returns, its blocks are free. An unknown id is ignored."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        if self._thread.abort(request_id, lambda: _call_soon(loop, done)):
            await done.wait()

    async def shutdown(self) -> None:
        """End all requests, to whose callers an error is raised, and join the thread. Idempotent.

        Raises:
            EngineDeadError: Not raised here, but to callers that wait, and by calls from now on.
        """
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    def _start(
        self,
        prompt: PromptLike | EncodedPrompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        *,
        snapshots: bool,
    ) -> AsyncGenerator[RequestOutput | RequestUpdate, None]:
        """Check the arguments now; the generator that is returned does the rest."""
        if self._thread.is_stopping:
            msg = "the engine was shut down"
            raise EngineDeadError(msg)
        engine = self._llm.engine
        params = sampling_params if sampling_params is not None else SamplingParams()
        encoded = encode_prompt(prompt, self.tokenizer, engine.vocab_size)
        engine.check_request(encoded, params)
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        return self._run(request_id, encoded, params, priority, snapshots)

    async def _run(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        priority: int,
        snapshots: bool,
    ) -> AsyncGenerator[RequestOutput | RequestUpdate, None]:
        call = Call(request_id, snapshots, asyncio.get_running_loop(), asyncio.Queue())
        try:
            if not self._thread.add(call, prompt, params, priority=priority):
                msg = "the engine was shut down"
                raise EngineDeadError(msg)
            while True:
                item = await call.inbox.get()
                call.has_snapshot = False
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finished if isinstance(item, RequestOutput) else item.result is not None:
                    return
        finally:
            # Nothing is awaited here: a generator that is being closed may not.
            self._thread.drop(call)


def _call_soon(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(done.set)
    except RuntimeError:  # the loop is closed
        return
