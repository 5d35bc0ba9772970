# SPDX-License-Identifier: Apache-2.0
"""Sizes and limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineConfig"]

# Far above what is useful; keeps every product with a number of blocks within 64 bits.
_MAX_BLOCK_SIZE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of an engine; checked when constructed.

    Attributes:
        block_size: Tokens per KV block.
        num_blocks: Blocks in the pool including the null block; ``None``: chosen from the memory
            that is free (:func:`~paged_kv.engine.memory.default_num_blocks`).
        enable_prefix_caching: Reuse the blocks of equal prefixes.
        max_num_seqs: Most requests in one step.
        max_num_batched_tokens: Most tokens in one step; longer prompts are computed in chunks.
        max_model_len: Most tokens of a request, prompt and output together; ``None``: the model's
            own limit, or what the pool holds if that is less.
        seed: Seeds of requests that give none are drawn from this one.

    Raises:
        ValueError: A value is out of range.
        TypeError: A size is not an integer.
    """

    block_size: int = 16
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "seed"):
            _check_integer(name, getattr(self, name))
        for name in ("num_blocks", "max_model_len"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name))
        if not 1 <= self.block_size <= _MAX_BLOCK_SIZE:
            msg = f"block_size must be in [1, {_MAX_BLOCK_SIZE}], got {self.block_size}"
            raise ValueError(msg)
        if self.num_blocks is not None and not 2 <= self.num_blocks < 2**31:
            msg = (
                "num_blocks must be at least 2 (block 0 is never handed out) and below 2**31, "
                f"got {self.num_blocks}"
            )
            raise ValueError(msg)
        _check_at_least("max_num_seqs", self.max_num_seqs, 1)
        _check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        if self.max_model_len is not None:
            # One token of prompt, one of output.
            _check_at_least("max_model_len", self.max_model_len, 2)
        if not -(2**63) <= self.seed < 2**64:
            msg = f"seed must be in [-2**63, 2**64), got {self.seed}"
            raise ValueError(msg)


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{name} must be an integer, got {value!r}"
        raise TypeError(msg)


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        msg = f"{name} must be at least {minimum}, got {value}"
        raise ValueError(msg)
