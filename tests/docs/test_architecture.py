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

# Units of the host core, lowest layer first. A header includes headers of its own or of lower layers
# only; a new unit takes its place here.
CORE_LAYERS = (
    ("check", "ids", "math"),
    ("sha256", "block_hash", "kv_block", "free_queue", "block_hash_map"),
    ("block_pool", "kv_cache_blocks", "block_table", "slot_mapping"),
)

STD_HEADER = re.compile(r"[a-z_]+(\.h)?")  # <vector>, <cstdint>; <torch/...> has a slash

# Python: package -> the parts of paged_kv that it may import. A part is the first name below
# paged_kv; what stands in no row may import anything but the engine and what is built on it.
ENGINE_AND_ABOVE = {"engine", "server", "cli", "__main__"}
MAY_IMPORT_ENGINE = {"__init__", "engine", "server", "cli", "__main__"}
MAY_IMPORT_ONLY = {
    "ops": {"ops", "_ops"},
    "reference": {"reference"},
    "models": {
        "models", "ops", "attention", "metadata", "reference", "_core",
    },
    "minivllm": {"minivllm", "ops", "_core"},
}  # fmt: skip

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
LAYER_OF = {unit: i for i, layer in enumerate(CORE_LAYERS) for unit in layer}


@pytest.mark.parametrize(
    "path",
    [*cpp_files("cpp/include"), *cpp_files("cpp/src"), *cpp_files("cpp/ops/cpu")],
    ids=relative,
)
def test_core_and_cpu_kernels_include_only_std_and_paged_kv(path):
    """So neither needs torch or Python, and both can run under any tool."""
    for include in includes(path):
        name = include[1:-1]
        if include.startswith("<"):
            assert STD_HEADER.fullmatch(name), f"{relative(path)} includes {include}"
        else:
            own = name.startswith(("paged_kv/", "cpu/")) or (path.parent / name).is_file()
            assert own, f"{relative(path)} includes {include}"


@pytest.mark.parametrize("path", cpp_files("cpp/include"), ids=relative)
def test_core_headers_include_only_their_layer_and_below(path):
    unit = path.relative_to(CORE_HEADERS).with_suffix("").as_posix()
    assert unit in LAYER_OF, f"{unit}: give it a layer in CORE_LAYERS"
    for include in includes(path):
        if include.startswith('"paged_kv/'):
            other = include[len('"paged_kv/') : -len('.h"')]
            assert LAYER_OF[other] <= LAYER_OF[unit], f"{unit} includes {other}, a layer above it"


@pytest.mark.parametrize("path", cpp_files("cpp/ops"), ids=relative)
def test_ops_know_neither_pybind11_nor_the_python_api(path):
    for include in includes(path):
        assert not re.search(r"pybind11|Python\.h|torch/extension|ATen/", include)


@pytest.mark.parametrize("path", cpp_files("cpp/bindings"), ids=relative)
def test_bindings_know_no_torch(path):
    assert not [i for i in includes(path) if re.search(r"torch|ATen|c10", i)]


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_python_module_imports_only_what_its_part_may(path):
    part, imported = part_of(path), imported_parts(path)
    if part not in MAY_IMPORT_ENGINE:
        assert not imported & ENGINE_AND_ABOVE, f"{relative(path)} imports the engine"
    if part in MAY_IMPORT_ONLY:
        assert imported <= MAY_IMPORT_ONLY[part]


def test_nothing_but_server_and_cli_knows_the_engine():
    """The rule itself, against a module that would break it."""
    assert imported_parts(PACKAGE / "__init__.py") >= {"_core"}
    assert {"models", "ops", "minivllm"} & MAY_IMPORT_ENGINE == set()


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
