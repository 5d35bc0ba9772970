# SPDX-License-Identifier: Apache-2.0
"""What the sampler knows of one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.engine.bad_words import BadWordMatcher
from paged_kv.engine.penalties import Penalties, TokenCounts
from paged_kv.engine.random_numbers import sequence_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.engine.sampling_params import SamplingParams

__all__ = ["SamplingRow"]


class SamplingRow:
    """One sequence's parameters and tokens, made once and used for each of its tokens.

    A row reads its sequence's tokens where they are: append a token there and the row knows.
    Nothing else has to be told, saved or restored when a sequence is preempted or moves in the
    batch.

    Args:
        params: How to sample.
        token_ids: Prompt and output of the sequence. Kept, not copied: the caller appends to it
            each token that it takes, and takes none away.
        num_prompt_tokens: How many of ``token_ids`` are the prompt, at least 1.
        seed: The request's seed. ``params.seed`` is not read: a request without one gets it from
            its engine.
        index: Which of the request's ``n`` sequences this is.
        end_token_ids: Ids that may not come out before ``min_tokens`` tokens have.
        bad_words: Token sequences that may not come out (:func:`encode_bad_words`).

    Attributes:
        params: As given.
        token_ids: As given.
        num_prompt_tokens: As given.
        seed: The sequence's own seed (:func:`sequence_seed`).
        penalties: ``None`` if the parameters ask for none.
        bias: Added to the logits in every step; -inf for what never may come out.

    Example:
        >>> from paged_kv import SamplingParams
        >>> token_ids = [5, 6, 7]
        >>> row = SamplingRow(SamplingParams(min_tokens=1), token_ids, 3, end_token_ids=[2])
        >>> row.banned_token_ids()
        [2]
        >>> token_ids.append(8)
        >>> row.num_output_tokens, row.banned_token_ids()
        (1, [])
    """

    __slots__ = (
        "_bad_words",
        "_counts",
        "_end_token_ids",
        "_num_counted",
        "bias",
        "num_prompt_tokens",
        "params",
        "penalties",
        "seed",
        "token_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        token_ids: list[int],
        num_prompt_tokens: int,
        *,
        seed: int = 0,
        index: int = 0,
        end_token_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self.params = params
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.seed = sequence_seed(seed, index)
        self.penalties = _penalties_of(params)
        self._end_token_ids = tuple(end_token_ids) if params.min_tokens > 0 else ()
        self._bad_words = BadWordMatcher(bad_words) if bad_words else None
        self.bias = dict(params.logit_bias or {})
        if self._bad_words is not None:
            self.bias |= dict.fromkeys(self._bad_words.single_token_ids, -float("inf"))
        self._counts: TokenCounts | None = None
        self._num_counted = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far: the position of the next one in the output."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_bans(self) -> bool:
        """Whether :meth:`banned_token_ids` may return something."""
        return bool(self._end_token_ids) or self._bad_words is not None

    @property
    def changes_logits(self) -> bool:
        """Whether even a greedy row may take another token than the most likely one."""
        return self.penalties is not None or bool(self.bias) or self.has_bans

    def banned_token_ids(self) -> list[int]:
        """Ids that may not come out next; those that never may are in :attr:`bias` instead."""
        banned: list[int] = []
        if self._end_token_ids and self.num_output_tokens < self.params.min_tokens:
            banned.extend(self._end_token_ids)
        if self._bad_words is not None:
            banned += self._bad_words.completing_token_ids(self.token_ids, self.num_prompt_tokens)
        return banned

    def count_tokens(self) -> TokenCounts:
        """What the sequence holds now. Cost: linear in the tokens since the last call."""
        if self._counts is None:
            # Prompt tokens matter to the repetition penalty alone.
            is_prompt_needed = self.params.repetition_penalty != 1.0
            prompt = self.token_ids[: self.num_prompt_tokens] if is_prompt_needed else ()
            self._counts = TokenCounts(prompt)
            self._num_counted = self.num_prompt_tokens
        self._counts.add(self.token_ids[self._num_counted :])
        self._num_counted = len(self.token_ids)
        return self._counts


def _penalties_of(params: SamplingParams) -> Penalties | None:
    penalties = Penalties(
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
    )
    return penalties if penalties != Penalties() else None
