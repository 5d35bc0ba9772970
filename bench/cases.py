# SPDX-License-Identifier: Apache-2.0
"""The shapes that the benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A batch of equally long sequences; ``query_len`` 1 is a decode step.

    ``kv_cache_dtype`` is that of the ops: ``auto`` for a cache of ``dtype``, else 8 bits.
    """

    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    seq_len: int
    query_len: int = 1
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    kv_cache_dtype: str = "auto"

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the elements of the cache."""
        return self.dtype if self.kv_cache_dtype == "auto" else torch.uint8

    @property
    def num_blocks(self) -> int:
        """Blocks that hold all sequences."""
        return self.num_seqs * -(-self.seq_len // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call reads."""
        tokens = self.num_seqs * self.seq_len
        return 2 * tokens * self.num_kv_heads * self.head_size * self.cache_dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of one causal call: 4 * head_size a (query, key, head)."""
        keys_before = self.seq_len - self.query_len
        pairs = self.query_len * keys_before + self.query_len * (self.query_len + 1) // 2
        return 4 * self.num_seqs * self.num_heads * self.head_size * pairs

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"B{self.num_seqs} H{self.num_heads}/{self.num_kv_heads} D{self.head_size}"
        cache = "" if self.kv_cache_dtype == "auto" else f" {self.kv_cache_dtype}"
        blocks = "" if self.block_size == 16 else f" block {self.block_size}"
        return f"{shape} q{self.query_len} kv{self.seq_len} {dtype}{cache}{blocks}"


@dataclass(frozen=True, slots=True)
class WriteCase:
    """Tokens that go into a cache: in runs of slots, as a prefill's, or scattered."""

    num_tokens: int
    scattered: bool = False
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    num_blocks: int = 1024
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the elements of the cache."""
        return self.dtype if self.kv_cache_dtype == "auto" else torch.uint8

    @property
    def num_bytes(self) -> int:
        """Bytes that one call reads and writes: keys and values, and what is stored of them."""
        elements = 2 * self.num_tokens * self.num_kv_heads * self.head_size
        return elements * (self.dtype.itemsize + self.cache_dtype.itemsize)

    def slot_mapping(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """A slot for each token, int64."""
        if not self.scattered:
            return torch.arange(self.num_tokens, device=device)
        return torch.randperm(self.num_blocks * self.block_size, device=device)[: self.num_tokens]

    def __str__(self) -> str:
        slots = "scattered slots" if self.scattered else "runs of slots"
        cache = "" if self.kv_cache_dtype == "auto" else f" {self.kv_cache_dtype}"
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"H{self.num_kv_heads} D{self.head_size}"
        return f"{self.num_tokens} tokens {shape} {dtype}{cache}, {slots}"


DECODE = [
    AttentionCase(8, 32, 8, 128, 2048),
    AttentionCase(8, 32, 32, 128, 512),
    AttentionCase(1, 32, 8, 128, 8192),
    AttentionCase(32, 9, 3, 64, 512),
    AttentionCase(64, 16, 2, 128, 1024),
    AttentionCase(8, 32, 8, 128, 2048, dtype=torch.bfloat16),
    AttentionCase(8, 32, 8, 128, 2048, dtype=torch.float16),
]
PREFILL = [
    AttentionCase(1, 9, 3, 64, 512, query_len=512),
    AttentionCase(1, 32, 8, 128, 512, query_len=512),
    AttentionCase(1, 32, 8, 128, 4608, query_len=512),
]
WRITES = [WriteCase(4096), WriteCase(4096, scattered=True)]

# For a GPU: 16-bit models at their sizes, vLLM's x-packed layout (bench/gpu.py).
_BF16 = torch.bfloat16
GPU_DECODE = [
    AttentionCase(64, 32, 32, 128, 1024, dtype=_BF16),
    AttentionCase(16, 32, 32, 128, 4096, dtype=_BF16),
    AttentionCase(1, 32, 32, 128, 16384, dtype=_BF16),
    AttentionCase(64, 32, 8, 128, 1024, dtype=_BF16),
    AttentionCase(32, 32, 8, 128, 4096, dtype=_BF16),
    AttentionCase(64, 32, 4, 128, 4096, dtype=_BF16),
    AttentionCase(1, 32, 8, 128, 1024, dtype=_BF16),
    AttentionCase(1, 32, 8, 128, 8192, dtype=_BF16),
    AttentionCase(32, 32, 8, 128, 4096, dtype=torch.float16),
    AttentionCase(32, 32, 8, 128, 4096, dtype=_BF16, block_size=8),
    AttentionCase(32, 32, 8, 128, 4096, dtype=_BF16, block_size=32),
    AttentionCase(32, 32, 8, 128, 4096, dtype=_BF16, kv_cache_dtype="fp8"),
    AttentionCase(32, 32, 8, 128, 4096, dtype=_BF16, kv_cache_dtype="fp8_e5m2"),
    AttentionCase(64, 14, 2, 64, 2048, dtype=_BF16),
    AttentionCase(16, 8, 4, 256, 4096, dtype=_BF16),
]
GPU_WRITES = [
    WriteCase(8192, num_blocks=4096, dtype=_BF16),
    WriteCase(8192, num_blocks=4096, dtype=_BF16, scattered=True),
    WriteCase(256, num_blocks=4096, dtype=_BF16, scattered=True),
    WriteCase(8192, num_blocks=4096, dtype=_BF16, kv_cache_dtype="fp8"),
]
