# SPDX-License-Identifier: Apache-2.0
"""The places that an op runs in, behind one interface: the functions of ``paged_kv.ops``.

``cpu``
    The CPU kernels.
``emulated``
    The CUDA kernels, and the C++ that launches them, on the emulator (docs/testing.md).
``cuda``
    The same on a GPU, where there is one and paged_kv was built with CUDA. Arguments are moved to
    the device and what an op wrote is moved back, so that tests speak of CPU tensors only.
"""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cache_cases import has_layout
from torch import Tensor

import paged_kv.ops

if TYPE_CHECKING:
    from collections.abc import Sequence

REPO_ROOT = Path(__file__).resolve().parents[2]
EMULATED_LIBRARY = "build/cpp-release/tests/cuda/paged_kv_emulated_ops.so"


def emulated_library() -> Path:
    """The library of emulated ops; ``$PAGED_KV_EMULATED_OPS`` names another build of it."""
    path = Path(os.environ.get("PAGED_KV_EMULATED_OPS", REPO_ROOT / EMULATED_LIBRARY))
    if not path.is_file():
        msg = f"{path} is missing: run `make test`"
        raise FileNotFoundError(msg)
    return path


def has_cuda() -> bool:
    key = "CUDA"
    built = torch._C._dispatch_has_kernel_for_dispatch_key("paged_kv::copy_blocks", key)
    return built and torch.cuda.is_available()


DEVICE_BACKENDS = ["emulated", *(["cuda"] if has_cuda() else [])]
BACKENDS = ["cpu", *DEVICE_BACKENDS]


def each_layout(layouts: Sequence[str], **sizes: Sequence[int]) -> pytest.MarkDecorator:
    """Parameters ``backend``, ``layout`` and those of ``sizes``: all that go together."""
    names = ["backend", "layout", *sizes]
    values = itertools.product(BACKENDS, layouts, *sizes.values())
    return pytest.mark.parametrize(
        names, [row for row in values if has_layout(*row)], indirect=["backend"]
    )


class Backend:
    """``Backend("emulated").copy_blocks(...)`` and so on."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "emulated":
            torch.ops.load_library(emulated_library())

    def __getattr__(self, op: str) -> Any:
        if self.name == "cpu":
            return getattr(paged_kv.ops, op)
        if self.name == "emulated":
            return getattr(torch.ops.paged_kv_emulated, op)
        return partial(_call_on_gpu, getattr(torch.ops.paged_kv, op))

    def __repr__(self) -> str:
        return self.name


def _call_on_gpu(op: Any, *args: Any, **kwargs: Any) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            pairs.append((value, _to_gpu(value)))
            return pairs[-1][1]
        if isinstance(value, (list, tuple)):
            return [move(item) for item in value]
        return value

    op(*move(args), **{name: move(value) for name, value in kwargs.items()})
    torch.cuda.synchronize()
    for original, moved in pairs:
        if moved.numel() and not _same_bits(original, moved):
            original.copy_(moved)


def _to_gpu(tensor: Tensor) -> Tensor:
    """A copy with the same strides, offset and neighbours in memory."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _same_bits(original: Tensor, moved: Tensor) -> bool:
    a, b = original.contiguous().view(torch.uint8), moved.cpu().contiguous().view(torch.uint8)
    return torch.equal(a, b)
