# SPDX-License-Identifier: Apache-2.0
"""Random numbers without state: a pure function of a seed and a position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["sequence_seed", "to_uint64", "uniform_numbers"]

_MASK = 2**64 - 1
# 2^64 over the golden ratio, odd: multiples of it spread evenly over the 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15


def uniform_numbers(
    seeds: npt.NDArray[np.uint64], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each sequence, with 53 random bits.

    Since nothing is remembered between calls, a sequence that is preempted, forked or moved in
    the batch goes on with the numbers that it would have got anyway.

    Args:
        seeds: ``[n]``, one seed for each sequence.
        positions: ``[n]``, how many numbers the sequence has used, at least 0.

    Returns:
        ``[n]`` float64.

    Source:
        SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)
        started at the mixed seed, entered at any position.

    Example:
        >>> seeds = to_uint64([7, 7, 8])
        >>> numbers = uniform_numbers(seeds, [0, 1, 0])
        >>> len(set(numbers.tolist())), bool((numbers == uniform_numbers(seeds, [0, 1, 0])).all())
        (3, True)
    """
    steps = np.asarray(positions, dtype=np.uint64) + np.uint64(1)
    bits = _mix(_mix(seeds) + steps * np.uint64(_GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sequence_seed(seed: int, index: int) -> int:
    """The seed of the ``index``-th sequence of a request.

    Sequence 0 keeps the request's seed: the first of ``n`` completions is the one that ``n=1``
    gives. The seeds of the others have nothing to do with those of requests with nearby seeds.

    Args:
        seed: The request's seed.
        index: Which of the ``n`` sequences, from 0.

    Example:
        >>> sequence_seed(5, 0), sequence_seed(5, 1) != sequence_seed(6, 0)
        (5, True)
    """
    if index == 0:
        return seed
    return int(_mix(_mix(to_uint64([seed])) ^ to_uint64([index]))[0])


def to_uint64(values: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Seeds as an array; a negative one stands for its two's complement."""
    return np.array([value & _MASK for value in values], dtype=np.uint64)


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer, a bijection; multiplications wrap around."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
