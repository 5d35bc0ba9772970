# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of the core, each backend against hashlib."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import paged_kv
from paged_kv._core import sha256, sha256_backends


@pytest.mark.parametrize("backend", [None, *sorted(sha256_backends())])
def test_every_backend_gives_the_digests_of_hashlib(backend):
    """All lengths around the padding of one to five chunks, and a few long messages."""
    rng = random.Random(0)
    for num_bytes in [*range(301), 4095, 4096, 65_537]:
        message = rng.randbytes(num_bytes)
        assert sha256(message, backend) == hashlib.sha256(message).digest(), num_bytes


def test_the_cpus_sha_instructions_are_used_where_there_are_some():
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    expected = ["sha-ni", "portable"] if "sha_ni" in flags else ["portable"]
    assert run_backends("0") == expected


def test_the_portable_backend_can_be_forced():
    assert run_backends("1")[0] == "portable"


def run_backends(portable: str) -> list[str]:
    """`sha256_backends()` of a process with the environment variable set."""
    package_folder = str(Path(paged_kv.__file__).resolve().parent.parent)
    env = {**os.environ, "PAGED_KV_PORTABLE_SHA256": portable, "PYTHONPATH": package_folder}
    code = "from paged_kv._core import sha256_backends; print(*sha256_backends())"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend: expected one of .*, got 'md5'"):
        sha256(b"", "md5")
