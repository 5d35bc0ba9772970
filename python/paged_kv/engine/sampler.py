# SPDX-License-Identifier: Apache-2.0
"""Chooses the next token of every sequence in the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paged_kv.engine.draw import draw_tokens
from paged_kv.engine.filters import compute_weights
from paged_kv.engine.logprobs import TokenLogprobs, compute_logprobs
from paged_kv.engine.sampling_batch import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.engine.sampling_row import SamplingRow

__all__ = ["NonFiniteLogitsError", "SampledTokens", "Sampler"]


class NonFiniteLogitsError(RuntimeError, ValueError):
    """The model computed NaN or infinity: its weights are broken, or its dtype is too narrow."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What one step chose.

    Attributes:
        token_ids: One for each row.
        logprobs: One entry for each row, ``None`` for rows that ask for none.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Samples all rows of a batch at once.

    The order is vLLM's. Log probabilities are those of the logits as the model gave them. Then
    bans (``bad_words``, end tokens before ``min_tokens``) and ``logit_bias``, penalties, and for
    rows that are sampled temperature, ``min_p``, ``top_k``, ``top_p`` and the draw; the others
    take the most likely token, the lowest id among equals.

    A row's token depends on its logits, parameters, tokens and seed alone, and not on the other
    rows or on earlier calls: random numbers come from the seed and the position in the output.

    Tensors that only change with the batch are kept from one call to the next, and with them the
    rows of the last call.

    Cost:
        A batch of greedy rows without extras: one pass over the logits. Rows that are sampled:
        about five more. A copy of the rows unless all are sampled without bans and the like.

    Source:
        vLLM 0.32 ``v1/sample/sampler.py::Sampler``.

    Example:
        >>> import torch
        >>> from paged_kv import SamplingParams
        >>> from paged_kv.engine.sampling_row import SamplingRow
        >>> row = SamplingRow(SamplingParams(temperature=0.0), [1, 2], 2)
        >>> Sampler().sample(torch.tensor([[0.0, 3.0, 1.0]]), [row]).token_ids
        [1]
    """

    def __init__(self) -> None:
        self._batch: SamplingBatch | None = None

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        """Choose one token for each row; the caller appends it to the row's tokens.

        Args:
            logits: ``[num_rows, vocab_size]``, any floating dtype and device. Not changed.
            rows: One entry for each row of the logits.

        Raises:
            NonFiniteLogitsError: A row holds NaN or +inf, or nothing but -inf: the model is at
                fault; or all its finite logits belong to tokens that are banned.
        """
        if not rows:
            return SampledTokens([], [])
        logits = logits.float()
        token_ids = _take_best(logits, "logits must be finite: the model produced NaN or infinity")
        batch = self._batch_of(rows, logits)
        if batch.active:
            for row, token_id in zip(batch.active, _sample_active(logits, batch), strict=True):
                token_ids[row] = token_id
        return SampledTokens(token_ids, _logprobs_of(logits, token_ids, batch))

    def compute_probs(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """The distributions that :meth:`sample` draws from, for analysis.

        Args:
            logits: As in :meth:`sample`.
            rows: As in :meth:`sample`.

        Returns:
            ``[num_rows, vocab_size]`` float32; a greedy row has 1 at its token.
        """
        token_ids = torch.tensor(self.sample(logits, rows).token_ids, dtype=torch.int64)
        probs = torch.nn.functional.one_hot(token_ids, logits.shape[-1]).float().to(logits.device)
        batch = self._batch_of(rows, logits)
        if batch.filters is not None:
            changed = logits.float()[batch.active]
            batch.change_logits(changed)
            weights = compute_weights(changed[batch.sampled], batch.filters)
            sampled = [batch.active[position] for position in batch.sampled]
            probs[sampled] = weights / weights.sum(dim=-1, keepdim=True)
        return probs

    def _batch_of(self, rows: Sequence[SamplingRow], logits: torch.Tensor) -> SamplingBatch:
        vocab_size = logits.shape[-1]
        if self._batch is None or not self._batch.is_for(rows, vocab_size, logits.device):
            self._batch = SamplingBatch(rows, vocab_size, logits.device)
        return self._batch


def _sample_active(logits: torch.Tensor, batch: SamplingBatch) -> list[int]:
    """One token for each active row."""
    token_ids = [0] * len(batch.active)
    if len(batch.active) < len(logits):
        logits = logits[batch.active]
    elif batch.has_changes:
        logits = logits.clone()
    if batch.has_changes:
        batch.change_logits(logits)
        token_ids = _take_best(logits, "no token is left: all that the model allows are banned")
    if batch.filters is not None:
        if len(batch.sampled) < len(batch.active):
            logits = logits[batch.sampled]
        weights = compute_weights(logits, batch.filters)
        drawn: list[int] = draw_tokens(weights, batch.next_uniforms()).tolist()
        for position, token_id in zip(batch.sampled, drawn, strict=True):
            token_ids[position] = token_id
    return token_ids


def _take_best(logits: torch.Tensor, message: str) -> list[int]:
    best, token_ids = logits.max(dim=-1)
    if not bool(best.isfinite().all()):
        raise NonFiniteLogitsError(message)
    result: list[int] = token_ids.tolist()
    return result


def _logprobs_of(
    logits: torch.Tensor, token_ids: list[int], batch: SamplingBatch
) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(token_ids)
    # One call for each number asked for: which of equal tokens are among the most likely then
    # does not depend on what other rows ask for.
    for num_logprobs, rows in batch.logprob_rows.items():
        ids = [token_ids[row] for row in rows]
        for row, entry in zip(rows, compute_logprobs(logits[rows], ids, num_logprobs), strict=True):
            result[row] = entry
    return result
