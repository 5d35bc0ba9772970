# SPDX-License-Identifier: Apache-2.0
"""The rules that no compiler checks: who may depend on whom, how long a file may be, licence lines.

The tables below *are* the architecture; docs/architecture.md explains them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).parents[2]
CORE_HEADERS = REPO_ROOT / "cpp/include/paged_kv"
PACKAGE = REPO_ROOT / "python/paged_kv"

MAX_LINES = 400
MAX_LINES_KERNEL = 500

# Units of the host core, lowest layer first. A header includes headers of its own layer or of lower
# ones; a new unit takes its place here.
CORE_LAYERS = (
    (
        "check",
        "ids",
        "math",
        "strided_view",
        "big_endian",
        "huge_pages",
        "make_room",
        "token_checks",
    ),
    (
        *("sha256", "xxh3", "cbor", "prefix_contents", "block_hash", "request_hash"),
        *("kv_block", "free_queue", "index_table", "block_hash_map"),
        *("eviction_policy", "evicted_keys"),
    ),
    ("kv_events", "kv_cache_metrics", "prefix_cache_stats", "kv_cache_spec", "kv_cache_config"),
    ("uniform_type_spec", "kv_cache_groups", "kv_cache_sizing"),
    ("block_pool", "kv_cache_blocks", "block_table", "slot_mapping", "request"),
    ("block_space_manager", "request_table", "stored_event", "managers/single_type"),
    ("managers/full_attention", "managers/sliding_window", "managers/chunked_local"),
    ("managers/factory", "kv_cache_coordinator"),
    ("coordinators/no_prefix_cache", "coordinators/unitary", "coordinators/hybrid"),
    ("no_hit_report",),
    ("kv_cache_manager",),
    ("request_batch",),
)

# Parts of the Python package, lowest layer first. A module imports its own part and parts of lower
# layers. Parts that stand in no row (ops, metadata, ...) are below all of these and above _core.
PYTHON_LAYERS = (
    ("minivllm", "models"),
    ("engine",),
    ("server",),
    ("cli",),
    ("__main__", "__init__"),
)
BELOW_ALL = -1

STD_HEADER = re.compile(r"<[a-z_]+(\.h)?>")  # <vector>, <cstdint>; <torch/...> has a slash

GENERATED = {"_core.pyi"}
SOURCE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".cmake"}
SOURCE_FOLDERS = ("cpp", "cuda", "cmake", "python", "tests", "bench", "examples", "docs")


def sources() -> list[Path]:
    files = [p for folder in SOURCE_FOLDERS for p in sorted((REPO_ROOT / folder).rglob("*"))]
    files += [*sorted(REPO_ROOT.glob("*.py")), REPO_ROOT / "CMakeLists.txt"]
    return [
        p
        for p in files
        if p.is_file()
        and (p.suffix in SOURCE_SUFFIXES or p.name == "CMakeLists.txt")
        and p.name not in GENERATED
    ]


def relative(path: Path) -> str:
    return str(path.relative_to(REPO_ROOT))


def includes(path: Path) -> list[str]:
    """What a C++ file includes, as written: ``<vector>`` or ``"paged_kv/ids.h"``."""
    text = path.read_text(encoding="utf-8")
    return re.findall(r'^\s*#\s*include\s+(<[^>]+>|"[^"]+")', text, re.MULTILINE)


def cpp_files(folder: str) -> list[Path]:
    return [p for p in sorted((REPO_ROOT / folder).rglob("*")) if p.suffix in {".h", ".cpp"}]


def imported_parts(path: Path) -> set[str]:
    """The parts of paged_kv that a module imports at run time or for types."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(PACKAGE.parent).parent.parts
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    parts = {name.split(".")[1] for name in names if name.startswith("paged_kv.")}
    # `from paged_kv import X`: X may be a module or a name that __init__ gives.
    return {p for p in parts if (PACKAGE / p).is_dir() or (PACKAGE / f"{p}.py").is_file()} | (
        parts & {"_core", "_ops"}
    )


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def layers_of(layers: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    return {unit: i for i, layer in enumerate(layers) for unit in layer}


def import_errors(path: Path) -> list[str]:
    """The parts that a module may not import, but does."""
    layer_of, part = layers_of(PYTHON_LAYERS), part_of(path)
    layer = layer_of.get(part, BELOW_ALL)
    return sorted(
        other
        for other in imported_parts(path) - {part}
        if (other_layer := layer_of.get(other, BELOW_ALL)) > layer
        or (other_layer == layer != BELOW_ALL)
    )


@pytest.mark.parametrize("path", [*cpp_files("cpp/include"), *cpp_files("cpp/src")], ids=relative)
def test_core_includes_only_std_and_itself(path):
    """So it needs neither torch nor Python, and runs under any tool."""
    allowed = {"<sys/mman.h>"} if path.stem == "huge_pages" else set()
    for include in includes(path):
        is_core = STD_HEADER.fullmatch(include) or include.startswith('"paged_kv/')
        assert is_core or include in allowed


@pytest.mark.parametrize("path", cpp_files("cpp/ops/cpu"), ids=relative)
def test_cpu_kernels_include_only_std_core_and_each_other(path):
    for include in includes(path):
        own = include.startswith(('"paged_kv/', '"ops/cpu/', '"ops/params/'))
        assert own or STD_HEADER.fullmatch(include) or include == "<immintrin.h>"


@pytest.mark.parametrize("path", cpp_files("cpp/ops/params"), ids=relative)
def test_params_include_only_std_and_core(path):
    """They are what the kernels of every device take."""
    for include in includes(path):
        own = include.startswith(('"paged_kv/', '"ops/params/'))
        assert own or STD_HEADER.fullmatch(include)


@pytest.mark.parametrize("path", cpp_files("cpp/include"), ids=relative)
def test_core_headers_include_only_their_layer_and_below(path):
    unit = path.relative_to(CORE_HEADERS).with_suffix("").as_posix()
    layer_of = layers_of(CORE_LAYERS)
    assert unit in layer_of, f"{unit}: give it a layer in CORE_LAYERS"
    for include in includes(path):
        if include.startswith('"paged_kv/'):
            other = include[len('"paged_kv/') : -len('.h"')]
            assert layer_of[other] <= layer_of[unit], f"{other} is in a layer above {unit}"


@pytest.mark.parametrize("path", cpp_files("cpp/ops"), ids=relative)
def test_ops_know_the_stable_abi_only(path):
    """Neither Python nor ATen: one binary serves every torch and every Python."""
    for include in includes(path):
        assert not re.search(r"pybind11|Python\.h|torch/extension|ATen/|c10/", include)


CUDA_HEADERS = sorted((REPO_ROOT / "cuda/include").rglob("*.*h"))
CUDA_KERNELS = sorted((REPO_ROOT / "cuda/src").rglob("*.cu*"))
EMULATOR_FILES = cpp_files("cuda/simt")


@pytest.mark.parametrize("path", [*CUDA_HEADERS, *CUDA_KERNELS], ids=relative)
def test_cuda_kernels_know_no_torch(path):
    """Kernels run under the emulator, which has only these headers of CUDA."""
    cuda = re.compile(r"<cuda_(runtime|fp16|bf16|fp8)\.h>")
    emulator = {'"simt/ptx.h"', '"simt/shared_storage.h"'}  # the two headers with a side for each
    for include in includes(path):
        own = (
            include.startswith(('"paged_kv/', '"ops/params/', '"cuda/src/')) or include in emulator
        )
        assert own or cuda.fullmatch(include) or STD_HEADER.fullmatch(include)


@pytest.mark.parametrize("path", [*CUDA_HEADERS, *CUDA_KERNELS], ids=relative)
def test_ptx_has_one_home(path):
    has_ptx = re.search(r"\basm\b", path.read_text(encoding="utf-8")) is not None
    assert not has_ptx or path.name == "ptx.cuh"


@pytest.mark.parametrize("path", EMULATOR_FILES, ids=relative)
def test_emulator_needs_no_cuda_and_no_kernel(path):
    """It runs on a machine without a toolkit, and any kernel, not those of this project alone."""
    stand_ins = {f'"cuda_{name}.h"' for name in ("fp16", "bf16")}
    for include in includes(path):
        own = include.startswith('"simt/') or include in stand_ins
        near = (path.parent / include.strip('"')).is_file()
        posix = re.fullmatch(r"<(sys/mman|ucontext|sanitizer/\w+)\.h>", include)
        assert own or near or posix or STD_HEADER.fullmatch(include)


@pytest.mark.parametrize("path", cpp_files("cpp/bindings"), ids=relative)
def test_bindings_know_no_torch(path):
    assert not [i for i in includes(path) if re.search(r"torch|ATen|c10", i)]


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_python_module_imports_only_lower_layers(path):
    assert import_errors(path) == []


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_facade_is_built_on_public_parts_only(path):
    """What minivllm does, anybody can do with the core and the ops."""
    if part_of(path) == "minivllm":
        assert imported_parts(path) <= {"minivllm", "ops", "kv_cache_memory", "_core"}


@pytest.mark.parametrize(
    ("file", "line", "errors"),
    [
        ("ops.py", "from paged_kv.engine import llm_engine", ["engine"]),
        ("ops.py", "from paged_kv import models", ["models"]),
        ("models/llama.py", "import paged_kv.engine.scheduler", ["engine"]),
        ("models/llama.py", "from ..engine import scheduler", ["engine"]),
        ("models/llama.py", "def f():\n    from paged_kv import minivllm", ["minivllm"]),
        ("models/llama.py", "from paged_kv import ops\nfrom . import layers", []),
        ("engine/scheduler.py", "from paged_kv import cli, models", ["cli"]),
        ("cli.py", "from paged_kv.engine import llm_engine", []),
    ],
)
def test_an_import_upwards_is_noticed(tmp_path, monkeypatch, file, line, errors):
    package = tmp_path / "paged_kv"
    for part in ("engine", "models", "minivllm"):
        (package / part).mkdir(parents=True)
    (package / "ops.py").touch()
    (package / "cli.py").touch()
    (package / file).write_text(line)
    monkeypatch.setitem(globals(), "PACKAGE", package)
    assert import_errors(package / file) == errors


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_source_is_short_and_has_its_licence_line(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    is_kernel = "cuda/" in relative(path) or "cpp/ops/cpu/" in relative(path)
    assert len(lines) <= (MAX_LINES_KERNEL if is_kernel else MAX_LINES)
    if lines:
        first = lines[1] if lines[0].startswith("#!") else lines[0]
        assert re.fullmatch(r"(//|#) SPDX-License-Identifier: Apache-2\.0", first)


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_source_is_finished_and_speaks_of_no_machine(path):
    """No notes to self, and no path of the machine that it was written on."""
    if path == Path(__file__):
        return
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b|/(?:home|root|work|Users)/|/tmp/\w+/", text)
    assert not found
