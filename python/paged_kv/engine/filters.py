# SPDX-License-Identifier: Apache-2.0
"""Temperature, ``min_p``, ``top_k`` and ``top_p``: from logits to the weights of a draw."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from paged_kv.engine.draw import chunk_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.engine.sampling_params import SamplingParams

__all__ = ["FilterBatch", "compute_weights"]

# Most likely tokens of a row that are looked at before all of it is sorted. A nucleus is rarely
# larger, and picking these costs about as much as one more pass over the row.
_NUM_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class _RankFilters:
    """``top_k`` and ``top_p`` of the rows that have one of them.

    Attributes:
        rows: ``[m]`` int64, which rows.
        top_k: ``[m]`` int64, the vocabulary's size for no limit.
        top_p: ``[m]`` float64.
        num_candidates: Sorted logits to begin with.
    """

    rows: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    num_candidates: int


@dataclass(frozen=True, slots=True)
class FilterBatch:
    """The filters of a batch as tensors on the logits' device.

    Attributes:
        temperature: ``[n, 1]`` float32.
        log_min_p: ``[n, 1]`` float32, -inf for no limit.
        has_min_p: Whether a row has a ``min_p``.
        ranks: ``None`` if no row has ``top_k`` or ``top_p``.
    """

    temperature: torch.Tensor
    log_min_p: torch.Tensor
    has_min_p: bool
    ranks: _RankFilters | None

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device
    ) -> FilterBatch:
        """Collect the filters of rows that are sampled.

        Args:
            params: One entry for each row.
            vocab_size: Columns of the logits.
            device: Where the logits are.
        """

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

        # Infinity as the divisor would make NaN of what is banned already, -inf / inf.
        largest = torch.finfo(torch.float32).max
        return cls(
            temperature=column([min(p.temperature, largest) for p in params]),
            log_min_p=column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]),
            has_min_p=any(p.min_p > 0 for p in params),
            ranks=_rank_filters(params, vocab_size, device),
        )


def compute_weights(logits: torch.Tensor, filters: FilterBatch) -> torch.Tensor:
    """Probabilities up to a factor for each row; 0 for tokens that are filtered out.

    The order is vLLM's: temperature, ``min_p``, ``top_k``, then ``top_p`` of what is left. Every
    filter is a lowest logit, so tokens with equal logits stay or go together: a tie at the edge
    of ``top_k`` or ``top_p`` keeps all of them, and what a row keeps depends on nothing else in
    the batch.

    Args:
        logits: ``[n, vocab_size]`` float32, the largest of each row finite. Not changed.
        filters: :meth:`FilterBatch.of` the same rows.

    Returns:
        ``[n, vocab_size]`` float32 in [0, 1]; each row's most likely token has 1.

    Cost:
        Three passes over the logits; ``top_k`` and ``top_p`` select the largest few of their
        rows, and sort only rows whose nucleus or ``top_k`` is larger than 256.

    Source:
        Order: vLLM 0.32 ``v1/sample/sampler.py``; nucleus: Holtzman et al., "The Curious Case of
        Neural Text Degeneration", 2020.
    """
    # The largest first: no temperature makes the others overflow.
    scores = logits.sub(logits.amax(dim=-1, keepdim=True)).div_(filters.temperature)
    if filters.ranks is None and not filters.has_min_p:
        return scores.exp_()
    weights = scores.exp()
    # p_i >= min_p * p_max  <=>  score_i >= log(min_p), the largest score being 0.
    floor = filters.log_min_p
    if filters.ranks is not None:
        floor = _raise_floor(scores, weights, floor, filters.ranks)
    return weights.masked_fill_(scores < floor, 0.0)


def _rank_filters(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> _RankFilters | None:
    rows = [r for r, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    if not rows:
        return None
    top_k = [min(params[r].top_k, vocab_size) if params[r].top_k > 0 else vocab_size for r in rows]
    return _RankFilters(
        rows=torch.tensor(rows, device=device),
        top_k=torch.tensor(top_k, device=device),
        top_p=torch.tensor([params[r].top_p for r in rows], dtype=torch.float64, device=device),
        num_candidates=min(max(top_k), _NUM_CANDIDATES, vocab_size),
    )


def _raise_floor(
    scores: torch.Tensor, weights: torch.Tensor, floor: torch.Tensor, ranks: _RankFilters
) -> torch.Tensor:
    """The lowest score that each row keeps, ``[n, 1]``."""
    rows, top_k, top_p = ranks.rows, ranks.top_k, ranks.top_p
    scores, weights = _take_rows(scores, rows), _take_rows(weights, rows)
    ordered = _largest_scores(scores, ranks.num_candidates)
    new_floor, is_decided = _floor_of_ranks(ordered, scores, weights, floor[rows], top_k, top_p)
    undecided = (~is_decided).nonzero().squeeze(1)
    if len(undecided) > 0:
        scores, weights = _take_rows(scores, undecided), _take_rows(weights, undecided)
        ordered = _largest_scores(scores, scores.shape[1])
        new_floor[undecided], _ = _floor_of_ranks(
            ordered, scores, weights, floor[rows[undecided]], top_k[undecided], top_p[undecided]
        )
    return floor.index_copy(0, rows, new_floor)


def _floor_of_ranks(
    ordered: torch.Tensor,
    scores: torch.Tensor,
    weights: torch.Tensor,
    floor: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Floors from each row's largest scores, and whether those were enough to tell.

    Args:
        ordered: ``[m, num_candidates]``, the largest scores, descending.
        scores: ``[m, vocab_size]``.
        weights: ``[m, vocab_size]``, ``exp(scores)``.
        floor: ``[m, 1]``, what ``min_p`` keeps.
        top_k: ``[m]``.
        top_p: ``[m]``.
    """
    num_candidates, vocab_size = ordered.shape[1], scores.shape[1]
    is_limited = (top_k < vocab_size).unsqueeze(1)
    kth = ordered.gather(1, top_k.clamp(max=num_candidates).unsqueeze(1) - 1)
    floor = torch.where(is_limited, torch.maximum(floor, kth), floor)
    is_decided = ~is_limited.squeeze(1) | (top_k <= num_candidates)

    is_nucleus = top_p < 1.0
    if not bool(is_nucleus.any()):
        return floor, is_decided
    total = chunk_sums(weights.masked_fill(scores < floor, 0.0)).double().sum(dim=-1)
    target = (top_p * total).unsqueeze(1)
    mass = ordered.exp().masked_fill_(ordered < floor, 0.0).double()
    mass_after = mass.cumsum(dim=-1)
    # A token stays if those before it fall short of top_p; the first one always does.
    num_kept = (mass_after - mass < target).sum(dim=-1, keepdim=True)
    last_kept = ordered.gather(1, num_kept.clamp(min=1) - 1)
    floor = torch.where(is_nucleus.unsqueeze(1), torch.maximum(floor, last_kept), floor)
    if num_candidates < vocab_size:
        is_decided &= ~is_nucleus | (mass_after[:, -1:] >= target).squeeze(1)
    return floor, is_decided


def _largest_scores(scores: torch.Tensor, num_scores: int) -> torch.Tensor:
    """The largest scores of each row, descending, without their tokens."""
    if scores.device.type != "cpu":
        return scores.topk(num_scores, dim=-1).values
    # NumPy sorts bare values with vector instructions: 5 to 13 times as fast as torch, which
    # carries their positions along.
    num_others = scores.shape[1] - num_scores
    values = scores.detach().numpy()
    if num_others > 0:
        values = np.partition(values, num_others, axis=-1)[:, num_others:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _take_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``tensor[rows]``, without a copy if that is all of it. ``rows`` ascend."""
    return tensor if len(rows) == len(tensor) else tensor[rows]
