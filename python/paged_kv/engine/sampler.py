# SPDX-License-Identifier: Apache-2.0
"""Chooses one token id for each row of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.engine.sampling_params import SamplingParams

__all__ = ["NonFiniteLogitsError", "filter_logits", "sample"]


class NonFiniteLogitsError(RuntimeError, ValueError):
    """The model computed NaN or infinity: its weights are broken, or its dtype is too narrow."""


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
    banned_token_ids: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Sample the next token of every request in the batch.

    A sampled row draws one number from its own generator and inverts the row's distribution
    there, so its result does not depend on the other rows.

    Args:
        logits: ``[num_requests, vocab_size]``, any floating dtype. Not changed.
        params: One entry for each row.
        generators: One entry for each row; ``None`` is allowed for greedy rows only. Advanced by
            one draw.
        banned_token_ids: Ids that may not come out, for each row; empty means none for any row.

    Returns:
        One token id for each row.

    Raises:
        NonFiniteLogitsError: A row holds NaN or +inf, or nothing but -inf: the model is at fault.

    Notes:
        Cost: greedy rows read the logits twice; sampled rows take one softmax and one cumulative
        sum; ``top_k`` and ``top_p`` add one sort of the rows that use them.
    """
    if not params:
        return []
    logits = logits.float()
    if any(banned_token_ids):
        logits = _ban(logits, banned_token_ids)
    best, token_ids = logits.max(dim=-1)
    if not bool(best.isfinite().all()):
        msg = "logits must be finite: the model produced NaN or infinity"
        raise NonFiniteLogitsError(msg)

    result: list[int] = token_ids.tolist()
    rows = [row for row, p in enumerate(params) if not p.is_greedy]
    if rows:
        filtered = filter_logits(logits[rows], [params[row] for row in rows])
        sampled = _invert_distribution(filtered, [generators[row] for row in rows])
        for row, token_id in zip(rows, sampled, strict=True):
            result[row] = token_id
    return result


def filter_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply temperature, ``min_p``, ``top_k`` and ``top_p`` to rows that are sampled.

    Args:
        logits: ``[num_rows, vocab_size]`` float32. Not changed.
        params: One entry for each row, none of them greedy.

    Returns:
        ``[num_rows, vocab_size]`` float32; tokens that were filtered out are -inf. At least the
        most likely token of each row stays.
    """
    vocab_size = logits.shape[-1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    # Infinity as the divisor would make NaN of what is filtered out already, -inf / inf.
    largest = torch.finfo(torch.float32).max
    logits = logits / column([min(p.temperature, largest) for p in params])
    if any(p.min_p > 0.0 for p in params):
        # p_i >= min_p * p_max  <=>  logit_i >= logit_max + log(min_p)
        floor = logits.max(dim=-1, keepdim=True).values + column([p.min_p for p in params]).log()
        logits = logits.masked_fill(logits < floor, -torch.inf)

    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    if rows:
        logits[rows] = _top_k_top_p(logits[rows], [params[row] for row in rows])
    return logits


def _top_k_top_p(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor(
        [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params],
        device=logits.device,
    )
    rank = torch.arange(vocab_size, device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k.unsqueeze(1), -torch.inf)

    probs = ordered.softmax(dim=-1, dtype=torch.float64)
    mass_before = probs.cumsum(dim=-1) - probs
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=logits.device)
    # top_p == 1 must keep even what rounding puts past a total of 1.
    past_nucleus = (mass_before >= top_p.unsqueeze(1)) & (top_p < 1.0).unsqueeze(1)
    past_nucleus[:, 0] = False
    ordered = ordered.masked_fill(past_nucleus, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _invert_distribution(
    logits: torch.Tensor, generators: Sequence[torch.Generator | None]
) -> list[int]:
    # In float64 u * total < total for every u < 1, so the search always ends on a token, and
    # right=True lands on one whose probability is above 0.
    cdf = logits.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    draws = [torch.rand((), dtype=torch.float64, generator=g) for g in generators]
    target = torch.stack(draws).to(cdf.device).unsqueeze(1) * cdf[:, -1:]
    token_ids: list[int] = torch.searchsorted(cdf, target, right=True).squeeze(1).tolist()
    return token_ids


def _ban(logits: torch.Tensor, banned_token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
    logits = logits.clone()
    for row, token_ids in enumerate(banned_token_ids):
        if token_ids:
            logits[row, list(token_ids)] = -torch.inf
    return logits
