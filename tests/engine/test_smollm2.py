# SPDX-License-Identifier: Apache-2.0
"""Real prompts on a real model: the same greedy tokens as transformers."""

from __future__ import annotations

import dataclasses
import random

import pytest
from engine.engine_probes import assert_made_room, assert_no_prompt_is_cut, record_swaps
from engine.greedy_reference import assert_same_tokens, greedy_by_transformers

from paged_kv import LLM, SamplingParams
from paged_kv.engine.detokenizer import Detokenizer

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Die Hauptstadt von Österreich ist",
    "L'été, à Montréal, il fait",
    "El niño comió una manzana y",
    "日本の首都は",
    "北京是中国的",
    "Москва — столица",
    "Καλημέρα, η Αθήνα",
    "مرحبا، كيف",
    "नमस्ते, आप कैसे",
    "😀 means happy, 😢 means",
    "1, 1, 2, 3, 5, 8,",
    "SELECT name FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "To be, or not to be,",
    "Q: What is 2 + 2?\nA:",
    "\n",
]


@pytest.fixture(scope="module")
def expected(smollm2, smollm2_hf_model):
    encode = smollm2.tokenizer.encode
    return [greedy_by_transformers(smollm2_hf_model, encode(p), NUM_TOKENS) for p in PROMPTS]


ROOMY = {"block_size": 16, "num_blocks": 512}
# Chunked prompts and more requests than the pool holds at once: waiting and preemption.
TIGHT = {
    "block_size": 8,
    "num_blocks": 22,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "enable_prefix_caching": False,
    "swap_space_bytes": 2**24,
}
CONFIGURATIONS = {
    "one batch": ROOMY,
    "no prefix cache": {**ROOMY, "enable_prefix_caching": False},
    # All prompts together are longer than a step.
    "whole prompts": {
        **ROOMY,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 150,
        "max_num_seqs": 32,
        "max_model_len": 150,
    },
    "tight": TIGHT,
    "swap": {**TIGHT, "preemption_mode": "swap"},
}


@pytest.mark.parametrize(
    ("configuration", "num_completions"),
    [*((name, 1) for name in CONFIGURATIONS), ("one batch", 4)],
)
def test_tokens_of_real_prompts_equal_transformers(
    smollm2, expected, configuration, num_completions
):
    options = CONFIGURATIONS[configuration]
    llm = LLM(smollm2, **options)
    swaps = record_swaps(llm)
    params = dataclasses.replace(GREEDY, n=num_completions)
    on_step = assert_no_prompt_is_cut if configuration == "whole prompts" else None
    outputs = llm.generate(PROMPTS, params, on_step=on_step)
    for output, reference in zip(outputs, expected, strict=True):
        assert len(output.outputs) == num_completions
        assert len({completion.token_ids for completion in output.outputs}) == 1
        assert_same_tokens(llm, output, reference)
        assert output.outputs[0].text == smollm2.tokenizer.decode(output.outputs[0].token_ids)
    assert llm.engine.kv_cache_manager.usage == 0
    if options["num_blocks"] == TIGHT["num_blocks"]:
        assert_made_room(llm, swaps)


def test_a_second_run_hits_the_cache_and_gives_the_same_text(smollm2, expected):
    llm = LLM(smollm2, num_blocks=512)
    prompts = [PROMPTS[1], PROMPTS[16]]
    first = llm.generate(prompts, GREEDY)
    second = llm.generate(prompts, GREEDY)
    for before, after, which in zip(first, second, (1, 16), strict=True):
        assert after.num_cached_tokens == (len(after.prompt_token_ids) - 1) // 16 * 16
        assert before.num_cached_tokens == 0
        if before.outputs[0].text != after.outputs[0].text:
            assert_same_tokens(llm, after, expected[which])


def test_streamed_text_of_random_ids_equals_the_text_decoded_at_once(smollm2):
    """Ids near the beginning of the vocabulary are single bytes: most sequences are no UTF-8."""
    tokenizer, rng = smollm2.tokenizer, random.Random(0)
    for ids in (range(400), range(tokenizer.vocab_size)):
        for _ in range(200):
            sequence = [rng.choice(ids) for _ in range(40)]
            detokenizer = Detokenizer(tokenizer)
            pieces = [detokenizer.append(token_id) for token_id in sequence]
            assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(sequence)
