# SPDX-License-Identifier: Apache-2.0
"""The suite engine on a tiny model, with a stand-in for a peer."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import bench_engine
import run
from engine_work import CASES, Case
from model_folder import write_model_folder
from paged_kv.models import load_model
from scheduler_step import SCHEDULER_STEP, step_sampler

TINY = LlamaConfig(
    vocab_size=40_000,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
SMALL = {name: replace(case, num_requests=min(case.num_requests, 3), num_new_tokens=2)
         for name, case in CASES.items()}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    LlamaForCausalLM(TINY).save_pretrained(path)
    return path


def test_the_folder_for_peers_has_the_same_weights(folder, tmp_path):
    loaded = load_model(folder)
    write_model_folder(loaded, tmp_path)
    expected, found = (LlamaForCausalLM.from_pretrained(path) for path in (folder, tmp_path))
    ids = torch.arange(12)[None]
    assert torch.equal(expected(ids).logits, found(ids).logits)
    slots = load_model(tmp_path).model.weight_slots()
    for name, slot in loaded.model.weight_slots().items():
        assert torch.equal(slots[name], slot)


def test_prompts_share_what_they_should():
    case = CASES["64 requests, shared prefix of 512"]
    first, second = case.prompts("a"), case.prompts("b")
    assert {len(prompt) for prompt in first} == {544}
    assert {tuple(prompt[:512]) for prompt in (*first, *second)} == {tuple(first[0][:512])}
    assert len({tuple(prompt[512:]) for prompt in (*first, *second)}) == 128
    assert [len(prompt) for prompt in CASES["16 requests"].prompts("a")][:4] == [32, 128, 256, 32]


def test_tokens_that_are_computed():
    assert Case(2, (10, 20), 5).num_computed_tokens == 30 + 2 * 4
    assert Case(2, (10,), 5, num_shared_tokens=7).num_computed_tokens == 20 + 2 * 4
    shared = Case(2, (10,), 5, num_shared_tokens=7, prefix_caching=False)
    assert shared.num_computed_tokens == 34 + 2 * 4


@pytest.fixture
def suite(folder, tmp_path, monkeypatch):
    """Small; a stand-in for the peers gives two seconds, as many as $SLOW_DTYPE_S in bf16, and has
    no prefix caching."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys\n"
        "is_slow = os.environ['PAGED_KV_BENCH_DTYPE'] == 'bfloat16'\n"
        "seconds = os.environ.get('SLOW_DTYPE_S', '2.0') if is_slow else '2.0'\n"
        "for line in sys.stdin: print('nan' if 'cached' in line else seconds, flush=True)\n"
    )
    for name, value in {
        "MODEL": str(folder),
        "WORKERS": {"vllm": worker, "transformers": worker},
        "CASES": SMALL,
        "WITHOUT_CACHE": replace(bench_engine.WITHOUT_CACHE, num_requests=3, num_new_tokens=2),
        "SETTLE_S": 0.0,
        "step_sampler": lambda: step_sampler(4),
    }.items():
        monkeypatch.setattr(bench_engine, name, value)

    def call(only=None):
        return list(bench_engine.rows(2, ["vllm", "transformers"], run.sys.executable, only))

    return call


def test_rows_compare_with_peers_and_bounds(suite):
    found = suite()
    rows = {row.case: row for row in found}
    row = rows["fp32, 16 requests"]
    assert {name: timing.median_s for name, timing in row.references.items()} == {
        "vLLM": 2.0,
        "transformers": 2.0,
    }
    assert row.times_bound > 0
    assert not rows["fp32, first token of 256, prefix cached"].references
    assert len(rows) == len(found), "each has a name of its own"
    assert "fp32, 16 requests, 32-bit weights" in rows
    best = rows["best dtype, 1 request"]
    assert best.ours == min(
        (rows[f"{name}, 1 request"].ours for name in ("fp32", "bf16")), key=lambda t: t.median_s
    )
    assert best.references["vLLM"].median_s == 2.0
    memory = found[-1]
    assert 0 < memory.share < 0.04
    assert math.isclose(memory.share, memory.as_dict()["empty_share"])
    for each in found:
        assert each.case in str(each)


@pytest.mark.parametrize(("seconds", "again"), [("3.9", True), ("4.1", False)])
def test_a_peer_that_is_slow_in_a_dtype_is_not_run_again_in_it(suite, monkeypatch, seconds, again):
    monkeypatch.setenv("SLOW_DTYPE_S", seconds)
    rows = {row.case: row for row in suite("best dtype, (1|16) request")}
    assert set(rows["bf16, 1 request"].references) == {"vLLM", "transformers"}
    assert bool(rows["bf16, 16 requests"].references) == again
    assert set(rows["fp32, 16 requests"].references) == {"vLLM", "transformers"}
    assert rows["best dtype, 16 requests"].references["vLLM"].median_s == 2.0


def test_only_chooses_any_row(suite):
    for name in (bench_engine.CACHE, bench_engine.KV_SLOTS, SCHEDULER_STEP, "bf16, 16 requests",
                 "fp32, 1 request, 32-bit weights"):  # fmt: skip
        assert [row.case for row in suite(name)] == [name]
    of_dtypes = [f"{name}, 16 requests" for name in ("fp32", "bf16", "best dtype")]
    assert [row.case for row in suite("best dtype, 16")] == of_dtypes


def test_peers_are_given_apart_or_together():
    assert run.parse_peers("vllm,transformers") == ["vllm", "transformers"]
    with pytest.raises(argparse.ArgumentTypeError, match="'torch' is no peer"):
        run.parse_peers("torch")
