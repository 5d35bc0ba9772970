# SPDX-License-Identifier: Apache-2.0
"""Mutation check of the host core: do the tests notice a fault?

Each fault changes one place of the core, in a copy of the repository. The copy's `_core` is built
and the host's Python tests run until one fails; a fault that they miss is tried on the C++ tests.
A fault that nothing notices is a test that is missing. Takes about half a minute a fault::

    python bench/mutation_check.py [--copy DIR] [--only WORD ...] [--jobs N] [--python-only]

DIR is kept for the next run; without it the copy is a temporary folder. docs/testing.md has the
outcome.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]
COPIED = ("CMakeLists.txt", "pyproject.toml", "cmake", "cpp", "cuda", "python", "tests")
SUFFIXES = {".txt", ".toml", ".cmake", ".cpp", ".h", ".cu", ".cuh", ".py", ".pyi", ".gz", ".json"}
# The quickest to notice a fault come first.
PYTHON_TESTS = ("tests/core", "tests/traces", "tests/property")
IGNORED = ("tests/core/test_stub.py", "tests/core/test_block_table.py")
BUILD_DIR = "build/quick"
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Fault:
    """`old`, which is in `file` once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


FAULTS = (
    Fault("cached blocks are freed to the front", "include/paged_kv/eviction_policy.h",
          "is_hashed() ? FreePlace::kBack : FreePlace::kFront",
          "is_hashed() ? FreePlace::kFront : FreePlace::kBack"),
    Fault("a request's blocks are freed first block first", "src/managers/single_type.cpp",
          "std::ranges::reverse(freed_blocks_);", ""),
    Fault("blocks that left a window are freed in order", "src/managers/single_type.cpp",
          "if (!freed_blocks_.empty()) block_pool_",
          "std::ranges::reverse(freed_blocks_); if (!freed_blocks_.empty()) block_pool_"),
    Fault("freed blocks are prepended in reverse", "src/free_queue.cpp",
          "    link_after(previous, block);\n    previous = block;",
          "    link_after(previous, block);"),
    Fault("a block too many counts as full", "src/managers/single_type.cpp",
          "std::min(num_tokens / block_size_, std::ssize(held.blocks))",
          "std::min(ceil_div(num_tokens, block_size_), std::ssize(held.blocks))"),
    Fault("a hit is not held", "src/managers/single_type.cpp",
          "block_pool_.touch(adopted);", ""),
    Fault("a touched block stays in the free queue", "src/block_pool.cpp",
          "if (block.ref_cnt == 0) free_block_queue_.remove(id);", ""),
    Fault("a reused block keeps its hash", "src/block_pool.cpp",
          "    remove_from_cache(block);\n    block.ref_cnt = 1;", "    block.ref_cnt = 1;"),
    Fault("a failed free is not taken back", "src/block_pool.cpp",
          "if (freed != kNullBlockId) ++at(freed).ref_cnt;", ""),
    Fault("the cache is reset while blocks are held", "src/block_pool.cpp",
          "if (get_num_free_blocks() != num_gpu_blocks() - 1) return false;", ""),
    Fault("reset leaves the blocks' hashes", "src/block_pool.cpp",
          "for (KVCacheBlock& block : blocks_) block.reset_hash();", ""),
    Fault("usage counts the null block", "src/block_pool.cpp",
          "num_usable_blocks = num_gpu_blocks() - 1", "num_usable_blocks = num_gpu_blocks()"),
    Fault("blocks behind a miss count as found", "src/block_pool.cpp",
          "    if (!block) break;\n    cached_blocks",
          "    if (!block) continue;\n    cached_blocks"),
    Fault("removals are not reported", "src/block_pool.cpp",
          "if (kv_events_) kv_events_->push(BlockRemoved{key.hash, key.group_id});", ""),
    Fault("the salt is left out of the key", "src/request_hash.cpp",
          "if (start_token_idx == 0 && !request.cache_salt.empty())", "if (false)"),
    Fault("the adapter's path is left out of the key", "src/request_hash.cpp",
          'keys.push_back({"lora", request.lora->name, request.lora->path});',
          'keys.push_back({"lora", request.lora->name});'),
    Fault("media are keyed without their place", "src/request_hash.cpp",
          'keys.push_back({"mm", feature.identifier, feature.offset - start});',
          'keys.push_back({"mm", feature.identifier, std::int64_t{0}});'),
    Fault("only the first medium of a block counts", "src/request_hash.cpp",
          "if (feature_end <= start) continue;",
          "if (feature_end <= start || !keys.empty()) continue;"),
    Fault("a block's parent is left out of its hash", "src/request_hash.cpp",
          "previous = hasher.hash(previous, block_tokens",
          "previous = hasher.hash(parent, block_tokens"),
    Fault("appended tokens are hashed from the prompt's start", "src/request.cpp",
          "const std::int64_t start = num_hashed_blocks * hash_block_size;",
          "const std::int64_t start = 0;"),
    Fault("the whole prompt may be a hit", "src/kv_cache_manager.cpp",
          "request.block_hashes(), request.num_tokens() - 1)",
          "request.block_hashes(), request.num_tokens())"),
    Fault("drafts are cached", "src/kv_cache_manager.cpp",
          "args.num_new_tokens,\n               request.num_tokens());",
          "args.num_new_tokens,\n               request.num_tokens() + 1);"),
    Fault("slots do not end at max_model_len", "src/kv_cache_manager.cpp",
          "args.num_lookahead_tokens,\n               options_.max_model_len);",
          "args.num_lookahead_tokens,\n               kMaxTokens);"),
    Fault("blocks of steps under way are given back", "src/kv_cache_manager.cpp",
          "total_computed_tokens - request.progress.num_in_flight_tokens", "total_computed_tokens"),
    Fault("free hits are not counted", "src/managers/single_type.cpp",
          "if (block.ref_cnt == 0 && !block.is_null) ++num_blocks;", ""),
    Fault("a window needs a block less", "src/managers/sliding_window.cpp",
          "return ceil_div(sliding_window_ - 1, block_size())",
          "return (sliding_window_ - 1) / block_size()"),
    Fault("EAGLE drops no block of a window", "src/managers/sliding_window.cpp",
          "num_dropped = query.drop_eagle_block ? 1 : 0", "num_dropped = 0"),
    Fault("groups need not agree on a hit", "src/coordinators/hybrid.cpp",
          "if (candidate >= hit_length) break;", "break;"),
)  # fmt: skip


def copy_tree(copy: Path) -> None:
    """Makes `copy` like the repository; files that are alike keep their time, for the build."""
    for name in COPIED:
        source = REPO_ROOT / name
        files = [source] if source.is_file() else sorted(source.rglob("*"))
        for file in files:
            if not file.is_file() or file.suffix not in SUFFIXES:
                continue
            target = copy / file.relative_to(REPO_ROOT)
            if not target.is_file() or target.read_bytes() != file.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())


def configure(copy: Path) -> None:
    """A build without optimisation: quick to compile, and the tests are short."""
    pybind11 = subprocess.check_output(
        [sys.executable, "-m", "pybind11", "--cmakedir"], text=True
    ).strip()
    subprocess.run(
        ["cmake", "-S", copy, "-B", copy / BUILD_DIR, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug",
         "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DPAGED_KV_INPLACE=ON", "-DPAGED_KV_BUILD_TESTS=ON",
         f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def build(copy: Path, target: str, jobs: int) -> bool:
    """False if the compiler refuses the fault."""
    command = ["cmake", "--build", copy / BUILD_DIR, "-j", str(jobs), "--target", target]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def python_tests_fail(copy: Path) -> str:
    """The first Python test that fails; empty if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--noconftest", "-p", "no:cacheprovider"]
    command += [f"--ignore={file}" for file in IGNORED] + list(PYTHON_TESTS)
    env = {**os.environ, "PYTHONPATH": f"{copy / 'python'}:{copy / 'tests'}"}
    try:
        result = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, check=False,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "timeout"
    if result.returncode == 0:
        return ""
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0] if failed else f"pytest ended with {result.returncode}"


def cpp_tests_fail(copy: Path, jobs: int) -> str:
    """The first C++ test that fails; empty if none does."""
    if not build(copy, "paged_kv_test", jobs):
        return "the C++ tests do not compile"
    try:
        result = subprocess.run(
            [copy / BUILD_DIR / "tests/cpp/paged_kv_test", "--gtest_fail_fast"],
            capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "timeout"
    if result.returncode == 0:
        return ""
    failed = [line for line in result.stdout.splitlines() if line.startswith("[  FAILED  ]")]
    return failed[0] if failed else f"the C++ tests ended with {result.returncode}"


def noticed_by(copy: Path, jobs: int, *, python_only: bool) -> str:
    """What fails with the copy as it is; empty if nothing does."""
    if not build(copy, "_core", jobs):
        return "the compiler"
    return python_tests_fail(copy) or ("" if python_only else cpp_tests_fail(copy, jobs))


def check(fault: Fault, copy: Path, jobs: int, *, python_only: bool) -> str:
    """What noticed the fault; empty if nothing did."""
    path = copy / "cpp" / fault.file
    sound = path.read_text(encoding="utf-8")
    if sound.count(fault.old) != 1:
        msg = f"{fault.name}: {fault.file} has {fault.old!r} {sound.count(fault.old)} times"
        raise ValueError(msg)
    path.write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
    try:
        return noticed_by(copy, jobs, python_only=python_only)
    finally:
        path.write_text(sound, encoding="utf-8")


def main() -> int:
    """Prints a line a fault; 1 if a fault was not noticed, 2 if the tests fail without one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--copy", type=Path, help="where to build; kept")
    parser.add_argument("--only", nargs="*", default=[], help="faults with one of these words")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--python-only", action="store_true", help="without the C++ tests")
    args = parser.parse_args()
    faults = [f for f in FAULTS if not args.only or any(word in f.name for word in args.only)]
    with tempfile.TemporaryDirectory() as temporary:
        copy = args.copy or Path(temporary)
        copy_tree(copy)
        configure(copy)
        if without_fault := noticed_by(copy, args.jobs, python_only=args.python_only):
            print(f"the tests fail without any fault: {without_fault}")
            return 2
        missed = 0
        for fault in faults:
            start = time.monotonic()
            noticed = check(fault, copy, args.jobs, python_only=args.python_only)
            missed += not noticed
            took = time.monotonic() - start
            print(f"{fault.name:60}{noticed or 'NOT NOTICED'}  ({took:.0f} s)", flush=True)
    print(f"noticed {len(faults) - missed} of {len(faults)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
