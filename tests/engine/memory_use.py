# SPDX-License-Identifier: Apache-2.0
"""How much memory this process holds, exactly enough to see a leak of a few bytes a request."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``; bytes in use: `uordblks` of the heap, `hblkhd` of mmap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class MemoryUse:
    """What is in use at one moment, or the difference of two.

    Attributes:
        num_python_objects: Live small blocks of Python's allocator: nearly every object has one.
        malloc_bytes: Live bytes of glibc's malloc: the C++ core, tensors, larger Python objects.
        resident_bytes: What the system counts. It moves by megabytes for reasons of its own.
    """

    num_python_objects: int
    malloc_bytes: int
    resident_bytes: int

    @classmethod
    def now(cls) -> MemoryUse:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return cls(sys.getallocatedblocks(), _malloc_bytes(), pages * 4096)

    def __sub__(self, before: MemoryUse) -> MemoryUse:
        return MemoryUse(
            self.num_python_objects - before.num_python_objects,
            self.malloc_bytes - before.malloc_bytes,
            self.resident_bytes - before.resident_bytes,
        )


def _malloc_bytes() -> int:
    """0 where the C library does not tell."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd
