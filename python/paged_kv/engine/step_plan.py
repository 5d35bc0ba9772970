# SPDX-License-Identifier: Apache-2.0
"""A step while it is being scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv.engine.input_batch import Rows
    from paged_kv.engine.request import Request

__all__ = ["StepPlan"]


class StepPlan:
    """What has been scheduled so far in a step.

    Args:
        budget: Tokens that the step may compute.
        threshold: Most tokens of a request; 0: no limit.

    Attributes:
        budget: Tokens that are left.
        threshold: As given.
        admitted: Requests that waited until now.
        resumed: Those of them that had been preempted.
        blocks_to_swap_in: As in `SchedulerOutput`.
    """

    def __init__(self, budget: int, threshold: int) -> None:
        self.budget = budget
        self.threshold = threshold
        self.admitted: list[Request] = []
        self.resumed: list[Request] = []
        self.blocks_to_swap_in: list[tuple[int, int]] = []
        self._rows: list[Rows] = []
        self._counts: list[Rows] = []

    def share_out(self, wanted: npt.NDArray[np.int64]) -> Rows:
        """Give each its tokens, in order, until the budget is used up."""
        if wanted.sum() > self.budget:
            wanted_before = wanted.cumsum() - wanted
            wanted = np.clip(self.budget - wanted_before, 0, wanted)
        return wanted.astype(np.int32)

    def add(self, rows: Rows, counts: Rows) -> None:
        """Schedule so many tokens of the request of each row."""
        self._rows.append(rows)
        self._counts.append(counts)
        self.budget -= int(counts.sum())

    def remove(self, row: int) -> int:
        """Take a row out again; return the tokens that it had."""
        rows, counts = self.rows_and_counts()
        is_other = rows != row
        num_tokens = int(counts[~is_other].sum())
        self._rows, self._counts = [rows[is_other]], [counts[is_other]]
        self.budget += num_tokens
        return num_tokens

    def rows_and_counts(self) -> tuple[Rows, Rows]:
        """The rows that have been scheduled, in order, and the tokens of each."""
        if len(self._rows) == 1:
            return self._rows[0], self._counts[0]
        nothing = np.empty(0, np.int32)
        return np.concatenate([nothing, *self._rows]), np.concatenate([nothing, *self._counts])
