# SPDX-License-Identifier: Apache-2.0
"""Timing of GPU kernels: CUDA events, a full queue, data that is in no cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from timing import Timing, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Call = Callable[[], object]

MIN_CALLS_PER_SAMPLE = 8
CLOCK_HZ = 2.0e9  # more than any GPU has now: a pause is never shorter than asked for
COPY_BYTES = 1 << 30


def num_rotations(bytes_per_call: int, l2_bytes: int) -> int:
    """Sets of buffers that calls take in turn, so that none finds its data in the L2 cache.

    Between two uses of a set, twice the size of the cache is touched. One set does for a call that
    touches as much itself, and for one that is a matter of latency (0 bytes).
    """
    if bytes_per_call == 0 or bytes_per_call >= 2 * l2_bytes:
        return 1
    return 1 + -(-2 * l2_bytes // bytes_per_call)


def time_calls(calls: Sequence[Call], num_samples: int) -> Timing:
    """Seconds per call on the GPU, without the time that Python needs to launch it.

    The GPU is held busy until all calls of a sample are queued, so they run back to back.
    """
    repeats = -(-MIN_CALLS_PER_SAMPLE // len(calls))
    queued = [call for _ in range(repeats) for call in calls]
    for call in calls:  # warm-up
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in queued:
        call()
    pause_cycles = int((2 * (time.perf_counter() - start) + 50e-6) * CLOCK_HZ)
    torch.cuda.synchronize()
    samples = []
    for _ in range(num_samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(pause_cycles)
        begin.record()
        for call in queued:
            call()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3 / len(queued))
    return summary(samples)


def copy_bytes_per_second(num_samples: int) -> float:
    """Bytes read and written a second by a plain copy: the bound that rates are compared with."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    timing = time_calls([lambda: target.copy_(source)], num_samples)
    return 2 * COPY_BYTES / timing.median_s
