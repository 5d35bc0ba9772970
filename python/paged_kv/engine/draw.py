# SPDX-License-Identifier: Apache-2.0
"""Draws one token from each row of weights."""

from __future__ import annotations

import torch

__all__ = ["chunk_sums", "draw_tokens"]

# Weights summed up before their running total is taken: the total of a row then costs one fast
# pass, and the search looks at one chunk.
_CHUNK_SIZE = 256


def draw_tokens(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert each row's distribution at one number: the token whose share holds it.

    Args:
        weights: ``[n, vocab_size]`` float32, at least 0, a row's largest well above the smallest
            normal float. Tokens of weight 0 never come out.
        uniforms: ``[n]`` float64 in [0, 1).

    Returns:
        ``[n]`` int64 token ids. A row's result depends on that row and its number alone.

    Cost: one pass over the weights.
    """
    vocab_size = weights.shape[1]
    cdf = chunk_sums(weights).double().cumsum(dim=-1)
    # u * total < total for every u < 1, so the search ends on a chunk, and right=True makes it one
    # whose sum is above 0.
    target = uniforms.unsqueeze(1) * cdf[:, -1:]
    chunk = torch.searchsorted(cdf, target, right=True)
    below = torch.where(chunk > 0, cdf.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    share = (target - below) / (cdf.gather(1, chunk) - below)

    token_ids = chunk * _CHUNK_SIZE + torch.arange(_CHUNK_SIZE, device=weights.device)
    inside = weights.gather(1, token_ids.clamp(max=vocab_size - 1)).double()
    inner_cdf = inside.masked_fill_(token_ids >= vocab_size, 0.0).cumsum(dim=-1)
    total = inner_cdf[:, -1:]
    # The share is below 1 but for rounding; the largest number below the total keeps it so.
    target = torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))
    return (chunk * _CHUNK_SIZE + torch.searchsorted(inner_cdf, target, right=True)).squeeze(1)


def chunk_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums of 256 neighbours each, ``[n, vocab_size // 256 + 1]``.

    Unlike the sum of a whole row, these do not depend on how many rows share the threads.
    """
    num_whole = weights.shape[1] // _CHUNK_SIZE
    whole = weights[:, : num_whole * _CHUNK_SIZE].view(len(weights), num_whole, _CHUNK_SIZE)
    rest = weights[:, num_whole * _CHUNK_SIZE :]
    return torch.cat([whole.sum(dim=-1), rest.sum(dim=-1, keepdim=True)], dim=1)
