# SPDX-License-Identifier: Apache-2.0
"""The emulated ops under AddressSanitizer and UBSan: the cases of tests/ops, driven from Python.

They run in a process of its own that has the sanitizer's runtime preloaded; so torch's memory comes
from the sanitizer's allocator, with red zones around each tensor.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
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


def run_python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Python with the sanitizer's runtime; what leaks is Python's and torch's and not looked at."""
    assert LIBRARY.is_file(), f"{LIBRARY} is missing: run `make test`"
    compiler = os.environ.get("CXX", "g++")
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PAGED_KV_EMULATED_OPS": str(LIBRARY),
        "OMP_NUM_THREADS": "1",
    }
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=False, capture_output=True, text=True, cwd=REPO_ROOT, env=environment, timeout=900,
    )  # fmt: skip


def test_emulated_cases_are_clean():
    options = ("-q", "-p", "no:cacheprovider", "-k", "emulated")
    result = run_python("-m", "pytest", *options, "tests/ops")
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert "Sanitizer" not in result.stdout + result.stderr


def test_an_overrun_of_a_kernel_is_noticed():
    """The same call on an array that is long enough is clean."""
    assert run_python("-c", OVERRUN, LIBRARY, 16).stdout == "done\n"
    result = run_python("-c", OVERRUN, LIBRARY, 10)
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr
    assert "gather_block_tables_kernel" in result.stderr
