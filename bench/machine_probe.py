# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at most, measured: the bound that a kernel's time is compared with.

Two probes in ``bench/probe/machine_probe.cpp``, which is compiled at first use (into ``build/``)
with the C++ compiler of this machine and ``-march=native``:

* `read_seconds`: threads read the buffers that a kernel reads, each its share from front to back.
* `fma_seconds_per_flop`: threads run fp32 multiply-adds on registers alone.

No kernel can be faster than the slower of the two: `Bound`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from timing import MIN_SAMPLE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from timing import Timing

SOURCE = Path(__file__).parent / "probe" / "machine_probe.cpp"
BUILD = Path(__file__).resolve().parents[1] / "build" / "bench"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-pthread")
FMA_STEPS = 1 << 18  # of one sample: a millisecond or two


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time a kernel can take here.

    Attributes:
        read: Seconds to read the bytes that the kernel reads.
        compute: Seconds for as many operations as the kernel's, as fp32 multiply-adds.
        compute_name: How these were measured.
    """

    read: Timing
    compute: Timing
    compute_name: str = "FMA"

    @property
    def limit(self) -> str:
        """Which of the two binds."""
        return "read" if self.read.median_s >= self.compute.median_s else self.compute_name

    @property
    def timing(self) -> Timing:
        """The one that binds."""
        return self.read if self.limit == "read" else self.compute


def read_sampler(
    buffers: Sequence[Tensor], num_threads: int, *, warm_up: bool = False
) -> Callable[[], float]:
    """A function that gives the seconds of reading all bytes of contiguous ``buffers`` once.

    With ``warm_up`` they are read once more before, as `timing.call_sampler` does.
    """
    probe = _library().paged_kv_probe_read
    pointers = (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
    sizes = (ctypes.c_int64 * len(buffers))(*(buffer.nbytes for buffer in buffers))
    once = probe(pointers, sizes, len(buffers), num_threads, 1)
    repeats = max(1, int(MIN_SAMPLE_S / max(once, 1e-9)))

    def sample() -> float:
        if warm_up:
            probe(pointers, sizes, len(buffers), num_threads, 1)
        return probe(pointers, sizes, len(buffers), num_threads, repeats) / repeats

    return sample


def fma_sampler(flops: int, num_threads: int) -> Callable[[], float]:
    """A function that gives the seconds of ``flops`` operations, from a run of `FMA_STEPS`."""
    library = _library()
    measured = FMA_STEPS * num_threads * library.paged_kv_probe_flops_per_step()

    def sample() -> float:
        return library.paged_kv_probe_fma(FMA_STEPS, num_threads) * flops / measured

    return sample


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_build()))
    library.paged_kv_probe_read.restype = ctypes.c_double
    library.paged_kv_probe_read.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_int64),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
    ]
    library.paged_kv_probe_fma.restype = ctypes.c_double
    library.paged_kv_probe_fma.argtypes = [ctypes.c_int64, ctypes.c_int]
    library.paged_kv_probe_flops_per_step.restype = ctypes.c_int64
    return library


def _build() -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        msg = "the suite attention compiles its probes: it needs g++, c++ or $CXX"
        raise RuntimeError(msg)
    # The CPU is part of the name: -march=native code of one machine may not run on another.
    cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].partition("flags")[2]
    name = hashlib.sha256("\0".join([SOURCE.read_text(), *FLAGS, compiler, cpu]).encode())
    target = BUILD / f"machine_probe-{name.hexdigest()[:16]}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, SOURCE, "-o", unfinished], check=True)
        unfinished.replace(target)
    return target
