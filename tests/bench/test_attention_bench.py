# SPDX-License-Identifier: Apache-2.0
"""The suite attention at a small size: what it times computes the same, and what rows say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

import bench_attention
import machine_probe
from attention_inputs import check, make_inputs, make_sdpa
from cases import DECODE, MIXED, PREFILL, AttentionCase
from machine_probe import Bound, fma_sampler, read_sampler
from timing import Row, Timing, take_turns

BF16 = torch.bfloat16
SMALL = AttentionCase(3, 4, 2, 64, 40)
RAGGED = replace(SMALL, seq_len=(1, 40, 17))
KINDS = [
    SMALL,
    RAGGED,
    replace(SMALL, layout="nhd"),
    replace(SMALL, layout="vllm", dtype=BF16),
    replace(RAGGED, dtype=torch.float16, block_size=32),
    replace(RAGGED, dtype=BF16, kv_cache_dtype="fp8"),
    replace(RAGGED, dtype=BF16, kv_cache_dtype="int8"),
    replace(SMALL, query_len=40),
    replace(SMALL, query_len=7, dtype=BF16),
    replace(SMALL, seq_len=(40, 9, 9), query_len=(5, 1, 9)),
]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_ours_agrees_with_sdpa(case):
    inputs = make_inputs(case)
    expected = make_sdpa(inputs)()
    call, caches = bench_attention.make_ours(inputs)
    check(call(), expected)
    for cache in caches:
        cache.fill_(1)
    with pytest.raises(AssertionError):
        check(call(), expected)


@pytest.mark.parametrize("case", [SMALL, RAGGED], ids=str)
def test_tokens_and_slots_of_a_peer_are_what_our_cache_holds(case):
    inputs = make_inputs(case)
    shape = (case.num_blocks, case.num_kv_heads, case.block_size, case.head_size)
    caches = (torch.zeros(shape), torch.zeros(shape))
    inputs.fill(caches)
    for cache, tokens in zip(caches, inputs.new_tokens(), strict=True):
        slots = cache.transpose(1, 2).flatten(0, 1)
        assert torch.equal(slots[inputs.slot_mapping()], tokens)
        assert slots.count_nonzero() == tokens.count_nonzero()


def test_byte_and_operation_counts():
    assert RAGGED.kv_bytes == 2 * 58 * 2 * 64 * 4
    assert RAGGED.num_blocks == 1 + 3 + 2
    assert RAGGED.flops == 4 * 4 * 64 * 58
    assert replace(SMALL, query_len=40).flops == 4 * 4 * 64 * 3 * (40 * 41 // 2)
    mixed = replace(SMALL, seq_len=(40, 9, 9), query_len=(5, 1, 9))
    assert mixed.flops == 4 * 4 * 64 * ((36 + 37 + 38 + 39 + 40) + 9 + 45)
    assert replace(RAGGED, dtype=BF16, kv_cache_dtype="int8").kv_bytes == RAGGED.kv_bytes // 4


def test_names_of_cases_differ():
    names = [str(case) for case in (*DECODE, *PREFILL, *MIXED)]
    assert len(set(names)) == len(names)


def test_rows_say_what_they_are_compared_with(tmp_path, monkeypatch):
    """A stand-in for the peer supports all caches but int8."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import sys\nfor line in sys.stdin: print('nan' if 'int8' in line else 2.0, flush=True)\n"
    )
    monkeypatch.setattr(bench_attention, "WORKER", worker)
    monkeypatch.setattr(bench_attention, "DECODE", [SMALL, KINDS[6]])
    monkeypatch.setattr(bench_attention, "PREFILL", [KINDS[7]])
    monkeypatch.setattr(bench_attention, "MIXED", [])
    plain, int8, prefill = bench_attention.rows(2, sys.executable)
    assert list(plain.references) == [bench_attention.SDPA, bench_attention.VLLM]
    assert list(int8.references) == [bench_attention.SDPA, bench_attention.BF16_CACHE]
    assert plain.references[bench_attention.VLLM].median_s == 2.0
    assert (plain.rate_unit, prefill.rate_unit) == ("GB/s", "GFLOP/s")
    (only,) = bench_attention.rows(2, only="int8")
    assert only.case == int8.case


def test_a_row_prints_and_keeps_every_ratio():
    ours, slow, fast = (Timing(s, s / 2, s * 2, 7) for s in (2e-3, 6e-3, 1e-3))
    row = Row("a case", ours, {"one": slow, "two": fast}, 3.0, "GB/s", Bound(fast, fast))
    for part in ("3.00x of one (6.00 ms", "0.50x of two", "ours / read bound", "= 2.00"):
        assert part in str(row)
    stored = json.loads(json.dumps(row.as_dict()))
    assert stored["speedups"] == {"one": 3.0, "two": 0.5}
    assert stored["times_bound"] == 2.0
    assert stored["references"]["one"] == {
        "median_s": 6e-3,
        "p10_s": 3e-3,
        "p90_s": 12e-3,
        "num_samples": 7,
    }
    assert row.as_dict()["bound"]["compute"]["median_s"] == 1e-3


def test_the_slower_probe_is_the_bound():
    slow, fast = (Timing(s, s, s, 1) for s in (2.0, 1.0))
    assert (Bound(slow, fast).limit, Bound(slow, fast).timing) == ("read", slow)
    assert (Bound(fast, slow).limit, Bound(fast, slow).timing) == ("FMA", slow)


def test_probes_give_times(tmp_path, monkeypatch):
    """Compiled here: the flags are those of this machine."""
    monkeypatch.setattr(machine_probe, "BUILD", tmp_path)
    machine_probe._library.cache_clear()
    buffers = [torch.ones(1000), torch.ones(70_000)]
    for num_threads in (1, 2):
        assert read_sampler(buffers, num_threads, warm_up=True)() > 0
        assert fma_sampler(10**6, num_threads)() > 0
    assert len(list(tmp_path.iterdir())) == 1
    machine_probe._library.cache_clear()


def test_slow_cases_get_fewer_samples():
    timings = take_turns({"a": lambda: 1.0, "b": lambda: 2.0}, 50, max_s=0.0)
    assert {name: timing.num_samples for name, timing in timings.items()} == {"a": 5, "b": 5}
