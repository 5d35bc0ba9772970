# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged cache, against vLLM's, torch's SDPA and what this machine can do.

Each case is timed in one run in turns, on ``torch.get_num_threads()`` threads each:

* ours: `paged_kv.ops.paged_attention_varlen`, with the cache in the layout ``panels`` (a few rows
  show ``nhd`` and ``hnd``, and `paged_attention_v1` on ``vllm``);
* with ``--peer vllm``, its CPU attention in a second process (`peer_vllm_attention`);
* SDPA on contiguous keys and values. Of a quantised cache it reads the bf16 numbers;
* of a quantised cache: ours on a bf16 cache;
* the bound: the slower of reading the bytes of the very caches and of making the operations
  (`machine_probe`).

Results are checked against SDPA's before they are timed.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import paged_kv.ops
from attention_inputs import KV_SCALE, check, make_inputs, make_sdpa, may_stay_cached
from cases import DECODE, MIXED, PREFILL
from machine_probe import Bound, fma_sampler, read_sampler
from paged_kv import allocate_kv_cache
from paged_kv.testing import to_layout
from peer import Peer
from timing import Row, call_sampler, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attention_inputs import Inputs
    from cases import AttentionCase

    Attention = tuple[Callable[[], Tensor], tuple[Tensor, Tensor]]  # a call, and its caches

SDPA = "SDPA, contiguous"
VLLM = "vLLM"
BF16_CACHE = "ours, bf16 cache"
MAX_CASE_S = 4.0  # of samples; slow cases get fewer of them
SETTLE_S = 0.01
WORKER = Path(__file__).with_name("peer_vllm_attention.py")


def rows(
    num_samples: int, peer_python: Path | None = None, only: str | None = None
) -> Iterator[Row]:
    """Decode steps are rated in bytes of KV a second, the others in operations a second.

    Args:
        num_samples: Of each candidate; fewer once a case has taken `MAX_CASE_S`.
        peer_python: The Python of vLLM's environment; None: no peer.
        only: Regular expression for the names of the cases to run; None: all.
    """
    cases = [case for case in (*DECODE, *PREFILL, *MIXED) if not only or re.search(only, str(case))]
    if peer_python is None:
        for case in cases:
            yield _row(case, num_samples, None)
        return
    with closing(start_peer(peer_python)) as peer:
        for case in cases:
            yield _row(case, num_samples, peer)


def start_peer(python: Path) -> Peer:
    """A process with vLLM, on as many threads as ours."""
    return Peer(python, WORKER, {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())})


def _row(case: AttentionCase, num_samples: int, peer: Peer | None) -> Row:
    inputs = make_inputs(case)
    sdpa = make_sdpa(inputs)
    expected = sdpa().clone()
    ours, caches = make_ours(inputs)
    check(ours(), expected)
    is_small = may_stay_cached(case)
    num_threads = torch.get_num_threads()
    references = {SDPA: call_sampler(sdpa, warm_up=is_small)}
    if peer and not math.isnan(peer.sample(str(case))):
        references[VLLM] = partial(peer.sample, str(case))
    if case.kv_cache_dtype != "auto":
        bf16_inputs = make_inputs(replace(case, kv_cache_dtype="auto"))
        references[BF16_CACHE] = call_sampler(make_ours(bf16_inputs)[0], warm_up=is_small)
    samplers = {
        "ours": call_sampler(ours, warm_up=is_small),
        "read": read_sampler(caches, num_threads, warm_up=is_small),
        "compute": fma_sampler(case.flops, num_threads),
        **references,
    }
    timings = take_turns(samplers, num_samples, max_s=MAX_CASE_S, settle_s=SETTLE_S)
    is_decode = case.query_len == 1
    return Row(
        case=str(case),
        ours=timings["ours"],
        references={name: timings[name] for name in references},
        rate=(case.kv_bytes if is_decode else case.flops) / timings["ours"].median_s / 1e9,
        rate_unit="GB/s" if is_decode else "GFLOP/s",
        bound=Bound(timings["read"], timings["compute"]),
    )


def make_ours(inputs: Inputs) -> Attention:
    """Our op over a cache of the case's layout, in huge pages, which is filled here."""
    return _x_packed(inputs) if inputs.case.layout == "vllm" else _varlen(inputs)


def _varlen(inputs: Inputs) -> Attention:
    case = inputs.case
    key_cache, value_cache = _allocate(case)
    if case.layout == "panels":
        key, value = _filled_hnd(inputs)
        key_cache.copy_(to_layout(key, "panels", is_key=True))
        value_cache.copy_(to_layout(value, "panels", is_key=False))
    else:
        inputs.fill((key_cache.transpose(1, 2), value_cache.transpose(1, 2)))
    out = torch.empty_like(inputs.query)
    kv_scale = None if case.kv_cache_dtype == "auto" else _kv_scale(case)

    def call() -> Tensor:
        paged_kv.ops.paged_attention_varlen(
            out,
            inputs.query,
            key_cache,
            value_cache,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.block_tables,
            inputs.scale,
            kv_cache_dtype=case.kv_cache_dtype,
            k_scale=kv_scale,
            v_scale=kv_scale,
        )
        return out

    return call, (key_cache, value_cache)


def _x_packed(inputs: Inputs) -> Attention:
    case = inputs.case
    key, value = _filled_hnd(inputs)
    key_cache, value_cache = _allocate(case)
    key_cache.copy_(to_layout(key, "vllm", is_key=True))
    value_cache.copy_(to_layout(value, "vllm", is_key=False))
    out = torch.empty_like(inputs.query)
    kv_scale = _kv_scale(case)
    max_seq_len = int(inputs.seq_lens.max())

    def call() -> Tensor:
        paged_kv.ops.paged_attention_v1(
            *(out, inputs.query, key_cache, value_cache, case.num_kv_heads, inputs.scale),
            *(inputs.block_tables, inputs.seq_lens, case.block_size, max_seq_len, None),
            *(case.kv_cache_dtype, kv_scale, kv_scale),
        )
        return out

    return call, (key_cache, value_cache)


def _filled_hnd(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Keys and values in hnd, as ``[num_blocks, block_size, num_kv_heads, head_size]``."""
    case = inputs.case
    shape = (case.num_blocks, case.num_kv_heads, case.block_size, case.head_size)
    key, value = (torch.zeros(shape, dtype=case.cache_dtype) for _ in range(2))
    inputs.fill((key, value))
    return key.transpose(1, 2), value.transpose(1, 2)


def _allocate(case: AttentionCase) -> tuple[Tensor, Tensor]:
    return allocate_kv_cache(
        *(case.num_blocks, case.block_size, case.num_kv_heads, case.head_size),
        dtype=case.cache_dtype,
        layout=case.layout,
    )


def _kv_scale(case: AttentionCase) -> Tensor:
    return torch.tensor([KV_SCALE[case.kv_cache_dtype]])
