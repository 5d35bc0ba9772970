# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of each instruction set: which one runs, that they agree, what they are made of.

The choice is made once in a process, at the first call that needs it, so it is tried in others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ops.attention_calls import varlen
from ops.backends import REPO_ROOT

from paged_kv import ops
from paged_kv.testing import AttentionCase, assert_close_report, make_case

FORMATS = ("auto", "fp8", "fp8_e5m2", "int8")
KERNELS = REPO_ROOT / "build/cpp-release/cpp/ops/cpu/libpaged_kv_kernels.a"
ISA_SOURCES = REPO_ROOT / "cpp/ops/cpu/isa"


def results() -> dict[str, torch.Tensor]:
    """Attention and quantised writes over every element type of caches."""
    tensors = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for kv_cache_dtype in FORMATS:
            name = f"{kv_cache_dtype} {dtype}"
            case = AttentionCase(
                name,
                query_lens=(1, 20, 1),
                seq_lens=(70, 40, 513),
                num_heads=6,
                head_size=72,
                dtype=dtype,
                softcap=20.0,
                alibi=True,
                kv_cache_dtype=kv_cache_dtype,
                head_scales=True,
            )
            inputs = make_case(case)
            scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
            tensors[f"out {name}"], tensors[f"lse {name}"] = varlen(
                case, inputs, kv_cache_dtype=kv_cache_dtype, **scales
            )
            cache = inputs.key_cache.clone()
            slots = torch.arange(20)
            tokens = inputs.query[:20, :2]
            ops.reshape_and_cache_flash(
                tokens, tokens, cache, cache, slots, kv_cache_dtype, *scales.values()
            )
            tensors[f"cache {name}"] = cache.flatten(0, 1)[:20]
    return tensors


def run_python(code: str, isa: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PAGED_KV_ISA"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO_ROOT / "tests"), *sys.path])
    if isa is not None:
        environment["PAGED_KV_ISA"] = isa
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_scalar_kernels_agree_with_those_of_this_machine(tmp_path):
    code = (
        "import sys, torch; from ops.test_instruction_sets import results; "
        "torch.save(results(), sys.argv[1])"
    )
    files = {isa: tmp_path / f"{isa}.pt" for isa in (None, "scalar")}
    for isa, file in files.items():
        process = run_python(code, isa, str(file))
        assert process.returncode == 0, process.stderr
    best, scalar = (torch.load(file) for file in files.values())
    assert best.keys() == scalar.keys()
    for name, expected in best.items():
        if name.startswith("cache"):
            assert torch.equal(scalar[name], expected), name
        else:
            assert_close_report(scalar[name], expected.double(), name=name)
    # Lanes are summed in another order: equal results would come from the same kernels.
    has_avx2 = "avx2" in cpu_flags()
    assert has_avx2 == any(not torch.equal(scalar[name], best[name]) for name in best)


def cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"^flags\s*: (.*)$", cpuinfo, re.MULTILINE)
    return set(found[1].split()) if found else set()


FIRST_CALLS = """
import torch
from paged_kv import ops
from ops.attention_calls import varlen
from paged_kv.testing import AttentionCase, make_case

case = AttentionCase("one", (1,), (3,))
inputs = make_case(case)
one, cache = torch.ones(1), torch.zeros(2, 16, 1, 8, dtype=torch.int8)
key = torch.ones(1, 1, 8)


def write(kv_cache_dtype, cache):
    slots = torch.tensor([3])
    ops.reshape_and_cache_flash(key, key, cache, cache.clone(), slots, kv_cache_dtype, one, one)


write("auto", cache.float())  # needs none
attend = lambda: varlen(case, inputs)
for call in (attend, attend, lambda: write("int8", cache)):
    try:
        call()
    except RuntimeError as error:
        print(error)
assert not cache.any()
"""


@pytest.mark.parametrize("isa", ["neon", "AVX2", "avx512"])
def test_a_set_that_cannot_run_is_refused_at_each_call(isa):
    if isa == "avx512" and "avx512f" in cpu_flags():
        isa = "avx1024"
    process = run_python(FIRST_CALLS, isa)
    assert process.returncode == 0, process.stderr
    message = re.compile(rf"PAGED_KV_ISA: expected one of scalar.* \(what .*\), got {isa}\n")
    assert len(message.findall(process.stdout)) == 3, process.stdout
    assert len(process.stdout.splitlines()) == 3


def symbols_by_object() -> dict[str, list[tuple[str, str]]]:
    """(nm's letter, name) of all symbols that an object of the kernel library shows to others."""
    process = subprocess.run(
        ["nm", "--extern-only", str(KERNELS)], capture_output=True, text=True, check=True
    )
    objects: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in process.stdout.splitlines():
        if line.endswith(".o:"):
            current = objects.setdefault(line.removesuffix(".o:"), [])
        elif line:
            letter, name = line.split()[-2:]
            current.append((letter, name))
    return objects


@pytest.mark.parametrize("source", sorted(path.name for path in ISA_SOURCES.glob("*avx*.cpp")))
def test_nothing_of_an_instruction_set_is_shared(source):
    """The linker may keep any copy of a weak symbol, also the one that needs AVX, for everybody.

    So these objects define their table and nothing else, and use only what libc has.
    """
    symbols = symbols_by_object()[source]
    defined = [name for letter, name in symbols if letter != "U"]
    assert len(defined) == 1
    assert defined[0].endswith("KernelsE")
    assert [letter for letter, _ in symbols if letter in "uwWvV"] == []
    used = {name for letter, name in symbols if letter == "U"}
    assert used <= {"memcpy", "memset", "memmove"}


def test_only_these_sources_use_the_instruction_sets():
    """Others would be compiled for every CPU; flags are given to sources by name."""
    cmake = (REPO_ROOT / "cpp/ops/cpu/CMakeLists.txt").read_text(encoding="utf-8")
    flagged = re.findall(
        r"set_source_files_properties\(([^)]*?)\s*PROPERTIES COMPILE_OPTIONS\s*\"\$\{avx", cmake
    )
    sources = {source for names in flagged for source in names.split()}
    assert sources == {f"isa/{path.name}" for path in ISA_SOURCES.glob("*avx*.cpp")}
