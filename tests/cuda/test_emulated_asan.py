# SPDX-License-Identifier: Apache-2.0
"""The emulated ops under AddressSanitizer and UBSan: the cases of tests/ops, driven from Python.

They run in a process of its own that has the sanitizer's runtime preloaded; so torch's memory comes
from the sanitizer's allocator, with red zones around each tensor.
"""

from __future__ import annotations

import os
import subprocess

from emulated_cases import REPO_ROOT, run_emulated_cases, run_python

LIBRARY = REPO_ROOT / "build/cpp-asan/tests/cuda/paged_kv_emulated_ops.so"

# The table's last 6 entries are past the end of an array of 10.
OVERRUN = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
memory = libc.malloc(ctypes.c_size_t(int(sys.argv[2]) * 4))
table = torch.frombuffer((ctypes.c_int32 * 16).from_address(memory), dtype=torch.int32)
table[:10] = 1
row = torch.zeros(1, dtype=torch.int32)
out = torch.zeros(1, 16, dtype=torch.int32)
torch.ops.paged_kv_emulated.gather_block_tables(table.view(1, 16), row, row + 16, out)
print("done")
"""


def sanitizer() -> dict[str, str]:
    """The environment that preloads it; leaks are Python's and torch's and not looked at."""
    assert LIBRARY.is_file(), f"{LIBRARY} is missing: run `make test`"
    compiler = os.environ.get("CXX", "g++")
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    return {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PAGED_KV_EMULATED_OPS": str(LIBRARY),
    }


def test_emulated_cases_are_clean():
    result = run_emulated_cases(**sanitizer())
    assert " passed" in result.stdout
    assert "Sanitizer" not in result.stdout + result.stderr


def test_an_overrun_of_a_kernel_is_noticed():
    """The same call on an array that is long enough is clean."""
    assert run_python("-c", OVERRUN, LIBRARY, 16, **sanitizer()).stdout == "done\n"
    result = run_python("-c", OVERRUN, LIBRARY, 10, **sanitizer())
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr
    assert "gather_block_tables_kernel" in result.stderr
