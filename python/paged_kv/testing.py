# SPDX-License-Identifier: Apache-2.0
"""Tools to test code that uses the ops: poisoned caches and a comparison that reports.

They are public, because whoever calls paged attention from own code wants the same two questions
answered: was anything read that must not be, and where exactly do two results differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ABSURD_BLOCK_ID", "TOLERANCES", "assert_close_report", "poison_cache"]

ABSURD_BLOCK_ID = 2_147_480_000
"""For table entries that must not be used: any cache indexed with it is far out of range."""

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

    Args:
        cache: Key or value cache of any layout, floating point. Mutated.
        used_slots: int64, any shape: ``block_id * block_size + offset`` of the slots to keep.
        block_dim: Dimension of ``cache`` that counts blocks.
        offset_dim: Dimension of ``cache`` that counts the tokens of a block.

    Example:
        >>> cache = torch.zeros(2, 4, 1, 1)
        >>> poison_cache(cache, torch.tensor([0, 5]))
        >>> cache.isnan().view(2, 4).int().tolist()
        [[0, 1, 1, 1], [1, 0, 1, 1]]
    """
    view = cache.movedim((block_dim, offset_dim), (0, 1))
    unused = torch.ones(view.shape[:2], dtype=torch.bool)
    unused.view(-1)[used_slots.reshape(-1)] = False
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
