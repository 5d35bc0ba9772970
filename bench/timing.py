# SPDX-License-Identifier: Apache-2.0
"""Timing on a machine that is shared and noisy.

Candidates of one case run interleaved (A B A B ...), so that a slow phase of the machine hits all
of them; medians and the spread are reported, and speed is a ratio within the same run.
"""

from __future__ import annotations

import gc
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

    Candidate = Callable[[], object]

MIN_SAMPLE_S = 2e-3  # a sample repeats a fast candidate until it lasts this long


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call of one candidate: median, and the 10th and 90th percentile."""

    median_s: float
    p10_s: float
    p90_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case.

    Attributes:
        case: What was run, in words and sizes.
        ours: Our timing.
        peer: What ours is compared with, in words.
        peer_timing: Its timing, in the same run.
        rate: Work per second of ours, in the unit ``rate_unit``.
        rate_unit: For example ``GB/s`` or ``Mblocks/s``.
    """

    case: str
    ours: Timing
    peer: str
    peer_timing: Timing
    rate: float
    rate_unit: str

    @property
    def speedup(self) -> float:
        """How many times faster than the peer; below 1: slower."""
        return self.peer_timing.median_s / self.ours.median_s

    def __str__(self) -> str:
        return (
            f"{self.case:44s} {_time(self.ours)}  {self.rate:8.2f} {self.rate_unit:10s}"
            f" {self.speedup:6.2f}x of {self.peer} ({_time(self.peer_timing)})"
        )

    def as_dict(self) -> dict[str, object]:
        """The row as JSON can hold it."""
        return {**asdict(self), "speedup": self.speedup}


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
    calls = {name: _calls_per_sample(function) for name, function in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    gc.disable()
    try:
        for _ in range(num_samples):
            for name, function in candidates.items():
                samples[name].append(_seconds_per_call(function, calls[name]))
    finally:
        gc.enable()
    return {name: summary(values) for name, values in samples.items()}


def summary(values: list[float]) -> Timing:
    """Median and percentiles of samples in seconds."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Timing(statistics.median(values), deciles[0], deciles[-1])


def machine() -> dict[str, str | int]:
    """What a result must be read with: processor, cores, torch, commit."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], check=False, capture_output=True, text=True
    )
    return {
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count() or 0,
        "num_threads": torch.get_num_threads(),
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


def _calls_per_sample(function: Candidate) -> int:
    function()  # warm-up
    return max(1, int(MIN_SAMPLE_S / max(_seconds_per_call(function, 1), 1e-9)))


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
