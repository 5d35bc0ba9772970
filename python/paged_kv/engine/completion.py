# SPDX-License-Identifier: Apache-2.0
"""Grows the completions of a prompt token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.engine.detokenizer import Detokenizer, StopStringFinder, TokenDecoder
from paged_kv.engine.logprobs import PromptLogprobs, SampleLogprobs
from paged_kv.engine.outputs import CompletionOutput, RequestOutput
from paged_kv.engine.request import RequestStatus, finish_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.engine.logprobs import TokenLogprobs
    from paged_kv.engine.request import Request
    from paged_kv.engine.sampling_row import SamplingRow
    from paged_kv.engine.token_texts import TokenTexts

__all__ = ["CompletionBuilder", "RequestState"]


class CompletionBuilder:
    """Tokens, text and log probabilities of one completion.

    Args:
        request: The sequence; it is the scheduler that appends tokens to it and says when a token
            ends it.
        row: What the sampler needs of it. Tokens are appended to its list.
        tokenizer: ``None`` if the model has none; the text is empty then.
        token_texts: Texts for log probabilities; ``None`` if the model has no tokenizer.

    Attributes:
        request: As given.
        row: As given.
        is_finished: Whether the last token has been added.
    """

    def __init__(
        self,
        request: Request,
        row: SamplingRow,
        tokenizer: TokenDecoder | None,
        token_texts: TokenTexts | None,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.row = row
        self.is_finished = False
        self._token_ids = row.token_ids
        self._logprobs = SampleLogprobs(token_texts) if params.logprobs is not None else None
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stop_finder = StopStringFinder(params.stop_strings)
        self._pieces: list[str] = []

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> str:
        """Add a token that the request has got, with its log probabilities if it asks for them.

        Sets `is_finished` if the request has finished, or if its text now has a stop string: then
        ``request.stop_reason`` is that string, and the caller has to take the request out.

        Returns:
            Text that can be shown now. What may turn out to be part of a character or of a stop
            string is held back until the next tokens, or the end, decide.
        """
        request = self.request
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs, self._token_ids)
        self._token_ids.append(token_id)
        self.is_finished = request.is_finished()
        # An end token has no text.
        is_end_token = request.status == RequestStatus.FINISHED_STOPPED
        piece = self._add_text(None if is_end_token else token_id)
        self._pieces.append(piece)
        return piece

    def result(self) -> CompletionOutput:
        """The completion so far."""
        request, logprobs = self.request, self._logprobs
        return CompletionOutput(
            index=request.index,
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids[request.num_prompt_tokens :]),
            finish_reason=finish_reason(request.status),
            stop_reason=request.stop_reason,
            cumulative_logprob=logprobs.cumulative_logprob if logprobs is not None else None,
            logprobs=list(logprobs.positions) if logprobs is not None else None,
        )

    def _add_text(self, token_id: int | None) -> str:
        """Decode a token (``None``: it has no text) and look for stop strings."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.append(token_id) if token_id is not None else ""
        if self.is_finished:
            text += self._detokenizer.flush()
        if self.row.num_output_tokens < self.request.sampling_params.min_tokens:
            return text
        piece, stop_string = self._stop_finder.append(text)
        if stop_string is not None:
            self.is_finished = True
            self.request.status = RequestStatus.FINISHED_STOPPED
            self.request.stop_reason = stop_string
        elif self.is_finished:
            piece += self._stop_finder.flush()
        return piece


class RequestState:
    """The completions of one prompt.

    Args:
        request_id: The caller's id.
        builders: One for each completion, in the order of their index.
        prompt_logprobs: ``None`` if not asked for.
    """

    def __init__(
        self,
        request_id: str,
        builders: Sequence[CompletionBuilder],
        prompt_logprobs: PromptLogprobs | None,
    ) -> None:
        self.request_id = request_id
        self.builders = builders
        self.prompt_logprobs = prompt_logprobs

    @property
    def is_complete(self) -> bool:
        """Whether every completion has its last token."""
        return all(builder.is_finished for builder in self.builders)

    def result(self) -> RequestOutput:
        """All completions so far."""
        first = self.builders[0].request
        logprobs = self.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=first.prompt,
            prompt_token_ids=tuple(first.prompt_token_ids.tolist()),
            outputs=tuple(builder.result() for builder in self.builders),
            finished=all(builder.request.is_finished() for builder in self.builders),
            num_cached_tokens=max(first.num_cached_tokens, 0),
            prompt_logprobs=list(logprobs.positions) if logprobs is not None else None,
        )
