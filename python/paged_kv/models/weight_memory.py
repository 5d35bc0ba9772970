# SPDX-License-Identifier: Apache-2.0
"""How a CPU reads weights fastest: in panels, in as few bits as they need, in huge pages."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

import torch

from paged_kv.kv_cache_memory import HUGE_PAGE_BYTES, zeros_in_huge_pages
from paged_kv.weight_panels import IN_FEATURES_UNIT, is_in_panels, pack_weight, unpack_weight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

__all__ = ["lay_in_panels", "lay_in_rows", "move_to_huge_pages", "narrow_if_exact"]

_ROWS_A_CHECK = 1024
_ALIGNMENT = 64  # a line of the cache
_CHUNK_BYTES = 64 << 20


def lay_in_panels(parameter: nn.Parameter, *, out_features: int) -> None:
    """Keep a matrix as :func:`paged_kv.ops.linear` takes it, if there is a form that it takes.

    Args:
        parameter: ``[out_features, in_features]`` or in panels, on a CPU. Its data are replaced.
        out_features: rows of the matrix.

    Notes:
        Cost: up to three copies, none if it is in panels already.
    """
    if is_in_panels(parameter):
        return
    lay_in_rows(parameter, out_features=out_features)
    in_features = parameter.shape[1]
    if in_features > 0 and in_features % IN_FEATURES_UNIT == 0:
        narrow_if_exact(parameter)
        parameter.data = pack_weight(parameter)


def lay_in_rows(parameter: nn.Parameter, *, out_features: int) -> None:
    """Keep a matrix as ``[out_features, in_features]``: what `lay_in_panels` did is undone."""
    parameter.data = unpack_weight(parameter.data, out_features=out_features)


def narrow_if_exact(parameter: nn.Parameter) -> None:
    """Keep a float32 matrix in 16 bits if each of its numbers is a bfloat16 or a float16 one.

    Most checkpoints are published in 16 bits. `linear` widens such numbers in registers, so that
    products have the same bits as before, read half of the memory and, with few rows, take little
    more than half of the time.

    Does nothing without AVX2, which has instructions that widen float16.

    Args:
        parameter: ``[out_features, in_features]``. Its data are replaced: what is written to it
            later is rounded to 16 bits.

    Notes:
        Cost: a pass over the matrix for each of the two types, which ends at the first rows that
        need more.
    """
    if parameter.dtype != torch.float32 or not _widens_in_registers():
        return
    for dtype in (torch.bfloat16, torch.float16):
        pieces = torch.split(parameter, _ROWS_A_CHECK)
        if all(torch.equal(piece.to(dtype).float(), piece) for piece in pieces):
            parameter.data = parameter.data.to(dtype)
            return


def move_to_huge_pages(parameters: Iterable[nn.Parameter]) -> None:
    """Lay parameters one after the other in huge pages (`zeros_in_huge_pages`).

    Leaves alone those that are not on the CPU or lie in such pages already.

    Args:
        parameters: in the order in which they are read. Their values stay, their data move.

    Notes:
        Cost: one copy. Small parameters share memory in chunks of 64 MiB; one chunk, or the largest
        parameter, is in memory twice meanwhile.
    """
    moved = [p for p in parameters if p.device.type == "cpu" and not _lies_in_huge_pages(p)]
    num_left = sum(map(_padded_bytes, moved))
    chunk = torch.empty(0, dtype=torch.uint8)
    for parameter in moved:
        num_bytes = _padded_bytes(parameter)
        if num_bytes > _CHUNK_BYTES // 4:  # as long as several of the small ones, or longer
            memory = zeros_in_huge_pages((num_bytes,), dtype=torch.uint8)
        else:
            if num_bytes > len(chunk):
                size = max(HUGE_PAGE_BYTES, min(num_left, _CHUNK_BYTES))
                chunk = zeros_in_huge_pages((size,), dtype=torch.uint8)
            memory, chunk = chunk[:num_bytes], chunk[num_bytes:]
        num_left -= num_bytes
        copy = memory[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = copy.copy_(parameter.data)


@cache
def _widens_in_registers() -> bool:
    """Whether `linear` does, with the instruction set it uses here."""
    has_avx2 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return has_avx2 and os.environ.get("PAGED_KV_ISA") != "scalar"


def _padded_bytes(parameter: nn.Parameter) -> int:
    return -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT


def _lies_in_huge_pages(parameter: nn.Parameter) -> bool:
    storage = parameter.untyped_storage()
    return storage.nbytes() >= HUGE_PAGE_BYTES and storage.data_ptr() % HUGE_PAGE_BYTES == 0
