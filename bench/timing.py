# SPDX-License-Identifier: Apache-2.0
"""Timing on a machine that is shared and noisy.

Candidates of one case run interleaved (A B A B ...), so that a slow phase of the machine hits all of
them; medians and the spread are reported, and speed is given as a ratio within the same run.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass
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
    return {name: _summary(values) for name, values in samples.items()}


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


def _summary(values: list[float]) -> Timing:
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Timing(statistics.median(values), deciles[0], deciles[-1])


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
