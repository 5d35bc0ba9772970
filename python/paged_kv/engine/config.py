# SPDX-License-Identifier: Apache-2.0
"""Sizes and limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paged_kv.engine.decode_graphs import default_graph_sizes
from paged_kv.engine.device import check_cuda_graphs, check_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.engine.request_queue import SchedulingPolicy

__all__ = ["EngineConfig"]

# Far above what is useful; keeps every product with a number of blocks within 64 bits.
_MAX_BLOCK_SIZE = 2**20
_KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8")
_INTEGERS = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "swap_space_bytes",
    "seed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of an engine; checked when constructed.

    Attributes:
        device: Where the model runs and the cache is: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        block_size: Tokens per KV block.
        num_blocks: Blocks in the pool including the null block; ``None``: as many as fit into the
            next two, or chosen from the memory that is free
            (:func:`~paged_kv.engine.memory.default_num_blocks`). With this or the next one all of
            the cache's memory is taken when the engine is made, else on a CPU as it is used.
        kv_cache_memory_bytes: Bytes for the cache; ``None``: see ``memory_utilization``.
        memory_utilization: Share of the memory, in (0, 1], that model, a step of full size and
            CUDA graphs (both measured) and cache may take together; ``None``: no such limit.
        kv_cache_dtype: ``"auto"``: keys and values as the model computes them; ``"fp8"``,
            ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"int8"`` (on a CPU): quantised.
        enable_prefix_caching: Reuse the blocks of equal prefixes.
        max_num_seqs: Most completions in one step.
        max_num_batched_tokens: Most tokens in one step; longer prompts are computed in chunks.
        enable_chunked_prefill: ``False``: a prompt is computed in one step. Then
            ``max_num_batched_tokens`` has to be at least ``max_model_len``.
        long_prefill_token_threshold: Most tokens of one request in a step that it shares with
            others; 0: no limit.
        scheduling_policy: ``"fcfs"``, first come, first served, or ``"priority"``.
        watermark: Share of the blocks that stays free when a request is admitted beside others.
        preemption_mode: What happens to keys and values of a request that has to make room:
            ``"recompute"`` or ``"swap"`` to the host's memory.
        swap_space_bytes: Size of that memory. What does not fit is recomputed.
        batch_invariant: The same bits for a request, whatever else is in a batch, whether its
            prefix was cached, cut into chunks, or preempted. Slower where products with weights
            are torch's (docs/engine.md).
        cuda_graphs: Capture steps in which each request has one token as CUDA graphs, when the
            engine is made. For ``device="cuda"`` only; off by default, as it has not run on a GPU
            yet (docs/engine.md).
        cuda_graph_sizes: Batch sizes to capture; a smaller batch is padded to the next, a larger
            one than all of them runs without a graph. ``None``: up to ``max_num_seqs``
            (:func:`~paged_kv.engine.decode_graphs.default_graph_sizes`).
        record_decode_steps: Record the ops of steps in which each request has one token, by their
            number of requests, and repeat them, which saves the time of the model's Python
            (docs/engine.md). For ``device="cpu"`` only; ``None``: there they are.
        max_model_len: Most tokens of a request, prompt and output together; ``None``: the model's
            own limit, or what the pool holds if that is less.
        seed: Seeds of requests that give none are drawn from this one.

    Raises:
        ValueError: A value is out of range, or there is no such device.
        TypeError: A size is not an integer.
    """

    device: str = "cpu"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: SchedulingPolicy = "fcfs"
    watermark: float = 0.0
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    swap_space_bytes: int = 2**30
    batch_invariant: bool = False
    cuda_graphs: bool = False
    cuda_graph_sizes: Sequence[int] | None = None
    record_decode_steps: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            _check_integer(name, getattr(self, name))
        for name in ("num_blocks", "max_model_len", "kv_cache_memory_bytes"):
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
            if not self.enable_chunked_prefill:
                _check_at_least(
                    "max_num_batched_tokens", self.max_num_batched_tokens, self.max_model_len
                )
        check_device(self.device)
        self._check_memory()
        self._check_scheduling()
        self._check_graphs()
        if not -(2**63) <= self.seed < 2**64:
            msg = f"seed must be in [-2**63, 2**64), got {self.seed}"
            raise ValueError(msg)

    @property
    def has_cache_size(self) -> bool:
        """Whether the cache's size is given, rather than chosen from the memory there is."""
        return self.num_blocks is not None or self.kv_cache_memory_bytes is not None

    @property
    def usable_swap_space_bytes(self) -> int:
        """`swap_space_bytes`; 0 if nothing is swapped."""
        return self.swap_space_bytes if self.preemption_mode == "swap" else 0

    @property
    def decode_graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes to capture, in increasing order; none without `cuda_graphs`."""
        if not self.cuda_graphs:
            return ()
        if self.cuda_graph_sizes is None:
            return default_graph_sizes(self.max_num_seqs)
        return tuple(sorted(set(self.cuda_graph_sizes)))

    @property
    def records_decode_steps(self) -> bool:
        """Whether steps are recorded: `record_decode_steps`, or what it means where it is None."""
        if self.record_decode_steps is None:
            return self.device == "cpu" and not self.cuda_graphs
        return self.record_decode_steps

    def _check_graphs(self) -> None:
        if self.cuda_graphs:
            check_cuda_graphs(self.device)
        if not isinstance(self.record_decode_steps, bool | None):
            msg = f"record_decode_steps must be True, False or None, got {self.record_decode_steps}"
            raise TypeError(msg)
        if self.record_decode_steps and self.device != "cpu":
            msg = f"record_decode_steps needs device cpu, got {self.device!r}: use cuda_graphs"
            raise ValueError(msg)
        if self.cuda_graph_sizes is None:
            return
        if not self.cuda_graphs:
            msg = "cuda_graph_sizes needs cuda_graphs"
            raise ValueError(msg)
        if not self.cuda_graph_sizes:
            msg = "cuda_graph_sizes must have at least one size"
            raise ValueError(msg)
        for size in self.cuda_graph_sizes:
            _check_integer("cuda_graph_sizes", size)
            if not 1 <= size <= self.max_num_seqs:
                msg = f"cuda_graph_sizes must be in [1, max_num_seqs = {self.max_num_seqs}], "
                raise ValueError(msg + f"got {size}")

    def _check_memory(self) -> None:
        if self.kv_cache_memory_bytes is not None:
            _check_at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        if self.memory_utilization is not None and not 0.0 < self.memory_utilization <= 1.0:
            msg = f"memory_utilization must be in (0, 1], got {self.memory_utilization}"
            raise ValueError(msg)
        _check_at_least("swap_space_bytes", self.swap_space_bytes, 0)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, _KV_CACHE_DTYPES)
        if self.kv_cache_dtype == "int8" and self.device != "cpu":
            msg = f"kv_cache_dtype int8 needs device cpu, got {self.device!r}: use fp8"
            raise ValueError(msg)

    def _check_scheduling(self) -> None:
        _check_at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            msg = "long_prefill_token_threshold cuts prompts: it needs enable_chunked_prefill"
            raise ValueError(msg)
        _check_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _check_choice("preemption_mode", self.preemption_mode, ("recompute", "swap"))
        if not 0.0 <= self.watermark < 1.0:
            msg = f"watermark must be in [0, 1), got {self.watermark}"
            raise ValueError(msg)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        msg = f"{name} must be one of {', '.join(choices)}, got {value!r}"
        raise ValueError(msg)


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{name} must be an integer, got {value!r}"
        raise TypeError(msg)


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        msg = f"{name} must be at least {minimum}, got {value}"
        raise ValueError(msg)
