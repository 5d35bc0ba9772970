# SPDX-License-Identifier: Apache-2.0
"""``paged-kv info``: what is installed and what it can do here."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

import paged_kv
import paged_kv.ops
from paged_kv._core import build_info, sha256_backends
from paged_kv._library import op_names

__all__ = ["info"]

# Dispatch keys of the backends that an op may have.
_BACKENDS = ("CPU", "CUDA")
# Features that decide how fast attention runs on a CPU, as the kernel names them.
_CPU_FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16",
    "asimd", "sve", "bf16",
)  # fmt: skip


def info() -> int:
    """Print the report on stdout; return the exit status 0."""
    for name, value in _environment().items():
        _print_row(name, value)
    _print_row("op", "has kernels for")
    for op, backends in backends_of_ops().items():
        _print_row(f"  {op}", ", ".join(backends) or "none")
    return 0


def backends_of_ops() -> dict[str, list[str]]:
    """The backends for which each op of the library has a kernel in this process."""
    return {name: [key for key in _BACKENDS if _has_kernel(name, key)] for name in op_names()}


def _has_kernel(op: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"paged_kv::{op}", key))


def _environment() -> dict[str, str]:
    ops = backends_of_ops().values()
    cuda_kernels = "yes" if any("CUDA" in backends for backends in ops) else "no"
    return {
        "paged_kv": paged_kv.__version__,
        **{f"  {name}": value or "none" for name, value in build_info().items()},
        "CUDA kernels": f"{cuda_kernels} (torch built for CUDA: {torch.version.cuda or 'no'})",
        "torch": torch.__version__,
        "Python": f"{platform.python_version()} on {sys.platform}",
        "CPU": platform.machine(),
        "CPU features": " ".join(_cpu_features()) or "unknown",
        "torch CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "SHA-256": sha256_backends()[0],
        "threads": str(torch.get_num_threads()),
    }


def _cpu_features() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith(("flags", "Features")):
            present = set(line.partition(":")[2].split())
            return [feature for feature in _CPU_FEATURES if feature in present]
    return []


def _print_row(name: str, value: str) -> None:
    print(f"{name:<28} {value}")
