# SPDX-License-Identifier: Apache-2.0
"""What a generation returns, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_kv.engine.logprobs import LogprobsAtPosition

__all__ = ["CompletionOutput", "RequestOutput", "RequestUpdate"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a request's prompt.

    Attributes:
        index: Which of the request's ``n`` completions, from 0.
        text: Generated text without special tokens and without the stop string.
        token_ids: Generated ids, including the end token where there was one.
        finish_reason: ``"stop"`` (end token or stop string), ``"length"`` (``max_tokens`` or the
            model's length), ``"abort"``, or ``None`` while the request runs.
        stop_reason: The stop string or the id of ``stop_token_ids`` that ended the request,
            ``None`` for any other end.
        cumulative_logprob: Sum of the log probabilities of ``token_ids``, ``None`` if
            ``logprobs`` were not asked for.
        logprobs: For each of ``token_ids`` a dict from token id to
            :class:`~paged_kv.engine.logprobs.Logprob`: the token first, then the most likely
            ones. ``None`` if not asked for.

    Source:
        vLLM 0.32 ``vllm/outputs.py``.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAtPosition] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's state after a step, or its result.

    Attributes:
        request_id: Unique within the engine.
        prompt: The prompt's text, ``None`` if it was given as token ids.
        prompt_token_ids: What was fed to the model.
        outputs: ``n`` completions, in the order of their ``index``.
        finished: Whether all is there.
        num_cached_tokens: Prompt tokens whose keys and values were found in the prefix cache.
        prompt_logprobs: For each prompt token a dict as in :attr:`CompletionOutput.logprobs`, for
            the first one ``None``. ``None`` if not asked for.

    Source:
        vLLM 0.32 ``vllm/outputs.py``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[LogprobsAtPosition | None] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one step added to one completion.

    Attributes:
        request_id: Which request.
        index: Which of its completions.
        text: New text, often empty: a token may end inside a character, and text that may become
            a stop string is held back. All pieces joined are the final text.
        token_id: The new token.
        result: The request's output once all its completions are finished, ``None`` before.
    """

    request_id: str
    index: int
    text: str
    token_id: int
    result: RequestOutput | None
