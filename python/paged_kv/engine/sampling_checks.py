# SPDX-License-Identifier: Apache-2.0
"""Checks of sampling parameters that need the model's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.engine.inputs import check_token_ids

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paged_kv.engine.sampling_params import SamplingParams

__all__ = ["check_bans", "check_sampling_params"]


def check_sampling_params(params: SamplingParams, vocab_size: int, *, has_tokenizer: bool) -> None:
    """Check that a model can serve these parameters.

    Args:
        params: What a user gave.
        vocab_size: Columns of the model's logits.
        has_tokenizer: Whether the model has one.

    Raises:
        ValueError: A token id outside the vocabulary, more log probabilities than it has tokens,
            or strings without a tokenizer.
    """
    check_token_ids(params.stop_token_ids or (), vocab_size, "stop_token_ids")
    check_token_ids(tuple(params.logit_bias or ()), vocab_size, "logit_bias")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > vocab_size:
            msg = f"{name} must be at most the vocabulary's {vocab_size} tokens, got {value}"
            raise ValueError(msg)
    if params.stop_strings and not has_tokenizer:
        msg = "stop strings need a tokenizer, the model has none: use stop_token_ids"
        raise ValueError(msg)
    if params.bad_words and not has_tokenizer:
        msg = "bad_words need a tokenizer, the model has none: use logit_bias"
        raise ValueError(msg)


def check_bans(
    params: SamplingParams,
    vocab_size: int,
    bad_words: Sequence[Sequence[int]],
    eos_token_ids: Collection[int],
) -> None:
    """Check that something is left to sample, whatever has come out.

    Args:
        params: What :func:`check_sampling_params` has passed.
        vocab_size: Columns of the model's logits.
        bad_words: Token ids of ``params.bad_words``.
        eos_token_ids: The model's end tokens.

    Raises:
        ValueError: There may come a position at which every token is banned.
    """
    banned = {ids[-1] for ids in bad_words}
    if params.min_tokens > 0:
        banned |= set(params.stop_token_ids or ())
        if not params.ignore_eos:
            banned |= set(eos_token_ids)
    if len(banned) == vocab_size:
        msg = "bad_words and, before min_tokens, stop_token_ids leave nothing to sample"
        raise ValueError(msg)
