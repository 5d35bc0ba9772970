# SPDX-License-Identifier: Apache-2.0
"""How large a KV block is and how many of them to make."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paged_kv.models import ModelConfig

__all__ = ["available_memory_bytes", "bytes_per_block", "default_num_blocks"]

_HOST_FRACTION = 0.1
_HOST_LIMIT_BYTES = 2 * 2**30
# A request of full length may push the default past the limits above, up to this share.
_HOST_MAX_FRACTION = 0.5
_DEVICE_FRACTION = 0.8
# "No limit" in a cgroup v1 file is a number near 2**63.
_NO_LIMIT_BYTES = 2**60
# (limit, usage) of the memory controller, cgroup v2 and v1.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in the key and value caches of all layers together.

    The only place of the engine where this size is computed: the limit, the report and the
    allocation (:class:`~paged_kv.engine.cache_engine.CacheEngine`) use it.

    Args:
        config: The model's shape; counts key/value heads, not query heads.
        block_size: Tokens per block.
        dtype: Element type of the cache.
    """
    elements_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_size
    return elements_per_token * block_size * dtype.itemsize


def default_num_blocks(
    block_bytes: int, blocks_per_sequence: int, device: torch.device | str = "cpu"
) -> int:
    """Choose a pool size from the memory that is free now.

    On a CPU: a tenth of the available memory, at most 2 GiB; more only if a sequence of full
    length needs it, and never more than half of what is available. On an accelerator: 80 % of
    its free memory.

    Args:
        block_bytes: See :func:`bytes_per_block`.
        blocks_per_sequence: Blocks of one sequence of the model's full length.
        device: Where the cache will be.

    Returns:
        Number of blocks including the null block, at least 2.
    """
    available = available_memory_bytes(device)
    if torch.device(device).type == "cpu":
        budget = min(available * _HOST_FRACTION, _HOST_LIMIT_BYTES)
        full_sequence = (blocks_per_sequence + 1) * block_bytes
        budget = max(budget, min(full_sequence, available * _HOST_MAX_FRACTION))
    else:
        budget = available * _DEVICE_FRACTION
    return max(int(budget) // block_bytes, 2)


def available_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Memory that can be allocated on ``device`` without swapping.

    For the CPU: what the kernel reports as available, or less where a container's limit is
    nearer. Needs no accelerator and initialises none.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_host_available_bytes(), *_cgroup_available_bytes()]
    return max(min(limits), 0)


def _host_available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # No Linux: half of what is installed is a careful guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_available_bytes() -> list[int]:
    free = []
    for limit_file, usage_file in _CGROUP_FILES:
        try:
            limit = int(Path(limit_file).read_text(encoding="ascii"))
            usage = int(Path(usage_file).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        if limit < _NO_LIMIT_BYTES:
            free.append(limit - usage)
    return free
