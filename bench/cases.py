# SPDX-License-Identifier: Apache-2.0
"""The shapes that the benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A batch of equally long sequences; ``query_len`` 1 is a decode step."""

    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    seq_len: int
    query_len: int = 1
    dtype: torch.dtype = torch.float32
    block_size: int = 16

    @property
    def num_blocks(self) -> int:
        """Blocks that hold all sequences."""
        return self.num_seqs * -(-self.seq_len // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call reads."""
        tokens = self.num_seqs * self.seq_len
        return 2 * tokens * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of one causal call: 4 * head_size a (query, key, head)."""
        keys_before = self.seq_len - self.query_len
        pairs = self.query_len * keys_before + self.query_len * (self.query_len + 1) // 2
        return 4 * self.num_seqs * self.num_heads * self.head_size * pairs

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"B{self.num_seqs} H{self.num_heads}/{self.num_kv_heads} D{self.head_size}"
        return f"{shape} q{self.query_len} kv{self.seq_len} {dtype}"


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
