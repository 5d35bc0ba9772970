# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands have. Nothing here needs torch."""

from __future__ import annotations

import argparse
import re

__all__ = ["add_cache_arguments", "add_model_arguments", "add_sampling_arguments", "num_bytes"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def num_bytes(text: str) -> int:
    """Parse a size: ``"512M"``, ``"2G"``, ``"1.5GiB"`` or a number of bytes.

    Raises:
        argparse.ArgumentTypeError: Something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        msg = f"expected a size such as 512M or 2G, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return int(float(match[1]) * _UNITS[match[2].upper()])


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model``, ``--device`` and ``--cuda-graphs``."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="folder, GGUF file, hub id, smollm2-135m or gemma3-270m",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="D", help="cpu (default), cuda or cuda:N"
    )
    parser.add_argument(
        "--cuda-graphs",
        action="store_true",
        help="on cuda: replay decode steps as graphs; not tried on a GPU yet",
    )


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, max_tokens: int, temperature: float, top_p: float
) -> argparse._ArgumentGroup:
    """What :func:`paged_kv.cli.options.sampling_params` reads, with these defaults."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"default: {max_tokens}"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0: greedy; default: {temperature:g}",
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0: no limit")
    group.add_argument(
        "--top-p", type=float, default=top_p, metavar="P", help=f"default: {top_p:g}"
    )
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    for name in ("repetition", "presence", "frequency"):
        default = 1.0 if name == "repetition" else 0.0
        group.add_argument(
            f"--{name}-penalty", type=float, default=default, metavar="P", help=f"{default:g}: none"
        )
    group.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        help="a word that may not come out; repeatable",
    )
    group.add_argument("--seed", type=int, default=0, metavar="S")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="no end before so many tokens"
    )
    return group


def add_cache_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What :func:`paged_kv.cli.options.engine_options` reads."""
    group = parser.add_argument_group("KV cache")
    group.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of weights and, with --kv-cache-dtype auto, of the cache",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"),
        help="auto: as the model computes keys and values; others: quantised",
    )
    group.add_argument(
        "--kv-scales",
        metavar="FILE",
        help="scales of a quantised cache, of generate's --calibrate-kv-scales or save_kv_scales; "
        "default: from random tokens, which int8 suffers",
    )
    group.add_argument("--block-size", type=int, default=16, metavar="B", help="tokens per block")
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--num-blocks", type=int, metavar="K", help="default: from the memory that is free"
    )
    size.add_argument(
        "--kv-cache-memory", type=num_bytes, metavar="SIZE", help="of the cache, such as 512M or 2G"
    )
    size.add_argument(
        "--memory-utilization",
        type=float,
        metavar="SHARE",
        help="of the memory that model, a step (measured) and cache may take; in (0, 1]",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of prompt and output together; default: the model's",
    )
    group.add_argument("--no-prefix-caching", action="store_true")
    return group
