# SPDX-License-Identifier: Apache-2.0
"""The tensors that hold keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.engine.memory import available_memory_bytes, bytes_per_block
from paged_kv.kv_cache import KVCache
from paged_kv.kv_cache_memory import allocate_kv_cache

if TYPE_CHECKING:
    import torch

    from paged_kv.models import ModelConfig

__all__ = ["CacheEngine"]


class CacheEngine:
    """Allocates one key and one value cache for each layer, in the ``hnd`` layout.

    There the tokens of a block and kv head lie together, which is what attention on a CPU reads
    fastest (docs/kernels.md).

    Their memory is that of :func:`~paged_kv.kv_cache_memory.allocate_kv_cache`: on a CPU in huge
    pages, which cost nothing before they are used.

    Attributes:
        kv_caches: One a layer.
        num_blocks: Blocks in each cache, the null block included.
        block_size: Tokens per block.

    Raises:
        MemoryError: The caches are larger than the memory that is available.

    Source:
        vLLM ``worker/cache_engine.py::CacheEngine`` (before v1).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._block_bytes = bytes_per_block(config, block_size, dtype)
        available = available_memory_bytes(device)
        # Checked here since pages that are only reserved come without an error.
        if self.num_bytes > available:
            msg = (
                f"{num_blocks} KV blocks take {_gib(self.num_bytes)}, {_gib(available)} are "
                "available: use fewer blocks (num_blocks)"
            )
            raise MemoryError(msg)
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_size)
        self.kv_caches = [
            KVCache(*allocate_kv_cache(*shape, dtype=dtype, device=device))
            for _ in range(config.num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches together."""
        return self.num_blocks * self._block_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
