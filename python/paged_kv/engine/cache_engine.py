# SPDX-License-Identifier: Apache-2.0
"""The tensors that hold keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged_kv.engine.memory import bytes_per_block

if TYPE_CHECKING:
    from paged_kv.models import ModelConfig

__all__ = ["CacheEngine"]


class CacheEngine:
    """Allocates one key and one value cache for each layer, in the ``nhd`` layout.

    Memory is not written here: a slot holds anything until the first token is stored in it, and
    attention never reads such slots. On a CPU that also means that pages cost nothing before
    they are used.

    Attributes:
        kv_caches: ``(key_cache, value_cache)`` of each layer, each
            ``[num_blocks, block_size, num_kv_heads, head_size]``.
        num_blocks: Blocks in each cache, the null block included.
        block_size: Tokens per block.

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
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_size)
        try:
            self.kv_caches = [
                (
                    torch.empty(shape, dtype=dtype, device=device),
                    torch.empty(shape, dtype=dtype, device=device),
                )
                for _ in range(config.num_layers)
            ]
        except RuntimeError as error:
            # torch says "DefaultCPUAllocator: can't allocate memory" and more, over many lines.
            msg = (
                f"cannot allocate {self.num_bytes} bytes for {num_blocks} KV blocks: "
                "use fewer blocks (num_blocks)"
            )
            raise MemoryError(msg) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches together."""
        return self.num_blocks * self._block_bytes
