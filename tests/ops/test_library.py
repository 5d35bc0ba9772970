# SPDX-License-Identifier: Apache-2.0
"""The ops library loads with any torch: it needs libtorch_cpu and no symbol of a CUDA build."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import torch

REPO_ROOT = Path(__file__).resolve().parents[2]
LIBRARY = importlib.util.find_spec("paged_kv._ops").origin


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_needs_libtorch_cpu_alone_of_torch():
    needed = re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", LIBRARY))
    assert "libtorch_cpu.so" in needed
    allowed = ("libtorch_cpu.so", "libstdc++.so", "libgcc_s.so", "libm.so", "libc.so", "ld-linux")
    assert all(name.startswith(allowed) for name in needed), needed


def test_uses_the_stable_abi_alone():
    """C functions of torch's shims that libtorch_cpu has: nothing that only a CUDA torch has."""
    undefined = re.findall(r" U ((?:aoti_)?torch_\w+|cuda\w+)", run("nm", "-D", LIBRARY))
    assert "aoti_torch_device_type_cuda" in undefined  # has cuda in its name, but is everywhere
    libtorch_cpu = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    assert set(undefined) <= set(run("nm", "-D", "--defined-only", libtorch_cpu).split())
    mangled = run("nm", "-D", "-C", "--undefined-only", LIBRARY)
    assert not re.search(r"\b(at|c10|torch)::", mangled)


def test_holds_no_path_of_the_build_machine():
    assert os.fsencode(REPO_ROOT) not in Path(LIBRARY).read_bytes()
