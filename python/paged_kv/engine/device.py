# SPDX-License-Identifier: Apache-2.0
"""Where an engine runs, and how a step's inputs get there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import paged_kv._library  # noqa: F401  (defines the ops)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["check_cuda_graphs", "check_device", "upload", "upload_bytes"]

# What an engine calls last of all that needs a kernel there.
_OP = "paged_kv::paged_attention_varlen"
_ALIGNMENT = 8  # bytes, of the widest element


def check_device(device: str) -> None:
    """Raise ``ValueError`` unless an engine can run there: ``"cpu"``, ``"cuda"``, ``"cuda:1"``."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        msg = f"device must be cpu, cuda or cuda:N, got {device!r}"
        raise ValueError(msg)
    if parsed.type == "cpu":
        return
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_OP, "CUDA"):
        msg = f"device {device!r}: this paged_kv was built without CUDA (docs/build.md)"
        raise ValueError(msg)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (parsed.index or 0) >= num_devices:
        msg = f"device {device!r}: torch {torch.__version__} finds {num_devices} CUDA devices"
        raise ValueError(msg)


def check_cuda_graphs(device: str) -> None:
    """Raise ``ValueError`` unless CUDA graphs can be captured there."""
    if torch.device(device).type != "cuda":
        msg = f"cuda_graphs needs device cuda, got {device!r}"
        raise ValueError(msg)


def upload_bytes(arrays: Sequence[npt.NDArray[Any]]) -> int:
    """Bytes that `upload` needs for arrays of these shapes and types."""
    return sum(map(_aligned_bytes, arrays))


def upload(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device, out: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Bring arrays to a device, in one copy.

    Args:
        arrays: Of any shapes and numeric types. On a CPU the results share their memory, so they
            must not change while those are used, unless there is an ``out``.
        device: Where the results are.
        out: ``[>= upload_bytes(arrays)]`` uint8 there, for the results to lie in: those of arrays
            of the same shapes and types always lie at the same places.

    Returns:
        A tensor for each array, of its shape and type.

    Raises:
        RuntimeError: ``out`` is too small.

    Notes:
        Does not wait for the copy. It reads a buffer of this call alone, which torch keeps until
        it has been read.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from paged_kv.engine.device import upload
        >>> upload([np.arange(3), np.ones(2, np.int32)], torch.device("cpu"))[0].tolist()
        [0, 1, 2]
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu" and out is None:
        return tensors
    sizes = [_aligned_bytes(array) for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, array in zip(torch.split(staged, sizes), arrays, strict=True):
        part.numpy()[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    if out is None:
        sent = staged.to(device, non_blocking=True)
    else:
        sent = out[: len(staged)].copy_(staged, non_blocking=True)
    parts = torch.split(sent, sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _aligned_bytes(array: npt.NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
