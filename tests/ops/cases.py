# SPDX-License-Identifier: Apache-2.0
"""The attention cases that every backend must pass.

Each axis is swept on its own with the others mixed; the product of all would be 10^6 cases.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from cache_cases import BLOCK_SIZES, DTYPES, HEAD_SIZES, QUANTISED_FORMATS
from ops.backends import BACKENDS

from paged_kv.testing import AttentionCase

GROUP_SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 71)


def edge_lengths(block_size: int) -> tuple[int, ...]:
    """Around a block, a partition and a tile of keys."""
    return (
        0, 1, block_size - 1, block_size, block_size + 1,
        63, 64, 65, 511, 512, 513, 1023, 1024, 1025,
    )  # fmt: skip


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_format(backend: str, kv_cache_dtype: str) -> bool:
    """int8 caches are for the CPU."""
    return kv_cache_dtype != "int8" or backend == "cpu"


def quantised_backends() -> list:
    """Arguments (backend, kv_cache_dtype): each format in each place that has it."""
    return [
        pytest.param(backend, kv_cache_dtype, id=f"{backend}-{kv_cache_dtype}")
        for backend in BACKENDS
        for kv_cache_dtype in QUANTISED_FORMATS
        if has_format(backend, kv_cache_dtype)
    ]


def decode_cases() -> list[AttentionCase]:
    """One query a sequence, as paged_attention_v1 and _v2 take it."""
    cases = []
    dtypes, layouts = itertools.cycle(DTYPES), itertools.cycle(("vllm", "nhd", "hnd", "vllm"))
    for block_size in BLOCK_SIZES:
        lengths = edge_lengths(block_size)
        cases.append(
            AttentionCase(
                f"block{block_size}",
                query_lens=(1,) * len(lengths),
                seq_lens=lengths,
                block_size=block_size,
                head_size=32,
                layout=next(layouts),
            )
        )
    for head_size, dtype in itertools.product(HEAD_SIZES, DTYPES):
        layout = next(layouts)
        cases.append(
            AttentionCase(
                f"head{head_size}-{_name(dtype)}-{layout}",
                query_lens=(1, 1, 1),
                seq_lens=(1, 40, 130),
                head_size=head_size,
                layout=layout,
                dtype=dtype,
            )
        )
    cases += [
        AttentionCase(
            f"group{group}",
            query_lens=(1, 1),
            seq_lens=(33, 600),
            num_heads=2 * group,
            num_kv_heads=2,
            head_size=32,
            layout=next(layouts),
            dtype=next(dtypes),
        )
        for group in GROUP_SIZES
    ]
    cases += [
        AttentionCase(
            f"alibi-{_name(dtype)}",
            query_lens=(1, 1, 1),
            seq_lens=(0, 100, 700),
            alibi=True,
            dtype=dtype,
            layout=next(layouts),
        )
        for dtype in DTYPES
    ]
    cases += _quantised_cases()
    cases += _in_panels(cases)
    cases.append(
        AttentionCase(
            "long",
            query_lens=(1,) * 8,
            seq_lens=(4097, 31, 32, 33, 127, 128, 129, 2048),
            num_heads=1,
            num_kv_heads=1,
            head_size=32,
            layout="vllm",
            dtype=torch.bfloat16,
        )
    )
    cases.append(AttentionCase("empty", query_lens=(), seq_lens=()))
    return cases


def _in_panels(cases: list[AttentionCase]) -> list[AttentionCase]:
    """Those whose sizes that layout has, in it: it is read by kernels of its own."""
    return [
        replace(case, name=f"{case.name}-in-panels", layout="panels")
        for case in cases
        if case.block_size % 16 == 0 and case.head_size % 16 == 0
    ]


def _quantised_cases() -> list[AttentionCase]:
    formats = itertools.cycle(("fp8", "fp8_e5m2", "int8"))
    block_sizes, layouts = itertools.cycle(BLOCK_SIZES), itertools.cycle(("vllm", "nhd", "hnd"))
    cases = [
        AttentionCase(
            f"{kv_cache_dtype}-{_name(dtype)}-head{head_size}-{layout}",
            query_lens=(1, 1, 1),
            seq_lens=(0, 45, 530),
            head_size=head_size,
            block_size=next(block_sizes),
            layout=layout,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            head_scales=head_size % 64 == 0,
        )
        for dtype, head_size in itertools.product(DTYPES, HEAD_SIZES)
        for kv_cache_dtype, layout in [(next(formats), next(layouts))]
        if layout != "vllm" or head_size % 16 == 0  # whole chunks of the x-packed layout
    ]
    # The two cycles above meet in step: turn them against each other.
    cases += [
        replace(
            case,
            name=f"{kv_cache_dtype}-{_name(dtype)}-{layout}",
            layout=layout,
            kv_cache_dtype=kv_cache_dtype,
            dtype=dtype,
        )
        for case in cases[1:2]
        for layout in ("vllm", "nhd", "hnd")
        for kv_cache_dtype in ("fp8", "fp8_e5m2", "int8")
        for dtype in DTYPES
    ]
    by_format = {case.kv_cache_dtype: case for case in cases}
    for kv_cache_dtype, case in by_format.items():
        cases += [
            replace(
                case,
                name=f"{kv_cache_dtype}-alibi",
                alibi=True,
                num_heads=6,
                seq_lens=(7, 8, 9),
                head_scales=True,
            ),
            replace(case, name=f"{kv_cache_dtype}-edges", seq_lens=(15, 16, 17)),
        ]
    return cases


def decode_cases_by_backend() -> list:
    """Arguments (backend, case). CUDA kernels take the x-packed layout."""
    return [
        pytest.param(backend, case, id=f"{backend}-{case}")
        for backend in BACKENDS
        for case in (decode_cases() if backend == "cpu" else _decode_cases_of_cuda())
        if has_format(backend, case.kv_cache_dtype)
        and (case.layout != "vllm" or case.head_size % (16 // _element_size(case)) == 0)
    ]


def varlen_cases_by_backend() -> list:
    """Arguments (backend, case). CUDA takes nhd and hnd, and head sizes of whole chunks."""
    return [
        pytest.param(backend, case, id=f"{backend}-{case}")
        for backend in BACKENDS
        for case in (varlen_cases() if backend == "cpu" else _varlen_cases_of_cuda())
    ]


def _varlen_cases_of_cuda() -> list[AttentionCase]:
    """Without what would run the same code again: other orders, formats in both dense layouts.

    A query there is computed on its own, so few of them show as much as many do.
    """
    cases = [
        replace(case, layout="nhd") if case.layout == "vllm" else case
        for case in varlen_cases()
        if case.layout != "panels"
        and has_format("cuda", case.kv_cache_dtype)
        and case.head_size % 8 == 0
        and not case.name.endswith("-reverse")
        and (case.kv_cache_dtype == "auto" or case.layout != "vllm")
    ]
    return [
        replace(case, query_lens=tuple(min(length, 5) for length in case.query_lens))
        if case.name != "causal-mixed"
        else case
        for case in cases
    ]


def _decode_cases_of_cuda() -> list[AttentionCase]:
    return [replace(case, layout="vllm") for case in decode_cases() if case.layout != "panels"]


def _element_size(case: AttentionCase) -> int:
    return case.dtype.itemsize if case.kv_cache_dtype == "auto" else 1


def varlen_cases() -> list[AttentionCase]:
    """Prefill, chunked prefill and decode in one batch, with every feature."""
    # Decode first, prefill first, no queries, no keys, more queries than keys, one query of many.
    mixed = {"query_lens": (1, 1, 40, 0, 70, 3, 1), "seq_lens": (80, 1, 40, 9, 200, 0, 513)}
    reverse = {key: value[::-1] for key, value in mixed.items()}
    features = {
        "causal": {},
        "full": {"causal": False},
        "window1": {"sliding_window": 1},
        "window16": {"sliding_window": 16},
        "window-large": {"sliding_window": 5000},
        "full-window": {"causal": False, "sliding_window": 20},
        "softcap": {"softcap": 5.0},
        "alibi": {"alibi": True},
        "sinks": {"sinks": True},
        "all": {"sliding_window": 100, "softcap": 30.0, "alibi": True, "sinks": True},
    }
    dtypes, layouts = itertools.cycle(DTYPES), itertools.cycle(("nhd", "hnd", "vllm", "nhd"))
    cases = [
        AttentionCase(
            f"{feature}-{order}",
            **lens,
            **options,
            num_heads=6,
            dtype=next(dtypes),
            layout=next(layouts),
        )
        for feature, options in features.items()
        for order, lens in (("mixed", mixed), ("reverse", reverse))
    ]
    cases += [
        AttentionCase(
            f"prefill-group{group}",
            query_lens=(37, 5),
            seq_lens=(37, 90),
            num_heads=group,
            num_kv_heads=1,
            head_size=32,
            layout=next(layouts),
            dtype=next(dtypes),
        )
        for group in GROUP_SIZES
    ]
    cases += [
        AttentionCase(
            f"prefill-head{head_size}",
            query_lens=(20, 1),
            seq_lens=(70, 70),
            head_size=head_size,
            layout=next(layouts),
            dtype=next(dtypes),
        )
        for head_size in HEAD_SIZES
    ]
    cases += [
        AttentionCase(
            f"prefill-block{block_size}",
            query_lens=edge_lengths(block_size)[1:8],
            seq_lens=tuple(length + block_size for length in edge_lengths(block_size)[1:8]),
            block_size=block_size,
            head_size=32,
            layout=next(layouts),
        )
        for block_size in (1, 5, *BLOCK_SIZES)
    ]
    cases += [
        AttentionCase(
            f"{kv_cache_dtype}-{layout}-{_name(dtype)}",
            **mixed,
            **features[feature],
            num_heads=6,
            dtype=dtype,
            layout=layout,
            kv_cache_dtype=kv_cache_dtype,
            head_scales=layout != "hnd",
        )
        for layout, feature in (("vllm", "causal"), ("nhd", "all"), ("hnd", "window16"))
        for kv_cache_dtype in ("fp8", "fp8_e5m2", "int8")
        for dtype in DTYPES
    ]
    cases += _in_panels(cases)
    cases.append(AttentionCase("empty", query_lens=(), seq_lens=()))
    return cases
