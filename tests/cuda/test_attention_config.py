# SPDX-License-Identifier: Apache-2.0
"""Python and C++ choose between paged_attention_v1 and _v2 alike."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

from paged_kv import attention

REPO_ROOT = Path(__file__).resolve().parents[2]
LIBRARY = REPO_ROOT / "build/cpp-release/tests/cuda/libpaged_kv_cuda_attention_config.so"


def test_the_choice_of_v1_is_the_same():
    """On every device: shared memory of 48 KB and more never decides."""
    assert LIBRARY.is_file(), f"{LIBRARY} is missing: run `make test`"
    native = ctypes.CDLL(str(LIBRARY)).use_v1
    native.restype = ctypes.c_bool
    lengths = (0, 1, 511, 512, 513, 1024, 8191, 8192, 8193, 100_000)
    for max_seq_len, num_seqs, num_heads, head_size, shared_kb in itertools.product(
        lengths, (0, 1, 2, 16, 64, 65, 512, 513), (1, 8, 32), (32, 256), (48, 99, 163, 227)
    ):
        arguments = (max_seq_len, num_seqs, num_heads, head_size, shared_kb * 1024)
        chosen = native(*(ctypes.c_int64(argument) for argument in arguments))
        assert chosen == attention.use_v1(max_seq_len, num_seqs, num_heads), arguments
