# SPDX-License-Identifier: Apache-2.0
"""Random numbers as a function of seed and position: pure, uniform, independent."""

from __future__ import annotations

import numpy as np

from paged_kv.engine.random_numbers import sequence_seed, to_uint64, uniform_numbers

RECORDED = [0.8833108082136426, 0.43152799704850997, 0.7497482413580301, 0.7741445495399422]
RECORDED_SEED = 15690285813532428630


def chi_squared(numbers, num_bins):
    counts = np.histogram(numbers, bins=num_bins, range=(0.0, 1.0))[0]
    mean = numbers.size / num_bins
    return ((counts - mean) ** 2 / mean).sum()


def grid(num_seeds, num_positions, first_seed=0):
    """``[num_seeds, num_positions]`` numbers of consecutive seeds."""
    seeds = to_uint64(range(first_seed, first_seed + num_seeds)).repeat(num_positions)
    return uniform_numbers(seeds, np.tile(np.arange(num_positions), num_seeds)).reshape(
        num_seeds, num_positions
    )


def test_values_are_fixed():
    """Recorded: another value means that every seed gives other texts than before."""
    numbers = uniform_numbers(to_uint64([0, 0, 1, -1]), [0, 1, 0, 7])
    assert numbers.tolist() == RECORDED
    assert sequence_seed(1, 3) == RECORDED_SEED


def test_numbers_are_in_the_unit_interval_with_53_bits():
    numbers = grid(100, 100)
    assert numbers.dtype == np.float64
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert np.array_equal(numbers * 2.0**53, np.floor(numbers * 2.0**53))
    assert len(np.unique(numbers)) == numbers.size


def test_numbers_are_uniform_along_positions_and_along_seeds():
    """0.999 quantile of 99 degrees of freedom: 148.2."""
    assert chi_squared(grid(1, 100_000), 100) < 148.2
    assert chi_squared(grid(100_000, 1), 100) < 148.2
    assert chi_squared(grid(300, 300, first_seed=-(2**63)), 100) < 148.2


def test_neighbours_are_independent():
    """Correlations of 90,000 pairs have a standard deviation of 1/300."""
    numbers = grid(300, 301) - 0.5
    shifted = [
        (numbers[:, :-1], numbers[:, 1:]),  # next position
        (numbers[:-1], numbers[1:]),  # next seed
        (numbers[:-1, 1:], numbers[1:, :-1]),  # next seed, position before
    ]
    for a, b in shifted:
        assert abs(12 * float((a * b).mean())) < 4 / 300


def test_a_sequence_of_a_request_has_its_own_numbers():
    seeds = [sequence_seed(seed, index) for seed in range(50) for index in range(50)]
    assert [sequence_seed(seed, 0) for seed in (0, 5, -3)] == [0, 5, -3]
    assert len(set(seeds)) == len(seeds)
    numbers = uniform_numbers(to_uint64(seeds), [0] * len(seeds))
    assert chi_squared(numbers, 20) < 43.8  # 0.999 quantile of 19 degrees


def test_negative_seeds_are_twos_complement():
    both = uniform_numbers(to_uint64([-1, 2**64 - 1]), [3, 3])
    assert both[0] == both[1]
