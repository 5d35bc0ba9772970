# SPDX-License-Identifier: Apache-2.0
"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

__all__ = ["Penalties", "TokenCounts", "apply_penalties"]


@dataclass(frozen=True, slots=True)
class Penalties:
    """The three penalties of one sequence.

    Attributes:
        repetition: Divides positive logits and multiplies others of tokens that prompt or output
            hold.
        frequency: Taken off for each time that the output holds a token.
        presence: Taken off once if the output holds a token.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


class TokenCounts:
    """Which distinct tokens a sequence holds, and how often its output holds each.

    Cost: one dictionary lookup a token; memory linear in the distinct tokens.

    Args:
        prompt_token_ids: Tokens that count as seen, not as output.
    """

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self._index_of = {token_id: index for index, token_id in enumerate(distinct)}
        self._token_ids = np.array(distinct + 16 * [0], dtype=np.int64)
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)

    def add(self, token_ids: Iterable[int]) -> None:
        """Count output tokens."""
        for token_id in token_ids:
            index = self._index_of.setdefault(token_id, len(self._index_of))
            if index == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[index] = token_id
            self._counts[index] += 1

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, a view."""
        return self._token_ids[: len(self._index_of)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """How often the output holds each of :attr:`token_ids`, a view."""
        return self._counts[: len(self._index_of)]


def apply_penalties(
    logits: torch.Tensor,
    rows: Sequence[int],
    counts: Sequence[TokenCounts],
    penalties: Sequence[Penalties],
) -> None:
    """Penalize the tokens that sequences hold: repetition, then frequency, then presence.

    Args:
        logits: ``[num_rows, vocab_size]`` float32. Changed in place.
        rows: Which row of ``logits`` each sequence has; no row twice.
        counts: What each sequence holds.
        penalties: One entry for each sequence.

    Cost: linear in the distinct tokens of the sequences; the vocabulary is not read.

    Source:
        vLLM 0.32 ``vllm/model_executor/layers/utils.py::apply_penalties``; repetition penalty:
        Keskar et al., "CTRL", 2019.
    """
    lengths = [len(c.token_ids) for c in counts]

    def spread(values: Sequence[float], dtype: type[np.generic]) -> torch.Tensor:
        """One value of each sequence for each of its tokens."""
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), lengths)).to(logits.device)

    row = spread(rows, np.int64)
    token_ids = torch.from_numpy(np.concatenate([c.token_ids for c in counts])).to(logits.device)
    count = torch.from_numpy(np.concatenate([c.output_counts for c in counts])).to(logits.device)
    limits = torch.finfo(torch.float32)
    # In float32 an extreme factor would be 0 or infinity.
    factors = [min(max(p.repetition, limits.tiny), limits.max) for p in penalties]
    repetition = spread(factors, np.float32)
    frequency = spread([p.frequency for p in penalties], np.float32)
    presence = spread([p.presence for p in penalties], np.float32)

    given = logits[row, token_ids]
    values = torch.where(given > 0, given / repetition, given * repetition)
    values -= frequency * count
    values -= presence * (count > 0)
    # A penalty bans nothing, however large; what is banned stays so.
    values.clamp_(limits.min, limits.max).masked_fill_(given.isneginf(), -torch.inf)
    logits[row, token_ids] = values
