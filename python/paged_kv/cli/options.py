# SPDX-License-Identifier: Apache-2.0
"""Turns parsed arguments into what the engine takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paged_kv.engine import SamplingParams

if TYPE_CHECKING:
    import argparse

__all__ = ["engine_options", "sampling_params"]


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Parameters from the arguments of ``add_sampling_arguments``.

    Raises:
        ValueError: A value out of range.
    """
    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        bad_words=arguments.bad_word,
        seed=arguments.seed,
        stop=arguments.stop,
        max_tokens=arguments.max_tokens,
        min_tokens=arguments.min_tokens,
        ignore_eos=arguments.ignore_eos,
    )


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``LLM`` from those of ``add_cache_arguments`` and ``--seed``."""
    return {
        "dtype": arguments.dtype,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "block_size": arguments.block_size,
        "num_blocks": arguments.num_blocks,
        "kv_cache_memory_bytes": arguments.kv_cache_memory,
        "memory_utilization": arguments.memory_utilization,
        "max_model_len": arguments.max_model_len,
        "enable_prefix_caching": not arguments.no_prefix_caching,
        "seed": arguments.seed,
    }
