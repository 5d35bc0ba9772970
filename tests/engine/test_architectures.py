# SPDX-License-Identifier: Apache-2.0
"""Architectures besides Llama and Gemma 3 through the engine: the tokens of transformers."""

from __future__ import annotations

import dataclasses

import pytest
from engine.engine_probes import assert_made_room, poison, record_swaps
from engine.tiny_reference import GREEDY, PROMPTS, TinyReference

from paged_kv import LLM

WINDOW = 7
BLOCK_SIZE = 4
# All layers of the first have a window, so its requests hold few blocks: the pool is smaller.
NUM_TIGHT_BLOCKS = {"mistral_sliding_window": 18, "qwen2": 24, "qwen3": 24}
TIGHT = {"max_num_batched_tokens": 16, "max_num_seqs": 12, "swap_space_bytes": 2**22}


@pytest.fixture(scope="module", params=NUM_TIGHT_BLOCKS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def tiny(variant, tmp_path_factory):
    return TinyReference(tmp_path_factory.mktemp(variant), variant)


def assert_equal_transformers(llm, tiny, num_completions):
    outputs = llm.generate(PROMPTS, dataclasses.replace(GREEDY, n=num_completions))
    for output, expected in zip(outputs, tiny.expected, strict=True):
        assert [c.token_ids for c in output.outputs] == [expected] * num_completions
    assert llm.engine.kv_cache_manager.usage == 0
    return outputs


def test_cold_and_from_the_prefix_cache(tiny, variant):
    llm = LLM(tiny.loaded, block_size=BLOCK_SIZE, num_blocks=400)
    poison(llm)
    assert_equal_transformers(llm, tiny, num_completions=1)
    outputs = assert_equal_transformers(llm, tiny, num_completions=4)
    assert [output.num_cached_tokens for output in outputs] == [
        (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS
    ]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_in_chunks_on_a_tight_pool(tiny, variant, mode):
    num_blocks = NUM_TIGHT_BLOCKS[variant]
    llm = LLM(
        tiny.loaded, block_size=BLOCK_SIZE, num_blocks=num_blocks, preemption_mode=mode, **TIGHT
    )
    poison(llm)
    swaps = record_swaps(llm)
    for _ in range(2):
        assert_equal_transformers(llm, tiny, num_completions=4)
    assert_made_room(llm, swaps)


def test_blocks_outside_the_window_are_given_back(tiny, variant):
    llm = LLM(tiny.loaded, block_size=BLOCK_SIZE, num_blocks=400, max_num_batched_tokens=16,
              max_num_seqs=1)  # fmt: skip
    maps = []
    llm.generate(PROMPTS[3], GREEDY, on_step=lambda engine: maps.append(engine.block_map()))
    (request,) = maps[-1].requests
    (block_ids,) = request.block_ids
    num_held = sum(block_id != 0 for block_id in block_ids)
    if variant == "mistral_sliding_window":
        # 7 tokens lie in 2 or 3 blocks of 4; a step computes 16 besides.
        assert num_held in (2, 3)
        assert llm.engine.stats.peak_num_used_blocks <= -(-(WINDOW + 16) // BLOCK_SIZE) + 1
    else:
        assert num_held == len(block_ids) == -(-request.num_tokens // BLOCK_SIZE)
        assert llm.engine.stats.peak_num_used_blocks == num_held
