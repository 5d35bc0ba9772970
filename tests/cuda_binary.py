# SPDX-License-Identifier: Apache-2.0
"""What a compiled CUDA binary says about its kernels, read with cuobjdump and nvdisasm.

``python tests/cuda_binary.py`` writes tests/cuda/kernel_resources.txt from build/cuda.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]
TABLE = REPO_ROOT / "tests/cuda/kernel_resources.txt"
LIBRARY = REPO_ROOT / "build/cuda/cpp/ops/_ops.so"
ARCHS = ("sm_80", "sm_90")

# Of one multiprocessor (CUDA programming guide, "Technical Specifications per Compute Capability").
SHARED_BYTES = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}
RESERVED_SHARED_BYTES_A_BLOCK = 1024  # cuobjdump counts them from sm_90 on, if there are others
NUM_REGISTERS = 65536
MAX_THREADS = 2048
MAX_BLOCKS = 32
WARP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Kernel:
    """One ``__global__`` function, or one instantiation of it, for one architecture.

    Attributes:
        name: Without namespaces and parameters: ``copy_kernel<__half, 16>``.
        arch: ``sm_80``.
        registers: Of a thread.
        stack_bytes: Stack and local memory of a thread; spilled registers are there, too.
        shared_bytes: Static shared memory of a block.
        threads: The largest block that it was compiled for (``__launch_bounds__``).
        memory_opcodes: Its SASS instructions that load or store, with their modifiers.
    """

    name: str
    arch: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    memory_opcodes: frozenset[str]

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that fit on a multiprocessor at a time, without dynamic shared memory."""
        warps = -(-self.threads // WARP_SIZE)
        registers = warps * WARP_SIZE * (-(-self.registers // 8) * 8)
        shared = self.shared_bytes + RESERVED_SHARED_BYTES_A_BLOCK
        return min(
            NUM_REGISTERS // registers,
            SHARED_BYTES[self.arch] // shared,
            MAX_THREADS // (warps * WARP_SIZE),
            MAX_BLOCKS,
        )

    @property
    def occupancy(self) -> float:
        """Threads at a time, as a part of what a multiprocessor can hold."""
        return self.blocks_per_sm * self.threads / MAX_THREADS

    @property
    def problems(self) -> list[str]:
        """What no kernel may have."""
        found = [f"{self.stack_bytes} bytes of stack"] if self.stack_bytes else []
        return found + sorted(op for op in self.memory_opcodes if op.startswith(("LDL", "STL")))


def read_kernels(binary: Path) -> list[Kernel]:
    """All kernels of a library or cubin, sorted by architecture and name."""
    threads = _threads(binary)
    opcodes = _memory_opcodes(binary)
    usage = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
    kernels, arch, symbol = [], "", ""
    for line in _lines("cuobjdump", "-res-usage", binary):
        if match := re.match(r"arch = (sm_\w+)", line):
            arch = match[1]
        elif match := re.match(r" Function (\S+):", line):
            symbol = match[1]
        elif match := usage.search(line):
            registers, stack, shared, local = map(int, match.groups())
            if shared and arch >= "sm_90":
                shared -= RESERVED_SHARED_BYTES_A_BLOCK
            key = arch, symbol
            kernels.append((key, registers, stack + local, shared))
    names = _demangled([symbol for (_, symbol), *_ in kernels])
    return sorted(
        (
            Kernel(names[key[1]], key[0], *resources, threads[key], frozenset(opcodes[key]))
            for key, *resources in kernels
        ),
        key=lambda kernel: (kernel.arch, kernel.name),
    )


def compiler_release(nvcc: str) -> str:
    """``13.0``: what registers are compared for."""
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"release ([\d.]+)", text)[1]


def table(kernels: list[Kernel], release: str) -> str:
    """The text of TABLE: one line a kernel, with both architectures side by side."""
    by_name = defaultdict(dict)
    for kernel in kernels:
        by_name[kernel.name][kernel.arch] = kernel
    lines = [
        f"# Resources of the kernels of _ops.so, nvcc {release}. Written by tests/cuda_binary.py.",
        "# registers a thread, bytes of static shared memory, blocks a multiprocessor, occupancy;",
        "# blocks and occupancy are those without dynamic shared memory.",
        "#         sm_80                  sm_90",
        "# threads   regs shared blk  occ   regs shared blk  occ  kernel",
    ]
    for name, archs in sorted(by_name.items()):
        cells = [_cell(archs[arch]) for arch in ARCHS]
        lines.append(f"{archs[ARCHS[0]].threads:9d}   {'   '.join(cells)}  {name}")
    return "\n".join(lines) + "\n"


def _cell(kernel: Kernel) -> str:
    return (
        f"{kernel.registers:4d} {kernel.shared_bytes:6d} {kernel.blocks_per_sm:3d} "
        f"{kernel.occupancy:4.0%}"
    )


def parse_table(text: str) -> tuple[str, dict[tuple[str, str], tuple[int, int, int]]]:
    """The compiler release, and (kernel, arch) -> (threads, registers, shared bytes)."""
    release = re.search(r"nvcc ([\d.]+)\.", text)[1]
    rows = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        threads, *cells, name = line.split(maxsplit=1 + 4 * len(ARCHS))
        for i, arch in enumerate(ARCHS):
            registers, shared = cells[4 * i : 4 * i + 2]
            rows[name, arch] = int(threads), int(registers), int(shared)
    return release, rows


def _tool(name: str) -> str:
    """From PyPI's nvidia-cuda-<name>, else from a toolkit."""
    folder = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin")
    path = os.pathsep.join([str(folder), os.environ["PATH"], "/usr/local/cuda/bin"])
    if tool := shutil.which(name, path=path):
        return tool
    msg = f"{name} is missing: pip install --group test, or pip install nvidia-cuda-{name}"
    raise FileNotFoundError(msg)


def _lines(tool: str, *arguments: object, only: str = "") -> list[str]:
    """What a tool prints; with `only`, the lines that match this expression of grep.

    The tools print hundreds of megabytes: grep reads those ten times as fast as Python.
    """
    folder = Path(_tool("nvdisasm")).parent  # cuobjdump calls it
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LC_ALL": "C"}
    command = [_tool(tool), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        grep = subprocess.run(
            ["grep", "-aE", only],
            check=False, stdin=process.stdout, capture_output=True, text=True, env=environment,
        )  # fmt: skip
    if grep.returncode > 1:  # 1: no line matches
        raise subprocess.CalledProcessError(grep.returncode, grep.args, stderr=grep.stderr)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return [line.rstrip() for line in grep.stdout.splitlines()]


def _threads(binary: Path) -> dict[tuple[str, str], int]:
    found, arch, symbol = {}, "", ""
    awaits_value = False
    wanted = r"^arch = |^\.nv\.info\.|EIATTR_MAX_THREADS|Value:\s+0x\w+ 0x\w+ 0x\w+ $"
    for line in _lines("cuobjdump", "-elf", binary, only=wanted):
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ")
        elif line.startswith(".nv.info."):
            symbol = line.removeprefix(".nv.info.")
        elif "EIATTR_MAX_THREADS" in line:
            awaits_value = True
        elif awaits_value:
            x, y, z = (int(value, 16) for value in line.split()[1:])
            found[arch, symbol] = x * y * z
            awaits_value = False
    return found


def _memory_opcodes(binary: Path) -> dict[tuple[str, str], set[str]]:
    found, arch, symbol = defaultdict(set), "", ""
    wanted = r"^\s*code for |Function : |\b(LD|ST)(G|S|L|GSTS)?\."
    opcode = re.compile(r"\b((?:LD|ST)(?:G|S|L|GSTS)?\.[\w.]+|LDL|STL)\b")
    for line in _lines("cuobjdump", "-sass", binary, only=wanted + r"|\b(LDL|STL)\b"):
        if match := re.search(r"code for (sm_\w+)", line):
            arch = match[1]
        elif match := re.search(r"Function : (\S+)", line):
            symbol = match[1]
        elif match := opcode.search(line):
            found[arch, symbol].add(match[1])
    return found


def _demangled(symbols: list[str]) -> dict[str, str]:
    text = subprocess.run(
        ["c++filt"], input="\n".join(symbols), check=True, capture_output=True, text=True
    ).stdout
    return dict(zip(symbols, map(_short_name, text.splitlines()), strict=True))


def _short_name(demangled: str) -> str:
    """``void a::(anonymous namespace)::f<a::T, (int)16>(P)`` -> ``f<T, 16>``."""
    name = demangled.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"\((?:int|unsigned int|bool|long)\)", "", name)
    name = re.sub(r"\b(?:\w+::)+", "", name).replace("> >", ">>")
    depth = 0
    for i, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            return name[:i]
    return name


def main() -> None:
    from cuda_build import NVCC

    kernels = read_kernels(LIBRARY)
    TABLE.write_text(table(kernels, compiler_release(NVCC)))
    bad = [f"{k.arch} {k.name}: {', '.join(k.problems)}" for k in kernels if k.problems]
    sys.exit("\n".join(bad) or None)


if __name__ == "__main__":
    main()
