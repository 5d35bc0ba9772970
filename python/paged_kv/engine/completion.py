# SPDX-License-Identifier: Apache-2.0
"""Grows one request's completion token by token and decides when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.engine.detokenizer import Detokenizer, StopStringFinder, TokenDecoder
from paged_kv.engine.logprobs import SampleLogprobs
from paged_kv.engine.outputs import CompletionOutput, RequestOutput
from paged_kv.engine.request import RequestStatus

if TYPE_CHECKING:
    from paged_kv.engine.logprobs import TokenLogprobs
    from paged_kv.engine.request import Request
    from paged_kv.engine.sampling_row import SamplingRow
    from paged_kv.engine.token_texts import TokenTexts

__all__ = ["CompletionBuilder"]


class CompletionBuilder:
    """Text and end of one request.

    Args:
        request: Grows by each token that is added.
        tokenizer: ``None`` if the model has none; the text is empty then.
        eos_token_ids: Ids that end the request unless it ignores them.
        row: What the sampler needs of the request.
        token_texts: Texts for log probabilities; ``None`` if the model has no tokenizer.

    Attributes:
        row: As given.
        status: A finished status once the request has to end, else ``None``. It is the engine
            that takes the request out.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: TokenDecoder | None,
        eos_token_ids: frozenset[int],
        row: SamplingRow,
        token_texts: TokenTexts | None,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.row = row
        self._logprobs = SampleLogprobs(token_texts) if params.logprobs is not None else None
        self.status: RequestStatus | None = None
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stop_finder = StopStringFinder(params.stop_strings)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._pieces: list[str] = []

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> str:
        """Add a sampled token, and its log probabilities if the request asks for them.

        Returns:
            Text that can be shown now. What may turn out to be part of a character or of a stop
            string is held back until the next tokens, or the end, decide.
        """
        request = self.request
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs, request.all_token_ids)
        request.append_output_token_ids(token_id)
        is_end_token = token_id in self._eos_token_ids or token_id in self._stop_token_ids
        if is_end_token:
            self.status = RequestStatus.FINISHED_STOPPED
            if token_id not in self._eos_token_ids:
                request.stop_reason = token_id
        elif request.num_tokens >= request.max_num_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
        piece = self._add_text(None if is_end_token else token_id)
        self._pieces.append(piece)
        return piece

    def result(self) -> RequestOutput:
        """The request's output so far."""
        request, logprobs = self.request, self._logprobs
        completion = CompletionOutput(
            index=0,
            text="".join(self._pieces),
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.status.finish_reason,
            stop_reason=request.stop_reason,
            cumulative_logprob=logprobs.cumulative_logprob if logprobs is not None else None,
            logprobs=list(logprobs.positions) if logprobs is not None else None,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=tuple(request.prompt_token_ids),
            outputs=(completion,),
            finished=request.status.is_finished,
            num_cached_tokens=max(request.num_cached_tokens, 0),
        )

    def _add_text(self, token_id: int | None) -> str:
        """Decode a token (``None``: an end token, which has no text) and look for stop strings."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.append(token_id) if token_id is not None else ""
        if self.status is not None:
            text += self._detokenizer.flush()
        if self.request.num_output_tokens < self.request.sampling_params.min_tokens:
            return text
        piece, stop_string = self._stop_finder.append(text)
        if stop_string is not None:
            self.status = RequestStatus.FINISHED_STOPPED
            self.request.stop_reason = stop_string
        elif self.status is not None:
            piece += self._stop_finder.flush()
        return piece
