# SPDX-License-Identifier: Apache-2.0
"""What stays the same from step to step while the same sequences are sampled."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from paged_kv.engine.filters import FilterBatch
from paged_kv.engine.penalties import apply_penalties
from paged_kv.engine.random_numbers import to_uint64, uniform_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.engine.sampling_row import SamplingRow

__all__ = ["SamplingBatch"]


class SamplingBatch:
    """The rows of a batch sorted by what they need, with the tensors for it.

    Greedy rows that take the model's logits as they are need nothing: the others are "active",
    and positions below count within those.

    Args:
        rows: One entry for each row of the logits.
        vocab_size: Columns of the logits.
        device: Where the logits are.

    Attributes:
        rows: As given.
        active: Rows that need more than the most likely token of the model's logits.
        sampled: Positions of the rows that are drawn.
        has_changes: Whether an active row has bans, biases or penalties.
        filters: Of the sampled rows; ``None`` if there are none.
        logprob_rows: Rows that want log probabilities, by their number.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> None:
        self.rows = list(rows)
        self._logits_kind = (vocab_size, device)
        self.active = [
            i for i, row in enumerate(rows) if row.changes_logits or not row.params.is_greedy
        ]
        active_rows = [rows[i] for i in self.active]
        self.sampled = [p for p, row in enumerate(active_rows) if not row.params.is_greedy]
        self._sampled_rows = [active_rows[p] for p in self.sampled]
        self._seeds = to_uint64([row.seed for row in self._sampled_rows])
        self.filters = (
            FilterBatch.of([row.params for row in self._sampled_rows], vocab_size, device)
            if self.sampled
            else None
        )
        self.has_changes = any(row.changes_logits for row in active_rows)
        self._bias = _bias_tensors(active_rows, device)
        self._with_bans = [(p, row) for p, row in enumerate(active_rows) if row.has_bans]
        self._with_penalties = [(p, row) for p, row in enumerate(active_rows) if row.penalties]
        self.logprob_rows: defaultdict[int, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            if row.params.logprobs is not None:
                self.logprob_rows[row.params.logprobs].append(i)

    def is_for(self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> bool:
        """Whether the batch is that of these rows, in this order."""
        return self._logits_kind == (vocab_size, device) and self.rows == list(rows)

    def change_logits(self, logits: torch.Tensor) -> None:
        """Apply bans, biases and penalties.

        Args:
            logits: ``[len(active), vocab_size]`` float32. Changed in place.
        """
        banned = [(p, i) for p, row in self._with_bans for i in row.banned_token_ids()]
        if banned:
            positions, token_ids = torch.tensor(banned, device=logits.device).unbind(1)
            logits[positions, token_ids] = -torch.inf
        if self._bias is not None:
            positions, token_ids, bias = self._bias
            logits[positions, token_ids] += bias
        if self._with_penalties:
            apply_penalties(
                logits,
                [p for p, _ in self._with_penalties],
                [row.count_tokens() for _, row in self._with_penalties],
                [row.penalties for _, row in self._with_penalties if row.penalties],
            )

    def next_uniforms(self) -> torch.Tensor:
        """The number in [0, 1) of each sampled row's next draw, ``[len(sampled)]`` float64."""
        positions = [row.num_output_tokens for row in self._sampled_rows]
        return torch.from_numpy(uniform_numbers(self._seeds, positions)).to(self._logits_kind[1])


def _bias_tensors(
    rows: Sequence[SamplingRow], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Positions, token ids and biases of all rows; no token twice in a row."""
    entries = [(p, i, bias) for p, row in enumerate(rows) for i, bias in row.bias.items()]
    if not entries:
        return None
    positions, token_ids, biases = zip(*entries, strict=True)
    return (
        torch.tensor(positions, device=device),
        torch.tensor(token_ids, device=device),
        torch.tensor(biases, dtype=torch.float32, device=device),
    )
