# SPDX-License-Identifier: Apache-2.0
"""How large a KV block is and how many of them to make."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paged_kv._core import (
    UniformTypeKVCacheSpecs,
    estimate_max_model_len,
    get_kv_cache_configs,
    get_kv_cache_groups,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paged_kv._core import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

__all__ = [
    "KVCachePlan",
    "available_memory_bytes",
    "bytes_per_block",
    "check_model_limit",
    "default_num_blocks",
    "plan_kv_cache",
    "total_memory_bytes",
    "used_memory_bytes",
]

# One of the prompt and one of the output.
_MIN_REQUEST_TOKENS = 2

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


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """How large the cache of an engine is.

    Attributes:
        kv_cache_config: Groups of layers, number of blocks, where the layers lie.
        max_model_len: Most tokens of a request; one of this length fits into the pool alone.
        block_bytes: Bytes of a block in all layers that it holds.
    """

    kv_cache_config: KVCacheConfig
    max_model_len: int
    block_bytes: int

    @property
    def scheduler_block_size(self) -> int:
        """Tokens after which the blocks of all groups end together."""
        return math.lcm(*self._block_sizes)

    @property
    def hash_block_size(self) -> int:
        """Tokens per block hash: every group's blocks are whole numbers of it."""
        return math.gcd(*self._block_sizes)

    @property
    def _block_sizes(self) -> list[int]:
        return [g.kv_cache_spec.block_size for g in self.kv_cache_config.kv_cache_groups]


def plan_kv_cache(
    specs: Mapping[str, KVCacheSpec],
    *,
    num_blocks: int | None,
    num_bytes: int | None = None,
    max_model_len: int | None,
    model_limit: int,
    max_num_batched_tokens: int,
    device: torch.device | str = "cpu",
) -> KVCachePlan:
    """Choose the number of blocks and the longest request.

    Args:
        specs: The spec of each layer, by name, in order.
        num_blocks: Blocks, the null block included; None: what fits into ``num_bytes``.
        num_bytes: Bytes for the cache; None: :func:`default_num_blocks` of what is free.
        max_model_len: Most tokens of a request; None: as many as model and pool allow.
        model_limit: The model's own limit in tokens.
        max_num_batched_tokens: Most tokens of a step: a window keeps them besides itself.
        device: Where the cache will be.

    Raises:
        ValueError: ``max_model_len`` is more than the model or the pool allows, or a pool in which
            not even one token fits.
    """
    check_model_limit(max_model_len, model_limit)
    groups = get_kv_cache_groups(dict(specs))
    block_bytes = bytes_per_block(groups)
    wanted_len = max_model_len or model_limit
    if num_blocks is None and num_bytes is not None:
        num_blocks = max(num_bytes // block_bytes, 2)
    if num_blocks is None:
        needed = _blocks_of_one_request(groups, wanted_len, max_num_batched_tokens)
        num_blocks = default_num_blocks(block_bytes, needed, device)
    pool_limit = estimate_max_model_len(
        groups,
        max_model_len=model_limit,
        max_in_flight_tokens=max_num_batched_tokens,
        available_memory=(num_blocks - 1) * block_bytes,  # one is the null block
    )
    _check_pool_limit(pool_limit, max_model_len, num_blocks)
    max_model_len = pool_limit if max_model_len is None else max_model_len
    (config,) = get_kv_cache_configs(
        [dict(specs)],
        [num_blocks * block_bytes],
        max_model_len=max_model_len,
        max_in_flight_tokens=max_num_batched_tokens,
        num_gpu_blocks_override=num_blocks,
    )
    return KVCachePlan(config, max_model_len, block_bytes)


def check_model_limit(max_model_len: int | None, model_limit: int) -> None:
    """Raise ``ValueError`` if requests may be longer than the model allows."""
    if max_model_len is not None and max_model_len > model_limit:
        msg = f"max_model_len must be at most the model's {model_limit}, got {max_model_len}"
        raise ValueError(msg)


def bytes_per_block(kv_cache_groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes that one block takes in all layers that it holds.

    Groups take turns at the same memory, so it is what the largest of them needs.
    """
    return max(map(_group_block_bytes, kv_cache_groups))


def _group_block_bytes(group: KVCacheGroupSpec) -> int:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):  # has the bytes of all its layers
        return spec.page_size_bytes
    return spec.page_size_bytes * len(group.layer_names)


def _blocks_of_one_request(
    groups: Sequence[KVCacheGroupSpec], num_tokens: int, max_in_flight_tokens: int
) -> int:
    specs = [group.kv_cache_spec for group in groups]
    return sum(
        -(-spec.max_memory_usage_bytes(num_tokens, max_in_flight_tokens) // spec.page_size_bytes)
        for spec in specs
    )


def _check_pool_limit(pool_limit: int, max_model_len: int | None, num_blocks: int) -> None:
    if pool_limit < _MIN_REQUEST_TOKENS:
        msg = (
            f"{num_blocks} KV blocks hold no request of {_MIN_REQUEST_TOKENS} tokens: use more "
            "blocks (num_blocks)"
        )
        raise ValueError(msg)
    if max_model_len is not None and max_model_len > pool_limit:
        msg = (
            f"max_model_len must be at most the {pool_limit} tokens that {num_blocks - 1} usable "
            f"blocks hold, got {max_model_len}: use more blocks (num_blocks)"
        )
        raise ValueError(msg)


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


def total_memory_bytes(device: torch.device | str = "cpu") -> int:
    """The memory of ``device``; of a CPU: the host's, or a container's limit if that is less."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    limits = [limit for limit, _usage in _cgroup_limits()]
    return min([_installed_bytes(), *limits])


def used_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Memory that this process has now (its resident set).

    On an accelerator: what anybody has there, without what torch only keeps for later.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    try:
        num_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:  # no Linux: the most that it ever had
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(num_pages) * os.sysconf("SC_PAGE_SIZE")


def _installed_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _host_available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # No Linux: half of what is installed is a careful guess.
    return _installed_bytes() // 2


def _cgroup_available_bytes() -> list[int]:
    return [limit - usage for limit, usage in _cgroup_limits()]


def _cgroup_limits() -> list[tuple[int, int]]:
    """``(limit, usage)`` of each memory controller that sets a limit."""
    limits = []
    for limit_file, usage_file in _CGROUP_FILES:
        try:
            limit = int(Path(limit_file).read_text(encoding="ascii"))
            usage = int(Path(usage_file).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        if limit < _NO_LIMIT_BYTES:
            limits.append((limit, usage))
    return limits
