# SPDX-License-Identifier: Apache-2.0
"""A pool that just holds a request serves it whole; one block fewer cuts or refuses it."""

from __future__ import annotations

import pytest

from paged_kv import SamplingParams

# Prompt tokens, new tokens, block size. The last new token is chosen and never stored.
SIZES = [(45, 10, 16), (45, 3, 16), (40, 10, 8), (30, 2, 32), (9, 9, 4), (1, 10, 8)]


def prompt_of(num_tokens):
    return [(7 * i + 3) % 199 for i in range(num_tokens)]


def num_blocks_of(num_prompt_tokens, num_new_tokens, block_size):
    """The null block, and those of the tokens that are stored."""
    return 1 + -(-(num_prompt_tokens + num_new_tokens - 1) // block_size)


def greedy(num_tokens):
    return SamplingParams(temperature=0.0, max_tokens=num_tokens)


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_smallest_pool_serves_one_request_after_the_other(tiny_llama, sizes, caching):
    num_prompt_tokens, num_new_tokens, block_size = sizes
    prompts = [prompt_of(num_prompt_tokens), prompt_of(num_prompt_tokens)[::-1]]
    llm = tiny_llama.llm(
        block_size=block_size, num_blocks=num_blocks_of(*sizes), enable_prefix_caching=caching
    )
    outputs = llm.generate(prompts, greedy(num_new_tokens))
    assert [output.outputs[0].token_ids for output in outputs] == [
        tiny_llama.greedy(prompt, num_new_tokens) for prompt in prompts
    ]
    assert llm.engine.stats.peak_num_used_blocks == num_blocks_of(*sizes) - 1, "not the smallest"
    assert llm.engine.kv_cache_manager.usage == 0


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_with_a_block_fewer_the_output_is_cut_or_the_prompt_refused(tiny_llama, sizes):
    num_prompt_tokens, num_new_tokens, block_size = sizes
    num_blocks = num_blocks_of(*sizes) - 1
    num_slots = (num_blocks - 1) * block_size
    prompt = prompt_of(num_prompt_tokens)
    if num_slots == 0:
        with pytest.raises(ValueError, match="num_blocks must be at least 2"):
            tiny_llama.llm(block_size=block_size, num_blocks=num_blocks)
        return
    llm = tiny_llama.llm(block_size=block_size, num_blocks=num_blocks)
    if num_prompt_tokens >= num_slots:
        with pytest.raises(ValueError, match=f"at most {num_slots - 1} fit: the KV cache has"):
            llm.generate(prompt, greedy(num_new_tokens))
        assert llm.engine.stats.num_requests == 0
        return
    completion = llm.generate(prompt, greedy(num_new_tokens))[0].outputs[0]
    num_left = num_slots - num_prompt_tokens
    assert completion.token_ids == tiny_llama.greedy(prompt, num_new_tokens)[:num_left]
    assert completion.finish_reason == "length"


def test_the_length_counts_the_token_that_is_not_stored(tiny_llama):
    """A pool of 48 slots: prompt and output together are at most 48 tokens, not 49."""
    prompt = prompt_of(33)
    llm = tiny_llama.llm(block_size=16, num_blocks=num_blocks_of(33, 16, 16))
    assert llm.engine.max_model_len == 48
    completion = llm.generate(prompt, greedy(16))[0].outputs[0]
    assert completion.token_ids == tiny_llama.greedy(prompt, 15)
    assert completion.finish_reason == "length"
