# SPDX-License-Identifier: Apache-2.0
"""The ops library loads with any torch: it needs libtorch_cpu and no symbol of a CUDA build.

That holds for the library of the installed package and for one with CUDA kernels alike.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_build import REPO_ROOT, cuda_library, ops_with_cuda_kernel


@pytest.fixture(params=["installed", "with CUDA"])
def library(request) -> Path:
    if request.param == "with CUDA":
        return cuda_library()
    return Path(importlib.util.find_spec("paged_kv._ops").origin)


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def load_and_print(library: Path, expression: str) -> object:
    """The value of an expression, in a process of its own that has loaded this library alone."""
    code = f"import json, torch\ntorch.ops.load_library({str(library)!r})\n{expression}"
    return json.loads(run(sys.executable, "-c", code))


def test_needs_libtorch_cpu_alone_of_torch(library):
    needed = re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", library))
    assert "libtorch_cpu.so" in needed
    allowed = (
        *("libtorch_cpu.so", "libstdc++.so", "libgcc_s.so", "libm.so", "libc.so", "ld-linux"),
        *("libdl.so", "librt.so", "libpthread.so"),  # what static cudart needs of an older glibc
    )
    assert all(name.startswith(allowed) for name in needed), needed


def test_uses_the_stable_abi_alone(library):
    """C functions of torch's shims that libtorch_cpu has: nothing that only a CUDA torch has."""
    undefined = re.findall(r" U ((?:aoti_)?torch_\w+|cuda\w+)", run("nm", "-D", library))
    assert "aoti_torch_device_type_cuda" in undefined  # has cuda in its name, but is everywhere
    libtorch_cpu = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    assert set(undefined) <= set(run("nm", "-D", "--defined-only", libtorch_cpu).split())
    mangled = run("nm", "-D", "-C", "--undefined-only", library)
    assert not re.search(r"\b(at|c10|torch)::", mangled)


def test_exports_no_symbol_of_cuda(library):
    """Its static CUDA runtime must not be taken for that of another library in the process."""
    exported = run("nm", "-D", "-C", "--defined-only", library)
    assert not re.search(r"cuda|_kernel", exported, re.IGNORECASE)


def test_holds_no_path_of_the_build_machine(library):
    assert os.fsencode(REPO_ROOT) not in library.read_bytes()


def test_cuda_library_registers_each_kernel_on_a_torch_without_cuda():
    expression = (
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "print(json.dumps({key: [op for op in torch._C._dispatch_get_all_op_names()"
        "  if op.startswith('paged_kv::') and has(op, key)] for key in ('CPU', 'CUDA')}))"
    )
    registered = load_and_print(cuda_library(), expression)
    assert set(registered["CUDA"]) == {f"paged_kv::{op}" for op in ops_with_cuda_kernel()}
    assert set(registered["CPU"]) > set(registered["CUDA"])


def test_cuda_kernel_refuses_a_tensor_of_the_cpu():
    """Whoever gets past the dispatcher meets the op's own check, not a launch on host memory."""
    expression = """
table = torch.zeros(1, 4, dtype=torch.int32)
rows = torch.zeros(1, dtype=torch.int32)
op = torch.ops.paged_kv.gather_block_tables.default
try:
    op._op_dk(torch._C.DispatchKey.CUDA, table, rows, rows, table.clone())
except RuntimeError as error:
    print(json.dumps(str(error)))
"""
    message = load_and_print(cuda_library(), expression)
    assert message == "table: expected a CUDA tensor, like the other arguments"
