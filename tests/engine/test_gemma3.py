# SPDX-License-Identifier: Apache-2.0
"""The real Gemma 3 270M, with a prompt that is longer than its window, equals transformers."""

from __future__ import annotations

import dataclasses

import pytest
from engine.engine_probes import assert_made_room, poison, record_swaps
from engine.greedy_reference import assert_same_tokens, greedy_by_transformers
from model import _gemma3

from paged_kv import LLM, SamplingParams
from paged_kv.models import load_model

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# The last one begins before the window of its last token, and is the first to be preempted.
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    _gemma3.LONG_PROMPT,
]
NUM_LONG_TOKENS = 614
MAX_MODEL_LEN = NUM_LONG_TOKENS + NUM_TOKENS

# Six groups take blocks: the long prompt 234 of them, which its completions share but for a few.
TIGHT = {
    "max_num_batched_tokens": 160,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "swap_space_bytes": 2**26,
}
CONFIGURATIONS = {
    # Short completions make room and are computed again.
    "recompute": {**TIGHT, "num_blocks": 280},
    # The long one too, with blocks that have left the window.
    "swap": {**TIGHT, "num_blocks": 292, "preemption_mode": "swap"},
}


@pytest.fixture(scope="module")
def gemma3():
    return load_model("gemma3-270m")


@pytest.fixture(scope="module")
def expected(gemma3):
    hf_model = _gemma3.hf_model(gemma3.model.embed_tokens)
    prompts = [gemma3.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len(prompts[-1]) == NUM_LONG_TOKENS
    return [greedy_by_transformers(hf_model, prompt, NUM_TOKENS) for prompt in prompts]


def assert_equal_transformers(llm, expected, num_completions):
    outputs = llm.generate(PROMPTS, dataclasses.replace(GREEDY, n=num_completions))
    for output, reference in zip(outputs, expected, strict=True):
        assert len(output.outputs) == num_completions
        assert len({completion.token_ids for completion in output.outputs}) == 1
        assert_same_tokens(llm, output, reference)
    assert llm.engine.kv_cache_manager.usage == 0
    return outputs


def test_whole_prompts_cold_and_from_the_prefix_cache(gemma3, expected):
    llm = LLM(gemma3, num_blocks=800, max_model_len=MAX_MODEL_LEN, enable_chunked_prefill=False)
    poison(llm)
    cold = assert_equal_transformers(llm, expected, num_completions=1)
    assert [output.num_cached_tokens for output in cold] == [0, 0, 0, 0]
    assert llm.engine.stats.num_steps == NUM_TOKENS, "a prompt was cut"
    warm = assert_equal_transformers(llm, expected, num_completions=4)
    assert [output.num_cached_tokens for output in warm] == [0, 0, 16, 608]
    assert llm.engine.stats.num_preemptions == 0


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_in_chunks_on_a_tight_pool_without_a_prefix_cache(gemma3, expected, options):
    llm = LLM(gemma3, max_model_len=MAX_MODEL_LEN, **options)
    poison(llm)
    swaps = record_swaps(llm)
    outputs = assert_equal_transformers(llm, expected, num_completions=4)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0]
    assert llm.engine.stats.num_steps > NUM_TOKENS + NUM_LONG_TOKENS // 160
    assert_made_room(llm, swaps)
