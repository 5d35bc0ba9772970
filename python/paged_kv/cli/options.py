# SPDX-License-Identifier: Apache-2.0
"""Turns parsed arguments into what the engine takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paged_kv.engine import SamplingParams
from paged_kv.engine.kv_scales import load_kv_scales

if TYPE_CHECKING:
    import argparse

__all__ = ["check_is_quantised", "engine_options", "sampling_params"]


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
    """Keyword arguments of ``LLM`` from those of ``add_cache_arguments`` and ``--seed``.

    Raises:
        ValueError: ``--kv-scales`` for a cache that is not quantised, or a file without scales.
        OSError: A file that cannot be read.
    """
    kv_scales = None
    if arguments.kv_scales is not None:
        check_is_quantised(arguments, "--kv-scales")
        kv_scales = load_kv_scales(arguments.kv_scales)
    return {
        "device": arguments.device,
        "cuda_graphs": arguments.cuda_graphs,
        "dtype": arguments.dtype,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "kv_scales": kv_scales,
        "block_size": arguments.block_size,
        "num_blocks": arguments.num_blocks,
        "kv_cache_memory_bytes": arguments.kv_cache_memory,
        "memory_utilization": arguments.memory_utilization,
        "max_model_len": arguments.max_model_len,
        "enable_prefix_caching": not arguments.no_prefix_caching,
        "seed": arguments.seed,
    }


def check_is_quantised(arguments: argparse.Namespace, flag: str) -> None:
    """Raise ``ValueError`` if a flag for scales is given for a cache without any."""
    if arguments.kv_cache_dtype == "auto":
        msg = f"{flag} needs --kv-cache-dtype fp8, fp8_e4m3, fp8_e5m2 or int8"
        raise ValueError(msg)
