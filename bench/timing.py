# SPDX-License-Identifier: Apache-2.0
"""Timing on a machine that is shared and noisy.

Candidates of one case run interleaved (A B A B ...), so that a slow phase of the machine hits all
of them; medians and the spread are reported, and speed is a ratio within the same run.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from machine_probe import Bound

    Candidate = Callable[[], object]
    Sampler = Callable[[], float]

MIN_ROUNDS = 5  # of samples, however slow
MIN_SAMPLE_S = 2e-3  # a sample repeats a fast candidate until it lasts this long


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call of one candidate: median, and the 10th and 90th percentile."""

    median_s: float
    p10_s: float
    p90_s: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case.

    Attributes:
        case: What was run, in words and sizes.
        ours: Our timing.
        references: What ours is compared with, in words, and its timing in the same run.
        rate: Work per second of ours, in the unit ``rate_unit``.
        rate_unit: For example ``GB/s`` or ``Mblocks/s``.
        bound: The least time possible on this machine, where that was measured.
    """

    case: str
    ours: Timing
    references: Mapping[str, Timing]
    rate: float
    rate_unit: str
    bound: Bound | None = None

    @property
    def speedups(self) -> dict[str, float]:
        """How many times faster than each reference; below 1: slower."""
        return {
            name: timing.median_s / self.ours.median_s for name, timing in self.references.items()
        }

    @property
    def times_bound(self) -> float | None:
        """Ours as a multiple of the bound; 1 cannot be beaten."""
        return self.bound and self.ours.median_s / self.bound.timing.median_s

    def __str__(self) -> str:
        text = f"{self.case:48s} {_time(self.ours)}  {self.rate:8.2f} {self.rate_unit:10s}"
        parts = [
            f"{speedup:6.2f}x of {name} ({_time(self.references[name]).strip()})"
            for name, speedup in self.speedups.items()
        ]
        if self.bound:
            bound = f"{self.bound.limit} bound ({_time(self.bound.timing).strip()})"
            parts.append(f"ours / {bound} = {self.times_bound:.2f}")
        return f"{text} {', '.join(parts)}"

    def as_dict(self) -> dict[str, object]:
        """The row as JSON can hold it."""
        derived: dict[str, object] = {"speedups": self.speedups}
        if self.bound:
            derived |= {"bound_limit": self.bound.limit, "times_bound": self.times_bound}
        return {**asdict(self), **derived}


def _time(timing: Timing) -> str:
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((1.0, "s "), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))
        if timing.median_s * scale >= 1 or unit == "ns"
    )
    low, median, high = (value * scale for value in (timing.p10_s, timing.median_s, timing.p90_s))
    return f"{median:7.2f} {unit} [{low:.2f} .. {high:.2f}]"


def time_interleaved(candidates: Mapping[str, Candidate], num_samples: int) -> dict[str, Timing]:
    """Times all candidates, taking turns.

    Args:
        candidates: Name to function; each is called without arguments.
        num_samples: Samples per candidate. Each is one call, or as many as fill ``MIN_SAMPLE_S``.

    Returns:
        The timing of each candidate.
    """
    samplers = {name: call_sampler(function) for name, function in candidates.items()}
    return take_turns(samplers, num_samples)


def take_turns(
    samplers: Mapping[str, Sampler],
    num_samples: int,
    *,
    max_s: float = math.inf,
    settle_s: float = 0.0,
) -> dict[str, Timing]:
    """Takes samples of all candidates, one of each and again.

    Args:
        samplers: Name to a function that takes one sample and gives the seconds of a call.
        num_samples: Samples per candidate.
        max_s: After these seconds there are no more rounds than `MIN_ROUNDS`.
        settle_s: Seconds of sleep before each sample. OpenMP's threads wait for more work in a
            loop, for some milliseconds, and would slow down a candidate that does not use them.

    Returns:
        The timing of each candidate.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    end = time.perf_counter() + max_s
    gc.disable()
    try:
        for i in range(num_samples):
            if i >= MIN_ROUNDS and time.perf_counter() > end:
                break
            for name, sampler in samplers.items():
                time.sleep(settle_s)
                samples[name].append(sampler())
    finally:
        gc.enable()
    return {name: summary(values) for name, values in samples.items()}


def call_sampler(function: Candidate, *, warm_up: bool = False) -> Sampler:
    """Samples of a function: one call each, or as many as fill ``MIN_SAMPLE_S``.

    Args:
        function: Called without arguments.
        warm_up: Whether one call that does not count goes before those of a sample, so that data
            that fits into the CPU's cache is there.
    """
    function()
    num_calls = max(1, int(MIN_SAMPLE_S / max(_seconds_per_call(function, 1), 1e-9)))

    def sample() -> float:
        if warm_up:
            function()
        return _seconds_per_call(function, num_calls)

    return sample


def summary(values: list[float]) -> Timing:
    """Median and percentiles of samples in seconds."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Timing(statistics.median(values), deciles[0], deciles[-1], len(values))


def machine() -> dict[str, str | int]:
    """What a result must be read with: processor, cores, torch, commit."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], check=False, capture_output=True, text=True
    )
    return {
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count() or 0,
        "num_threads": torch.get_num_threads(),
        "isa": os.environ.get("PAGED_KV_ISA", "chosen by the library"),
        "load_average": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _seconds_per_call(function: Candidate, num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        function()
    return (time.perf_counter() - start) / num_calls


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
