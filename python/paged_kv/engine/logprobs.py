# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of sampled and of prompt tokens, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from paged_kv.engine.token_texts import TokenTexts

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Logprob",
    "LogprobsAtPosition",
    "PromptLogprobs",
    "SampleLogprobs",
    "TokenLogprobs",
    "compute_logprobs",
]

# Rows of logits whose log softmax is held at once.
_ROWS_PER_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found one token at one position.

    Attributes:
        logprob: Natural logarithm of the probability that the model gave, before penalties,
            bans, temperature and filters.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: The token's text in its context, ``""`` inside a character, ``None``
            without a tokenizer.

    Source:
        vLLM 0.32 ``vllm/logprobs.py::Logprob``.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsAtPosition: TypeAlias = "dict[int, Logprob]"
"""The token that is there, first, and the most likely ones in order, by token id."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position's log probabilities as numbers, before they are decoded.

    Attributes:
        token_ids: The token that is there, then the most likely ones in order.
        logprobs: One for each of ``token_ids``.
        rank: Rank of the token that is there; the others have 1, 2, ...
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


def compute_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_logprobs: int
) -> list[TokenLogprobs]:
    """Log probabilities of given tokens and of the most likely ones.

    Args:
        logits: ``[n, vocab_size]``, any floating dtype, as the model gave them. Not changed.
        token_ids: ``[n]``, the token at each row's position.
        num_logprobs: How many of the most likely tokens; 0 for none, -1 for the whole vocabulary.

    Returns:
        One entry for each row.

    Cost: 64 rows at a time, a log softmax, a selection and a count each.

    Source:
        vLLM 0.32 ``v1/sample/sampler.py::Sampler.gather_logprobs`` (``logprobs_mode``
        ``raw_logprobs``). Of equally likely tokens the one that is there has the last rank.
    """
    result = []
    for start in range(0, len(token_ids), _ROWS_PER_CHUNK):
        rows = slice(start, start + _ROWS_PER_CHUNK)
        result += _compute_logprobs_of_chunk(logits[rows], token_ids[rows], num_logprobs)
    return result


class SampleLogprobs:
    """Collects the log probabilities of one sequence's output.

    Args:
        texts: Decodes tokens; ``None`` if the model has no tokenizer.

    Attributes:
        positions: One entry for each output token.
        cumulative_logprob: Sum over the output tokens.
    """

    def __init__(self, texts: TokenTexts | None) -> None:
        self._texts = texts
        self.positions: list[LogprobsAtPosition] = []
        self.cumulative_logprob = 0.0

    def append(self, logprobs: TokenLogprobs, context: Sequence[int]) -> None:
        """Add the next position.

        Args:
            logprobs: What :class:`~paged_kv.engine.sampler.Sampler` returned.
            context: The tokens before it, the last few are enough (:class:`TokenTexts`).
        """
        self.positions.append(_decode(logprobs, self._texts, context))
        self.cumulative_logprob += logprobs.logprobs[0]


class PromptLogprobs:
    """Collects the log probabilities of one prompt's tokens, chunk by chunk.

    The logits at position ``p`` tell how likely the token at ``p + 1`` is, so a prompt of ``n``
    tokens needs the logits of positions ``0 .. n - 2``. Its first token has none.

    Args:
        prompt_token_ids: The whole prompt.
        num_logprobs: As in :func:`compute_logprobs`.
        texts: Decodes tokens; ``None`` if the model has no tokenizer.

    Attributes:
        positions: One entry for each prompt token so far; the first is ``None``.

    Example:
        >>> import torch
        >>> logprobs = PromptLogprobs([3, 1, 2], 0, None)
        >>> logprobs.append(0, torch.zeros(2, 4))
        >>> logprobs.is_complete, [p and list(p) for p in logprobs.positions]
        (True, [None, [1], [2]])
    """

    def __init__(
        self, prompt_token_ids: Sequence[int], num_logprobs: int, texts: TokenTexts | None
    ) -> None:
        self._prompt = prompt_token_ids
        self._num_logprobs = num_logprobs
        self._texts = texts
        self.positions: list[LogprobsAtPosition | None] = [None]

    @property
    def is_complete(self) -> bool:
        """Whether every token of the prompt has an entry."""
        return self.num_missing_rows == 0

    @property
    def num_missing_rows(self) -> int:
        """Rows of logits still to come, from position :attr:`next_position` on."""
        return len(self._prompt) - len(self.positions)

    @property
    def next_position(self) -> int:
        """The first position whose logits have not been added."""
        return len(self.positions) - 1

    def append(self, first_position: int, logits: torch.Tensor) -> None:
        """Add the logits of consecutive positions.

        Rows that were added before are skipped, as after a preemption that computes a prompt
        again; so are those past the last one needed, which predicts the first output token.

        Args:
            first_position: Position of the first row, at most :attr:`next_position`.
            logits: ``[m, vocab_size]``, as the model gave them. Not changed.

        Raises:
            ValueError: Rows between what is there and ``first_position`` are missing.
        """
        skipped = self.next_position - first_position
        if skipped < 0:
            msg = (
                f"prompt logprobs go on at position {self.next_position}, got logits from "
                f"position {first_position} on"
            )
            raise ValueError(msg)
        logits = logits[skipped : skipped + self.num_missing_rows]
        start = len(self.positions)
        token_ids = self._prompt[start : start + len(logits)]
        for entry in compute_logprobs(logits, token_ids, self._num_logprobs):
            position = len(self.positions)
            context = self._prompt[max(position - TokenTexts.NUM_CONTEXT_TOKENS, 0) : position]
            self.positions.append(_decode(entry, self._texts, context))


def _compute_logprobs_of_chunk(
    logits: torch.Tensor, token_ids: Sequence[int], num_logprobs: int
) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    values = logprobs.gather(1, ids)
    ranks = (logprobs >= values).sum(dim=-1)
    top = logprobs.topk(logits.shape[1] if num_logprobs < 0 else num_logprobs, dim=-1)
    columns = (torch.cat([ids, top.indices], dim=1), torch.cat([values, top.values], dim=1), ranks)
    return [
        TokenLogprobs(row_ids, row_values, rank)
        for row_ids, row_values, rank in zip(*(c.tolist() for c in columns), strict=True)
    ]


def _decode(
    logprobs: TokenLogprobs, texts: TokenTexts | None, context: Sequence[int]
) -> LogprobsAtPosition:
    ranks = [logprobs.rank, *range(1, len(logprobs.token_ids))]
    return {
        token_id: Logprob(value, rank, texts.decode(token_id, context) if texts else None)
        for token_id, value, rank in zip(logprobs.token_ids, logprobs.logprobs, ranks, strict=True)
    }
