# SPDX-License-Identifier: Apache-2.0
"""One memory for tensors that are not all in use at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Arena", "Lifetime", "place_by_lifetime"]

_ALIGNMENT = 64  # bytes: a line of the cache, and the widest vector


class Lifetime(NamedTuple):
    """When some memory is in use, in steps of any kind, first and last included."""

    first: int
    last: int
    num_bytes: int


def place_by_lifetime(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Find places in one memory such that what is in use at the same time does not overlap.

    Each gets the lowest place that is free when it begins, so that what repeats itself (the layers
    of a model) gets the same places again.

    Args:
        lifetimes: In any order.

    Returns:
        Where each begins, in bytes, aligned to 64; and the bytes that the memory needs.

    Notes:
        Cost: number of lifetimes times how many there are at once.

    Example:
        >>> from paged_kv.engine.arena import Lifetime, place_by_lifetime
        >>> place_by_lifetime([Lifetime(0, 1, 100), Lifetime(1, 2, 10), Lifetime(2, 3, 64)])
        ([0, 128, 0], 192)
    """
    offsets = [0] * len(lifetimes)
    size = 0
    placed: list[tuple[int, int, int]] = []  # (begin, end, last step), by begin
    for index in sorted(range(len(lifetimes)), key=lambda index: lifetimes[index].first):
        first, last, num_bytes = lifetimes[index]
        placed = [place for place in placed if place[2] >= first]
        begin = 0
        for other_begin, other_end, _ in placed:
            if begin + num_bytes <= other_begin:
                break
            begin = other_end
        end = begin + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        placed = sorted([*placed, (begin, end, last)])
        offsets[index] = begin
        size = max(size, end)
    return offsets, size


class Arena:
    """Memory that grows: tensors that lie in it stay valid, their values do not.

    Args:
        device: Where it is.

    Example:
        >>> import torch
        >>> from paged_kv.engine.arena import Arena
        >>> arena = Arena(torch.device("cpu"))
        >>> arena.reserve(128)
        >>> tensor = arena.tensor_like(torch.empty(2, 3), 64)
        >>> arena.reserve(4096)
        >>> tensor.fill_(1.0).sum().item(), arena.num_bytes
        (6.0, 4096)
    """

    def __init__(self, device: torch.device) -> None:
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self._storage.nbytes()

    def reserve(self, num_bytes: int) -> None:
        """Make it at least so large. All tensors in it follow it if it moves."""
        if num_bytes > self.num_bytes:
            self._storage.resize_(num_bytes)

    def tensor_like(self, tensor: Tensor, offset: int) -> Tensor:
        """Make a tensor of the same type, shape and strides that lies in the arena.

        Args:
            tensor: May be a view: the new one begins as far behind ``offset`` as ``tensor`` does
                behind the beginning of its storage.
            offset: Where that storage's place begins, in bytes, aligned to its elements.
        """
        begin = offset // tensor.element_size() + tensor.storage_offset()
        like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return like.set_(self._storage, begin, tensor.shape, tensor.stride())
