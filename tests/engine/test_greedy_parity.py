# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens equal those of transformers with the same float32 weights."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from engine.engine_probes import assert_no_prompt_is_cut, poison

from paged_kv import LLM, SamplingParams

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
LONG = 500


def prompt_of(num_tokens):
    return torch.randint(
        0, 199, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)
    ).tolist()


@pytest.fixture(scope="session")
def expected(tiny_llama):
    return cache(lambda num_tokens: tiny_llama.greedy(prompt_of(num_tokens), NUM_TOKENS))


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def recycle(llm):
    """Use every block once, with other content, and let go of them in a mixed order."""
    engine = llm.engine
    num_blocks = engine.cache_engine.num_blocks
    for kv_cache in engine.cache_engine.kv_caches.values():
        kv_cache.key.normal_(std=50.0)
        kv_cache.value.normal_(std=50.0)
    pool = engine.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(num_blocks - 1)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3)).tolist()
    pool.free_blocks([blocks[i] for i in order])
    llm.generate([prompt_of(77), prompt_of(130)], GREEDY)


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("pool", ["fresh", "recycled"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_tokens_equal_transformers(tiny_llama, expected, block_size, pool, caching):
    lengths = [1, block_size - 1, block_size, block_size + 1, LONG]
    llm = tiny_llama.llm(block_size=block_size, enable_prefix_caching=caching)
    poison(llm) if pool == "fresh" else recycle(llm)
    reference = [expected(n) for n in lengths]
    prompts = [prompt_of(n) for n in lengths]
    alone = [tokens_of(llm.generate(prompt, GREEDY))[0] for prompt in prompts]
    assert alone == reference
    ragged = llm.generate(prompts, GREEDY)
    assert tokens_of(ragged) == reference
    hits = [(n - 1) // block_size * block_size if caching else 0 for n in lengths]
    assert [output.num_cached_tokens for output in ragged] == hits


@pytest.mark.parametrize("max_num_batched_tokens", [8, 37, 64])
def test_chunked_prefill_beside_decode_changes_nothing(
    tiny_llama, expected, max_num_batched_tokens
):
    lengths = [1, 15, 16, 17, LONG]
    llm = tiny_llama.llm(max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens)
    outputs = llm.generate([prompt_of(n) for n in lengths], GREEDY)
    assert tokens_of(outputs) == [expected(n) for n in lengths]
    assert llm.engine.stats.num_steps > LONG // max_num_batched_tokens


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_whole_prompts_beside_decode_change_nothing(tiny_llama, expected, caching):
    """All prompts together are longer than a step: those that do not fit wait."""
    lengths = [1, 15, 16, LONG, 17]
    llm = tiny_llama.llm(
        enable_chunked_prefill=False,
        max_num_seqs=8,
        max_num_batched_tokens=LONG + NUM_TOKENS,
        max_model_len=LONG + NUM_TOKENS,
        enable_prefix_caching=caching,
    )
    poison(llm)
    for _ in range(2):
        outputs = llm.generate(
            [prompt_of(n) for n in lengths], GREEDY, on_step=assert_no_prompt_is_cut
        )
        assert tokens_of(outputs) == [expected(n) for n in lengths]
    assert any(output.num_cached_tokens > 0 for output in outputs) == caching


def test_preemption_changes_nothing(tiny_llama, expected):
    """Three prompts fit, their outputs do not: some are recomputed."""
    lengths = [15, 16, 17]
    llm = tiny_llama.llm(block_size=8, num_blocks=9)
    outputs = llm.generate([prompt_of(n) for n in lengths], GREEDY)
    assert llm.engine.stats.num_preemptions > 0
    assert tokens_of(outputs) == [expected(n) for n in lengths]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]


def test_hits_and_misses_in_one_batch(tiny_llama, expected):
    """A prompt with a cached prefix, one with nothing cached, one that is cached entirely."""
    llm = tiny_llama.llm()
    llm.generate([prompt_of(LONG)[:40], prompt_of(32)], GREEDY)
    outputs = llm.generate([prompt_of(LONG), prompt_of(17), prompt_of(32)], GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [32, 0, 16]
    assert tokens_of(outputs) == [expected(LONG), expected(17), expected(32)]


def test_physical_placement_changes_no_bit(tiny_llama):
    """The same steps on blocks in other places give the same logits, bit for bit."""

    def logits_of(scatter):
        llm = tiny_llama.llm(num_blocks=64)
        if scatter:
            pool = llm.engine.kv_cache_manager.block_pool
            blocks = pool.get_new_blocks(63)
            order = torch.randperm(63, generator=torch.Generator().manual_seed(1)).tolist()
            pool.free_blocks([blocks[i] for i in order])
        recorded = []
        compute_logits = tiny_llama.loaded.model.compute_logits
        runner_model = llm.engine.model_runner._model
        try:
            runner_model.compute_logits = lambda hidden: (
                recorded.append(compute_logits(hidden)) or recorded[-1]
            )
            llm.generate([prompt_of(n) for n in (100, 17, 230)], GREEDY)
        finally:
            del runner_model.compute_logits
        tables = llm.engine.kv_cache_manager.block_pool.dump()[0]
        return recorded, tables

    in_order, tables = logits_of(scatter=False)
    scattered, other_tables = logits_of(scatter=True)
    assert tables != other_tables
    assert len(in_order) == len(scattered) == NUM_TOKENS
    for a, b in zip(in_order, scattered, strict=True):
        assert torch.equal(a, b)


def test_pool_default_and_bfloat16_generate(tiny_llama, tmp_path):
    tiny_llama.reference.save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="bfloat16")
    assert next(iter(llm.engine.cache_engine.kv_caches.values())).key.dtype == torch.bfloat16
    assert llm.engine.cache_engine.num_blocks > 1024 // 16
    assert len(llm.generate(prompt_of(20), GREEDY)[0].outputs[0].token_ids) == NUM_TOKENS
