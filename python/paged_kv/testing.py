# SPDX-License-Identifier: Apache-2.0
"""Tools to test code that uses the ops: poisoned caches and a comparison that reports.

They are public, because whoever calls paged attention from own code wants the same two questions
answered: was anything read that must not be, and where exactly do two results differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kv._cache_panels import (
    KEY_PANELS_NUM_DIMS,
    VALUE_PANELS_NUM_DIMS,
    slots_first,
    to_panels,
)
from paged_kv._quantization import quantize_kv

__all__ = [
    "ABSURD_BLOCK_ID",
    "TOLERANCES",
    "AttentionCase",
    "AttentionInputs",
    "assert_close_report",
    "make_case",
    "poison_cache",
    "to_layout",
]

ABSURD_BLOCK_ID = 2_147_480_000
"""For table entries that must not be used: any cache indexed with it is far out of range."""

_POISON_BYTE = 0x7F  # NaN in e4m3 and in e5m2, the largest value of int8

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    # dtype: (largest error / largest value, L2 norm of the error / L2 norm of the result).
    # Attention is a weighted mean of values, so errors scale with the largest of them. f32 is a few
    # ulps of the sums, the 16-bit rows are the rounding of the output.
    torch.float32: (1e-5, 2e-6),
    torch.float16: (1.5e-3, 1e-3),
    torch.bfloat16: (8e-3, 5e-3),
}


def poison_cache(
    cache: Tensor, used_slots: Tensor, block_dim: int = 0, offset_dim: int = 1
) -> None:
    """Fills every slot of ``cache`` that is not in ``used_slots`` with NaN.

    int8 has no NaN; its slots get 127, the largest value.

    Args:
        cache: Key or value cache of any layout, floating point; or uint8, the bytes of either
            fp8 format; or int8. Mutated.
        used_slots: int64, any shape: ``block_id * block_size + offset`` of the slots to keep.
        block_dim: Dimension of ``cache`` that counts blocks. Not used for layout panels.
        offset_dim: Dimension of ``cache`` that counts the tokens of a block. Not used for layout
            panels, which has several of them.

    Example:
        >>> cache = torch.zeros(2, 4, 1, 1)
        >>> poison_cache(cache, torch.tensor([0, 5]))
        >>> cache.isnan().view(2, 4).int().tolist()
        [[0, 1, 1, 1], [1, 0, 1, 1]]
    """
    if cache.dim() in (KEY_PANELS_NUM_DIMS, VALUE_PANELS_NUM_DIMS):
        view, num_slot_dims = slots_first(cache), cache.dim() - 3
    else:
        view, num_slot_dims = cache.movedim((block_dim, offset_dim), (0, 1)), 2
    unused = torch.ones(view.shape[:num_slot_dims], dtype=torch.bool)
    unused.view(-1)[used_slots.reshape(-1)] = False
    if view.element_size() == 1:
        view.view(torch.uint8)[unused.to(cache.device)] = _POISON_BYTE
    else:
        view[unused.to(cache.device)] = float("nan")


def assert_close_report(
    actual: Tensor,
    expected: Tensor,
    *,
    max_error: float | None = None,
    l2_error: float | None = None,
    name: str = "result",
) -> None:
    """Compares two tensors and says where and how much they differ.

    Args:
        actual: What was computed.
        expected: Same shape; best in float64.
        max_error: Bound for the largest absolute error, relative to the largest absolute value of
            ``expected``. Default: ``TOLERANCES`` for the dtype of ``actual``.
        l2_error: Bound for the L2 norm of the error, relative to that of ``expected``. Default: as
            above.
        name: What to call it in the message.

    Raises:
        AssertionError: They differ. Infinities and NaN must agree exactly.

    Example:
        >>> assert_close_report(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    """
    if actual.shape != expected.shape:
        msg = f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
        raise AssertionError(msg)
    default_max, default_l2 = TOLERANCES.get(actual.dtype, (0.0, 0.0))
    max_error = default_max if max_error is None else max_error
    l2_error = default_l2 if l2_error is None else l2_error

    a, e = actual.detach().cpu().double(), expected.detach().cpu().double()
    special = ~(a.isfinite() & e.isfinite())
    mismatch = special & ~((a == e) | (a.isnan() & e.isnan()))
    if mismatch.any():
        raise AssertionError(_report(name, a, e, mismatch, "infinities or NaN differ"))

    a, e = a.masked_fill(special, 0.0), e.masked_fill(special, 0.0)
    difference = (a - e).abs()
    bound = max_error * e.abs().max().item() if e.numel() else 0.0
    too_large = difference > bound
    if too_large.any():
        reason = f"largest error {difference.max():.3g} > {bound:.3g}"
        raise AssertionError(_report(name, a, e, too_large, reason))
    norm = difference.norm().item()
    if norm > l2_error * e.norm().item():
        reason = f"L2 error {norm / e.norm().item():.3g} > {l2_error:.3g}"
        raise AssertionError(_report(name, a, e, difference > 0, reason))


def _report(name: str, a: Tensor, e: Tensor, wrong: Tensor, reason: str) -> str:
    """The worst position with both values, the fraction that is wrong, and the cosine."""
    # NaN counts as the worst: it hides everything else.
    badness = torch.where(wrong, (a - e).abs().nan_to_num(nan=torch.inf, posinf=torch.inf), -1.0)
    worst = tuple(int(i) for i in torch.unravel_index(badness.argmax(), a.shape))
    a_finite, e_finite = a.nan_to_num(0.0, 0.0, 0.0), e.nan_to_num(0.0, 0.0, 0.0)
    cosine = torch.cosine_similarity(a_finite.flatten(), e_finite.flatten(), dim=0).item()
    return (
        f"{name}: {reason}; worst at {worst}: got {a[worst].item():.9g}, "
        f"expected {e[worst].item():.9g}; {wrong.double().mean().item():.2%} of "
        f"{a.numel()} elements wrong; cosine {cosine:.9f}"
    )


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One attention problem by its sizes; :func:`make_case` makes the tensors.

    Attributes:
        name: For reports.
        query_lens: Queries of each sequence in this step.
        seq_lens: Keys of each sequence, this step's tokens included.
        num_heads: Heads of the query.
        num_kv_heads: Heads of the cache.
        head_size: Elements of a head.
        block_size: Tokens a block.
        layout: ``nhd``, ``hnd``, ``vllm`` (x-packed) or ``panels``.
        dtype: Of queries and caches.
        causal: As for ``paged_attention_varlen``, and so all that follow.
        sliding_window: 0 = none.
        softcap: 0 = none.
        alibi: Whether to make slopes.
        sinks: Whether to make sinks.
        kv_cache_dtype: ``auto``; an fp8 format: then the caches are uint8; or ``int8``.
        head_scales: Whether each kv head of a quantised cache has scales of its own.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    layout: str = "nhd"
    dtype: torch.dtype = torch.float32
    causal: bool = True
    sliding_window: int = 0
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    kv_cache_dtype: str = "auto"
    head_scales: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The tensors of a case, named and shaped as the arguments of ``paged_attention_varlen``.

    ``k_scale`` and ``v_scale`` are ones with ``auto``, where ops do not use them.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    scale: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor
    v_scale: Tensor


def make_case(case: AttentionCase, *, seed: int = 0, placement: int = 0) -> AttentionInputs:
    """Makes the tensors of a case, with everything poisoned that must not be read.

    Cache slots that no sequence holds are NaN (int8: 127), table entries past a sequence's blocks
    are ``ABSURD_BLOCK_ID``, and the query is a slice of a wider tensor, so not contiguous.

    Args:
        case: What to make.
        seed: Of queries, keys and values.
        placement: Seed of the physical blocks: where the same keys and values lie in the cache.

    Example:
        >>> inputs = make_case(AttentionCase("decode", query_lens=(1,), seq_lens=(20,)))
        >>> inputs.key_cache.shape
        torch.Size([4, 16, 2, 64])
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    num_tokens = sum(case.query_lens)
    width = case.num_heads + 2 * case.num_kv_heads
    query = normal(num_tokens, width, case.head_size)[:, : case.num_heads]

    blocks_needed = [-(-seq_len // case.block_size) for seq_len in case.seq_lens]
    num_blocks = sum(blocks_needed) + 2
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(placement)).int()
    max_blocks = max(blocks_needed, default=0) + 1
    block_tables = torch.full((len(case.seq_lens), max_blocks), ABSURD_BLOCK_ID, dtype=torch.int32)
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    key_cache = torch.full(shape, torch.nan, dtype=case.dtype)
    value_cache = torch.full(shape, torch.nan, dtype=case.dtype)
    first = 0
    for seq, (seq_len, count) in enumerate(zip(case.seq_lens, blocks_needed, strict=True)):
        block_tables[seq, :count] = order[first : first + count]
        first += count
        positions = torch.arange(seq_len)
        ids = block_tables[seq, positions // case.block_size].long()
        offsets = positions % case.block_size
        key_cache[ids, offsets] = normal(seq_len, case.num_kv_heads, case.head_size)
        value_cache[ids, offsets] = normal(seq_len, case.num_kv_heads, case.head_size)

    k_scale = v_scale = torch.ones(1)
    if case.kv_cache_dtype != "auto":
        num_scales = case.num_kv_heads if case.head_scales else 1
        k_scale = 0.02 * torch.arange(1, num_scales + 1).float()
        v_scale = 1.5 * k_scale
        key_cache = _quantize_poisoned(key_cache, case.kv_cache_dtype, k_scale)
        value_cache = _quantize_poisoned(value_cache, case.kv_cache_dtype, v_scale)

    starts = torch.tensor((0, *case.query_lens), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # 2^-1 .. 2^-8 as in the ALiBi paper, one slope 0 and one negative.
    slopes = 2.0 ** -torch.linspace(1, 8, case.num_heads)
    slopes[-1:] = 0.0
    slopes[1:2] *= -0.1
    return AttentionInputs(
        query=query,
        key_cache=to_layout(key_cache, case.layout, is_key=True),
        value_cache=to_layout(value_cache, case.layout, is_key=False),
        query_start_loc=starts,
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32),
        block_tables=block_tables,
        scale=case.head_size**-0.5,
        alibi_slopes=slopes if case.alibi else None,
        sinks=torch.randn(case.num_heads, generator=generator) if case.sinks else None,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _quantize_poisoned(cache: Tensor, kv_cache_dtype: str, scale: Tensor) -> Tensor:
    """``quantize_kv`` whose NaN are poison in int8 as well."""
    quantised = quantize_kv(cache, kv_cache_dtype, scale)
    quantised.view(torch.uint8).masked_fill_(cache.isnan(), _POISON_BYTE)
    return quantised


def to_layout(cache: Tensor, layout: str, *, is_key: bool) -> Tensor:
    """Copies an nhd cache into another layout, in the form that the ops take.

    Args:
        cache: ``[num_blocks, block_size, num_kv_heads, head_size]``.
        layout: ``nhd``; ``hnd``: the same shape, a transposed view; ``vllm``: x-packed;
            ``panels``.
        is_key: In the last two layouts keys and values differ.

    Raises:
        ValueError: Unknown layout.
    """
    if layout == "nhd":
        return cache.clone()
    if layout == "hnd":
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "panels":
        return to_panels(cache, is_key=is_key)
    if layout != "vllm":
        msg = f"layout: expected nhd, hnd, vllm or panels, got {layout!r}"
        raise ValueError(msg)
    if not is_key:
        return cache.permute(0, 2, 3, 1).contiguous()
    x = 16 // cache.element_size()
    chunks = cache.reshape(*cache.shape[:3], -1, x)
    return chunks.permute(0, 2, 3, 1, 4).contiguous()
