# SPDX-License-Identifier: Apache-2.0
"""What nvcc made of the kernels: registers, stack, shared memory, occupancy, width of loads.

tests/cuda/kernel_resources.txt is the agreed state; `python tests/cuda_binary.py` rewrites it.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest
from cuda_binary import ARCHS, TABLE, Kernel, compiler_release, parse_table, read_kernels, table
from cuda_build import NVCC, REPO_ROOT, cuda_library, needs_nvcc

pytestmark = needs_nvcc

# Kernels (expressions for their names) that move 16 bytes with one instruction.
LOADS_128_BITS: tuple[str, ...] = (
    r"copy_blocks_kernel<uint4>",
    r"gather_cache_kernel<.*CopyBits<.*>",
    r"paged_attention_kernel<.*>",
    r"paged_attention_varlen_kernel<(\w+), \1>",
    r"reshape_and_cache(_flash)?_kernel<.*>",
)
STORES_128_BITS: tuple[str, ...] = (
    r"copy_blocks_kernel<uint4>",
    r"reshape_and_cache_kernel<.*>",
    r"reshape_and_cache_flash_kernel<.*CopyBits<.*>",
)


def without_wide_access(kernels: list[Kernel], names: tuple[str, ...], opcode: str) -> list[str]:
    """The kernels among `names` that have no such instruction of 128 bits."""
    wide = re.compile(rf"{opcode}\b.*\.128\b")
    return [
        f"{kernel.arch} {kernel.name}"
        for kernel in kernels
        if any(re.fullmatch(name, kernel.name) for name in names)
        and not any(wide.match(op) for op in kernel.memory_opcodes)
    ]


def beyond_table(kernels: list[Kernel], rows: dict, *, compare_registers: bool) -> list[str]:
    """Kernels that the table has not or gives less, and rows without a kernel."""
    errors = [
        f"not in the build: {key}" for key in rows.keys() - {(k.name, k.arch) for k in kernels}
    ]
    for kernel in kernels:
        row = rows.get((kernel.name, kernel.arch))
        if row is None:
            errors.append(f"not in the table: {kernel.arch} {kernel.name}")
            continue
        threads, registers, shared = row
        if compare_registers and kernel.registers > registers:
            errors.append(
                f"{kernel.arch} {kernel.name}: {kernel.registers} registers, table {registers}"
            )
        if (kernel.threads, kernel.shared_bytes) != (threads, shared):
            errors.append(f"{kernel.arch} {kernel.name}: threads or shared memory changed")
    return sorted(errors)


@pytest.fixture(scope="module")
def kernels():
    return read_kernels(cuda_library())


@pytest.fixture(scope="module")
def planted_binary(tmp_path_factory):
    binary = tmp_path_factory.mktemp("planted") / "planted.o"
    source = REPO_ROOT / "tests/cuda/planted_resources.cu"
    numbers = [arch.removeprefix("sm_") for arch in ARCHS]
    architectures = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    command = [NVCC, *architectures, "-c", "-o", str(binary), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return read_kernels(binary)


@pytest.fixture(scope="module")
def planted(planted_binary):
    """The kernels of planted_resources.cu by name, for sm_80."""
    return {kernel.name: kernel for kernel in planted_binary if kernel.arch == "sm_80"}


def test_every_kernel_is_built_for_both_architectures(kernels):
    names = [{kernel.name for kernel in kernels if kernel.arch == arch} for arch in ARCHS]
    assert names[0] == names[1]
    assert len(kernels) == len(ARCHS) * len(names[0]), "two kernels have one name"
    sources = (path.read_text(encoding="utf-8") for path in (REPO_ROOT / "cuda/src").rglob("*.cu*"))
    declared = {name for text in sources for name in re.findall(r"\b(\w+_kernel)\(", text)}
    assert {name.partition("<")[0] for name in names[0]} == declared


def test_no_stack_and_no_spills(kernels):
    assert not {f"{k.arch} {k.name}": k.problems for k in kernels if k.problems}


def test_resources_are_those_of_the_table(kernels):
    """Registers depend on the compiler: they are compared for the release that wrote the table."""
    release, rows = parse_table(TABLE.read_text())
    same_release = release == compiler_release(NVCC)
    assert not beyond_table(kernels, rows, compare_registers=same_release)


def test_wide_loads_and_stores(kernels):
    assert not without_wide_access(kernels, LOADS_128_BITS, "LDG")
    assert not without_wide_access(kernels, STORES_128_BITS, "STG")
    for name in LOADS_128_BITS + STORES_128_BITS:
        assert any(re.fullmatch(name, kernel.name) for kernel in kernels), f"no kernel {name}"


def test_every_kernel_fits_a_multiprocessor(kernels):
    assert not [f"{k.arch} {k.name}" for k in kernels if k.blocks_per_sm == 0]


@pytest.mark.parametrize("name", ["spilling_kernel", "local_array_kernel"])
def test_stack_is_noticed(planted, name):
    problems = planted[name].problems
    assert "bytes of stack" in problems[0]
    assert any(problem.startswith("LDL") for problem in problems)
    assert any(problem.startswith("STL") for problem in problems)


def test_shared_memory_is_that_of_the_source(planted_binary):
    sizes = {k.arch: k.shared_bytes for k in planted_binary if k.name == "shared_kernel"}
    assert sizes == dict.fromkeys(ARCHS, 4096)


def test_narrow_access_is_noticed(planted):
    kernels = list(planted.values())
    copies = ("scalar_copy_kernel", "vector_copy_kernel")
    for opcode in ("LDG", "STG"):
        assert without_wide_access(kernels, copies, opcode) == ["sm_80 scalar_copy_kernel"]
    assert planted["vector_copy_kernel"].problems == []


def test_each_change_of_the_table_is_noticed(planted):
    kernel = planted["vector_copy_kernel"]
    row = kernel.threads, kernel.registers, kernel.shared_bytes
    rows = {(kernel.name, "sm_80"): row}
    assert beyond_table([kernel], rows, compare_registers=True) == []
    for changed in (
        replace(kernel, registers=kernel.registers + 1),
        replace(kernel, shared_bytes=16),
        replace(kernel, threads=64),
        replace(kernel, name="another_kernel"),
    ):
        assert beyond_table([changed], rows, compare_registers=True)
    assert beyond_table([], rows, compare_registers=True)


def test_table_is_read_as_it_is_written(planted):
    both = [replace(kernel, arch=arch) for kernel in planted.values() for arch in ARCHS]
    release, rows = parse_table(table(both, "13.0"))
    assert release == "13.0"
    assert rows == {(k.name, k.arch): (k.threads, k.registers, k.shared_bytes) for k in both}


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks"),
    [
        (32, 0, 1024, 2),  # threads
        (32, 0, 128, 16),
        (33, 0, 128, 12),  # registers, in units of 8
        (255, 0, 256, 1),
        (32, 40 * 1024, 128, 4),  # shared memory; one KB a block is the system's
        (16, 0, 32, 32),  # blocks
    ],
)
def test_occupancy(registers, shared, threads, blocks):
    kernel = Kernel("k", "sm_80", registers, 0, shared, threads, frozenset())
    assert kernel.blocks_per_sm == blocks
    assert kernel.occupancy == blocks * threads / 2048
