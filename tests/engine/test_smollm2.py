# SPDX-License-Identifier: Apache-2.0
"""Real prompts on a real model: the same greedy tokens as transformers."""

from __future__ import annotations

import random

import pytest
import torch

from paged_kv import LLM, SamplingParams
from paged_kv.engine.detokenizer import Detokenizer

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
NEAR_TIE = 1e-3

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
    """Tokens and, for each, the logits they were chosen from."""
    results = []
    for prompt in PROMPTS:
        ids = torch.tensor([smollm2.tokenizer.encode(prompt)])
        output = smollm2_hf_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = tuple(output.sequences[0, ids.shape[1] :].tolist())
        results.append((tokens, torch.cat(output.logits)))
    return results


def logits_after(llm, prompt_token_ids):
    """The engine's own logits for the token after a prompt."""
    model, recorded = llm.engine.model_runner._model, []
    compute_logits = model.compute_logits
    model.compute_logits = lambda hidden: recorded.append(compute_logits(hidden)) or recorded[-1]
    try:
        llm.generate(list(prompt_token_ids), SamplingParams(temperature=0.0, max_tokens=1))
    finally:
        del model.compute_logits
    return recorded[-1][0]


def assert_same_tokens(llm, output, tokens, logits):
    """Equal up to a near tie; there the logits must be equal within rounding."""
    ours = output.outputs[0].token_ids
    for i, (a, b) in enumerate(zip(ours, tokens, strict=True)):
        if a == b:
            continue
        best, second = logits[i].topk(2).values
        assert best - second < NEAR_TIE, f"{output.prompt!r}: token {i} is {a}, expected {b}"
        mine = logits_after(llm, (*output.prompt_token_ids, *tokens[:i]))
        torch.testing.assert_close(mine, logits[i], atol=NEAR_TIE, rtol=1e-3)
        return


CONFIGURATIONS = {
    "one batch": {"block_size": 16, "num_blocks": 512},
    # Chunked prompts and more requests than the pool holds at once: waiting and preemption.
    "tight": {
        "block_size": 8,
        "num_blocks": 40,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "enable_prefix_caching": False,
    },
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_tokens_of_real_prompts_equal_transformers(smollm2, expected, configuration):
    llm = LLM(smollm2, **CONFIGURATIONS[configuration])
    outputs = llm.generate(PROMPTS, GREEDY)
    for output, (tokens, logits) in zip(outputs, expected, strict=True):
        assert_same_tokens(llm, output, tokens, logits)
        assert output.outputs[0].text == smollm2.tokenizer.decode(output.outputs[0].token_ids)
    assert llm.engine.kv_cache_manager.usage == 0


def test_a_second_run_hits_the_cache_and_gives_the_same_text(smollm2, expected):
    llm = LLM(smollm2, num_blocks=512)
    prompts = [PROMPTS[1], PROMPTS[16]]
    first = llm.generate(prompts, GREEDY)
    second = llm.generate(prompts, GREEDY)
    for before, after, which in zip(first, second, (1, 16), strict=True):
        assert after.num_cached_tokens == (len(after.prompt_token_ids) - 1) // 16 * 16
        assert before.num_cached_tokens == 0
        if before.outputs[0].text != after.outputs[0].text:
            assert_same_tokens(llm, after, *expected[which])


def test_streamed_text_of_random_ids_equals_the_text_decoded_at_once(smollm2):
    """Ids near the beginning of the vocabulary are single bytes: most sequences are no UTF-8."""
    tokenizer, rng = smollm2.tokenizer, random.Random(0)
    for ids in (range(400), range(tokenizer.vocab_size)):
        for _ in range(200):
            sequence = [rng.choice(ids) for _ in range(40)]
            detokenizer = Detokenizer(tokenizer)
            pieces = [detokenizer.append(token_id) for token_id in sequence]
            assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(sequence)
