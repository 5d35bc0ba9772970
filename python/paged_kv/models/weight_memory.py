# SPDX-License-Identifier: Apache-2.0
"""How a CPU reads weights fastest: in as few bits as they need, in order, in huge pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged_kv.kv_cache_memory import HUGE_PAGE_BYTES, zeros_in_huge_pages
from paged_kv.models.linear import is_for_op

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

__all__ = ["move_to_huge_pages", "narrow_if_exact"]

_ROWS_A_CHECK = 1024
_ALIGNMENT = 64  # a line of the cache
_CHUNK_BYTES = 64 << 20


def narrow_if_exact(parameter: nn.Parameter) -> None:
    """Keep a float32 matrix in 16 bits if each of its numbers is a bfloat16 or a float16 one.

    Most checkpoints are published in 16 bits. `linear` widens such numbers in registers, so that
    products have the same bits as before, read half of the memory and, with few rows, take little
    more than half of the time.

    Does nothing to a parameter that is not for `linear` on a CPU, or whose numbers need 32 bits.

    Args:
        parameter: ``[out_features, in_features]``. Its data are replaced.

    Notes:
        Cost: one pass over the matrix, which ends at the first rows that need 32 bits.
    """
    if parameter.dtype != torch.float32 or not is_for_op(parameter):
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
        Cost: one copy. Parameters share memory in chunks of 64 MiB: one more than all is in memory
        meanwhile.
    """
    moved = [p for p in parameters if p.device.type == "cpu" and not _lies_in_huge_pages(p)]
    num_left = sum(map(_padded_bytes, moved))
    chunk = torch.empty(0, dtype=torch.uint8)
    for parameter in moved:
        num_bytes = _padded_bytes(parameter)
        if num_bytes > len(chunk):
            size = max(num_bytes, HUGE_PAGE_BYTES, min(num_left, _CHUNK_BYTES))
            chunk = zeros_in_huge_pages((size,), dtype=torch.uint8)
        memory, chunk = chunk[: parameter.nbytes], chunk[num_bytes:]
        num_left -= num_bytes
        copy = memory.view(parameter.dtype).view(parameter.shape)
        parameter.data = copy.copy_(parameter.data)


def _padded_bytes(parameter: nn.Parameter) -> int:
    return -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT


def _lies_in_huge_pages(parameter: nn.Parameter) -> bool:
    storage = parameter.untyped_storage()
    return storage.nbytes() >= HUGE_PAGE_BYTES and storage.data_ptr() % HUGE_PAGE_BYTES == 0
