# SPDX-License-Identifier: Apache-2.0
"""Shape checks for the kernels that run on fake tensors (``torch.compile``, ``torch.export``).

They mirror cpp/ops/tensor_checks.h as far as shapes and dtypes go. Sizes may be symbolic: a check
on them becomes a guard or a runtime assertion of the traced graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged_kv._cache_panels import PANEL_DIMS, PANEL_TOKENS, panel_shapes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FLOAT_DTYPES",
    "NamedSizes",
    "check_cache_dtype",
    "check_dtype",
    "check_kv_cache_dtype",
    "check_panels",
]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# kv_cache_dtype: dtypes of the cache; none: that of the query or of the new keys.
_CACHE_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "auto": (),
    "fp8": (torch.uint8, torch.float8_e4m3fn),
    "fp8_e4m3": (torch.uint8, torch.float8_e4m3fn),
    "fp8_e5m2": (torch.uint8, torch.float8_e5m2),
    "int8": (torch.int8,),
}

_Size = int  # or torch.SymInt, which type checkers see as int


class NamedSizes:
    """Sizes by name: bound at first use, compared from then on. All tensors are on one device."""

    def __init__(self) -> None:
        self._sizes: dict[str, _Size] = {}
        self._first: tuple[str, str] | None = None  # name and device type

    def check(self, tensor: Tensor, name: str, *dims: str) -> None:
        """Checks that ``tensor`` has one dimension for each name in ``dims``, of that size.

        Also that it is on the device of the tensors before it. A real tensor among meta tensors
        ends up here, and an op that then did nothing would leave its outputs unwritten.
        """
        self.check_device(tensor, name)
        torch._check(
            tensor.dim() == len(dims),
            lambda: f"{name}: expected shape [{', '.join(dims)}], got {list(tensor.shape)}",
        )
        for dim, size in zip(dims, tensor.shape, strict=True):
            self.bind(dim, size, name)

    def check_device(self, tensor: Tensor, name: str) -> None:
        """Checks that ``tensor`` is on the device of the tensors before it."""
        first_name, device = self._first = self._first or (name, tensor.device.type)
        torch._check(
            tensor.device.type == device,
            lambda: (
                f"{name}: expected a tensor on {device}, like {first_name}, "
                f"got one on {tensor.device.type}"
            ),
        )

    def bind(self, dim: str, size: _Size, name: str = "") -> None:
        """Binds ``dim`` to ``size``, or checks that it is bound to it already."""
        expected = self._sizes.setdefault(dim, size)
        torch._check(
            size == expected, lambda: f"{name or dim}: expected {dim} = {expected}, got {size}"
        )

    def __getitem__(self, dim: str) -> _Size:
        return self._sizes[dim]


def check_dtype(tensor: Tensor, name: str, *expected: torch.dtype) -> None:
    """Checks that the dtype of ``tensor`` is one of ``expected``."""
    torch._check(
        tensor.dtype in expected,
        lambda: f"{name}: expected dtype {' or '.join(map(str, expected))}, got {tensor.dtype}",
    )


def check_kv_cache_dtype(kv_cache_dtype: str, device: torch.device) -> None:
    """Checks that an op on ``device`` knows it; int8 is for the CPU."""
    known = [name for name in _CACHE_DTYPES if name != "int8" or device.type != "cuda"]
    torch._check(
        kv_cache_dtype in known,
        lambda: f"kv_cache_dtype: expected one of: {', '.join(known)}; got '{kv_cache_dtype}'",
    )


def check_cache_dtype(cache: Tensor, name: str, kv_cache_dtype: str, dtype: torch.dtype) -> None:
    """Checks the dtype of a cache; ``dtype`` is that of the query or of the new keys."""
    check_kv_cache_dtype(kv_cache_dtype, cache.device)
    check_dtype(cache, name, *(_CACHE_DTYPES[kv_cache_dtype] or (dtype,)))


def check_panels(cache: Tensor, name: str, sizes: NamedSizes, *, is_key: bool) -> None:
    """Checks the shape of a cache in panels, after its dtype and after head_size was bound.

    Binds num_blocks, num_kv_heads and block_size, which may be bound already. Mirrors
    cpp/ops/cache_panels_checks.h.
    """
    sizes.check_device(cache, name)
    torch._check(
        cache.device.type != "cuda",
        lambda: f"{name}: the layout panels is for CPUs, got shape {list(cache.shape)}",
    )
    head_size = sizes["head_size"]
    torch._check(
        head_size % PANEL_DIMS == 0,
        lambda: (
            f"{name}: this layout needs a head_size that is a multiple of {PANEL_DIMS}, got "
            f"{head_size}"
        ),
    )
    key_shape, value_shape = panel_shapes(1, PANEL_TOKENS, 1, head_size, cache.dtype)
    panel = (key_shape if is_key else value_shape)[3:]
    torch._check(
        cache.dim() == len(panel) + 3 and cache.shape[3:] == panel,
        lambda: (
            f"{name}: expected shape [num_blocks, num_kv_heads, block_size/{PANEL_TOKENS}, "
            f"{', '.join(map(str, panel))}], got {list(cache.shape)}"
        ),
    )
    sizes.bind("num_blocks", cache.shape[0], name)
    sizes.bind("num_kv_heads", cache.shape[1], name)
    sizes.bind("block_size", cache.shape[2] * PANEL_TOKENS, name)
    torch._check(
        cache[:1, :1].is_contiguous(),
        lambda: (
            f"{name}: expected dimensions 2 and on to be contiguous, got strides "
            f"{list(cache.stride())} for shape {list(cache.shape)}"
        ),
    )
