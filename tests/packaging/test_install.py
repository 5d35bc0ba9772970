# SPDX-License-Identifier: Apache-2.0
"""Each documented way to install the package works in a fresh environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
# Neither optimised nor with debug information: these builds are about packaging.
FAST_BUILD = ("-Ccmake.build-type=Debug", "-Ccmake.define.CMAKE_CXX_FLAGS_DEBUG=-O0")
# As who works on the sources wants it; a binding that uses what it does not include fails here.
FILE_BY_FILE = "-Ccmake.define.PAGED_KV_UNITY=OFF"
USE_IT = """
import torch
import paged_kv.ops
pool = paged_kv.BlockPool(8, True, 16)
assert pool.get_new_block_ids(2).tolist() == [1, 2]
slots = torch.empty(3, dtype=torch.int64)
paged_kv.ops.compute_slot_mapping(
    torch.tensor([0, 2], dtype=torch.int32), torch.tensor([17, 18]),
    torch.tensor([[3, 7]], dtype=torch.int32), slots, 16)
assert slots.tolist() == [113, 114, -1], slots
print(paged_kv.__file__)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the files under version control, as a clone has them."""
    target = tmp_path_factory.mktemp("source")
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPO_ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in files:
        if (REPO_ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO_ROOT / name, target / name)
    return target


def test_isolated_install_beside_an_installed_torch(fresh_venv, source, tmp_path):
    env = fresh_venv(tmp_path, with_packages=True)
    env.run("pip", "install", "--no-deps", *FAST_BUILD, source)
    assert str(env.site_packages) in env.run("python", "-c", USE_IT)
    assert env.run("paged-kv", "--version").split()[-1] == importlib.metadata.version("paged_kv")


def test_editable_install_follows_the_sources(fresh_venv, source, tmp_path):
    env = fresh_venv(tmp_path, with_packages=True)
    options = ("--no-deps", "--no-build-isolation", *FAST_BUILD, FILE_BY_FILE)
    env.run("pip", "install", *options, "-e", source)
    assert str(source) in env.run("python", "-c", USE_IT)
    init = source / "python/paged_kv/__init__.py"
    init.write_text(init.read_text() + "\nedited = True\n")
    env.run("python", "-c", "import paged_kv; assert paged_kv.edited")


def test_cpu_wheel_stays_at_about_a_megabyte(tmp_path):
    """The optimised libraries of this installation, stripped and compressed as in a wheel."""
    size = 0
    for name in ("paged_kv._core", "paged_kv._ops"):
        stripped = tmp_path / name
        library = importlib.util.find_spec(name).origin
        subprocess.run(["strip", "-o", stripped, library], check=True)
        size += len(zlib.compress(stripped.read_bytes()))
    assert size < 900_000  # the rest of the wheel is Python, a quarter of a megabyte


def test_sdist_to_wheel(fresh_venv, tmp_path):
    """What is published: the wheel is built from the sdist, small, typed and complete.

    `build` makes an environment of its own that has no torch, so this is also the test that
    $PAGED_KV_BUILD_TORCH becomes a build requirement then.
    """
    env = fresh_venv(tmp_path / "venv", with_packages=True)
    torch = "torch==" + importlib.metadata.version("torch").split("+")[0]
    env.run(
        "python", "-m", "build", *FAST_BUILD, "--outdir", tmp_path, REPO_ROOT,
        PAGED_KV_BUILD_TORCH=torch,
    )  # fmt: skip
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "build_backend.py", "LICENSE", "NOTICE", "PKG-INFO"} <= names

    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert {f for f in folders if not f.endswith(".dist-info")} == {"paged_kv"}
    assert {"paged_kv/py.typed", "paged_kv/_core.pyi", "paged_kv/_ops.so"} <= set(names)
    assert not [
        name for name in names if name.endswith((".h", ".cpp", ".a")) or "test" in name.split("/")
    ]

    env.run("pip", "install", "--no-deps", wheel)
    env.run("python", "-c", USE_IT)
