# SPDX-License-Identifier: Apache-2.0
"""What a generation returns, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CompletionOutput", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The generated part of one request.

    Attributes:
        index: Always 0: one completion for each prompt.
        text: Generated text without special tokens and without the stop string.
        token_ids: Generated ids, including the end token where there was one.
        finish_reason: ``"stop"`` (end token or stop string), ``"length"`` (``max_tokens`` or the
            model's length), ``"abort"``, or ``None`` while the request runs.
        stop_reason: The stop string or the id of ``stop_token_ids`` that ended the request,
            ``None`` for any other end.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's state after a step, or its result.

    Attributes:
        request_id: Unique within the engine.
        prompt: The prompt's text, ``None`` if it was given as token ids.
        prompt_token_ids: What was fed to the model.
        outputs: One :class:`CompletionOutput`.
        finished: Whether more will come.
        num_cached_tokens: Prompt tokens whose keys and values were found in the prefix cache.

    Source:
        vLLM 0.32 ``vllm/outputs.py``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
