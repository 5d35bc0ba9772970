# SPDX-License-Identifier: Apache-2.0
"""The shapes that the benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A batch of sequences; ``query_len`` 1 is a decode step.

    ``seq_len`` and ``query_len`` are those of every sequence, or a tuple with one each.
    ``kv_cache_dtype`` is that of the ops: ``auto`` for a cache of ``dtype``, else 8 bits.
    ``layout`` is one of docs/layouts.md, of the CPU's cases; a GPU's are all ``vllm``.
    """

    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    seq_len: int | tuple[int, ...]
    query_len: int | tuple[int, ...] = 1
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    layout: str = "panels"

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the elements of the cache."""
        return _cache_dtype(self.kv_cache_dtype, self.dtype)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """``(query_len, seq_len)`` of each sequence."""
        return list(zip(self._each(self.query_len), self._each(self.seq_len), strict=True))

    @property
    def num_blocks(self) -> int:
        """Blocks that hold all sequences."""
        return sum(-(-seq_len // self.block_size) for _, seq_len in self.lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call reads."""
        tokens = sum(seq_len for _, seq_len in self.lengths)
        return 2 * tokens * self.num_kv_heads * self.head_size * self.cache_dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of one causal call: 4 * head_size a (query, key, head)."""
        pairs = sum(
            query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2
            for query_len, seq_len in self.lengths
        )
        return 4 * self.num_heads * self.head_size * pairs

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"B{self.num_seqs} H{self.num_heads}/{self.num_kv_heads} D{self.head_size}"
        cache = "" if self.kv_cache_dtype == "auto" else f" {self.kv_cache_dtype}"
        blocks = "" if self.block_size == 16 else f" block {self.block_size}"
        layout = "" if self.layout == "panels" else f" {self.layout}"
        lengths = f"q{_range(self.query_len)} kv{_range(self.seq_len)}"
        return f"{shape} {lengths} {dtype}{cache}{blocks}{layout}"

    def _each(self, length: int | tuple[int, ...]) -> tuple[int, ...]:
        return (length,) * self.num_seqs if isinstance(length, int) else length


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
        return _cache_dtype(self.kv_cache_dtype, self.dtype)

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


def _cache_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    if kv_cache_dtype == "auto":
        return dtype
    return torch.int8 if kv_cache_dtype == "int8" else torch.uint8


def _range(length: int | tuple[int, ...]) -> str:
    return str(length) if isinstance(length, int) else f"{min(length)}..{max(length)}"


_BF16 = torch.bfloat16
# Drawn once from 1..4096, with both ends and lengths around a block's edge among them.
RAGGED_LENS = (1, 15, 16, 17, 130, 377, 512, 803, 1001, 1290, 1777, 2048, 2311, 2954, 3502, 4096)
_DECODE_FP32 = [
    AttentionCase(8, 32, 8, 128, 2048),
    AttentionCase(8, 32, 32, 128, 512),
    AttentionCase(1, 32, 8, 128, 8192),
    AttentionCase(1, 32, 8, 128, 32768),
    AttentionCase(32, 9, 3, 64, 512),
    AttentionCase(64, 16, 2, 128, 1024),
    AttentionCase(len(RAGGED_LENS), 32, 8, 128, RAGGED_LENS),
]
# One long sequence among short ones keeps all threads busy only if it is cut.
_ONE_LONG = AttentionCase(16, 32, 8, 128, (32768, *[128] * 15))


def _in_every_dtype(case: AttentionCase) -> list[AttentionCase]:
    """The query of a quantised cache is bf16."""
    return [
        case,
        replace(case, dtype=_BF16),
        replace(case, dtype=torch.float16),
        replace(case, dtype=_BF16, kv_cache_dtype="fp8"),
        replace(case, dtype=_BF16, kv_cache_dtype="int8"),
    ]


def _in_fp32_and_bf16(cases: list[AttentionCase]) -> list[AttentionCase]:
    return [replace(case, dtype=dtype) for case in cases for dtype in (torch.float32, _BF16)]


_IN_LARGE_BLOCKS = [replace(case, block_size=32) for case in _DECODE_FP32]
DECODE = [
    *(each for case in _DECODE_FP32 for each in _in_every_dtype(case)),
    *(each for case in _IN_LARGE_BLOCKS for each in _in_every_dtype(case)),
    *_in_fp32_and_bf16([_ONE_LONG]),
    *_in_fp32_and_bf16([replace(_DECODE_FP32[0], layout=name) for name in ("nhd", "hnd", "vllm")]),
]
PREFILL = _in_fp32_and_bf16(
    [
        AttentionCase(1, 9, 3, 64, 512, query_len=512),
        AttentionCase(1, 32, 8, 128, 512, query_len=512),
        AttentionCase(1, 32, 8, 128, 2048, query_len=2048),
        AttentionCase(1, 32, 8, 128, 4608, query_len=512),
    ]
)
# Of a step with chunked prefill: whole prompts or chunks, and decode rows.
MIXED = _in_fp32_and_bf16(
    [
        AttentionCase(9, 32, 8, 128, (1024, *[2048] * 8), query_len=(512, *[1] * 8)),
        AttentionCase(
            len(RAGGED_LENS) + 2,
            *(32, 8, 128),
            (*RAGGED_LENS, 256, 1280),
            query_len=(*[1] * len(RAGGED_LENS), 256, 256),
        ),
    ]
)
WRITES = [WriteCase(4096), WriteCase(4096, scattered=True)]

# For a GPU: 16-bit models at their sizes, vLLM's x-packed layout (bench/gpu.py).
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
