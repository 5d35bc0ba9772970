# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters through ``LLM.generate``: each has its effect, and mistakes are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paged_kv import LLM, SamplingParams

PROMPT = list(range(20, 60))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class LetterTokenizer:
    """The id of a character is its code point."""

    def encode(self, text, *, add_special_tokens=True):
        return ([1] if add_special_tokens else []) + [ord(c) for c in text]

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def llm(tiny_llama):
    loaded = dataclasses.replace(tiny_llama.loaded, tokenizer=LetterTokenizer())
    return LLM(loaded, num_blocks=64)


def complete(llm, **changes):
    return llm.generate(PROMPT, dataclasses.replace(GREEDY, **changes))[0].outputs[0]


@pytest.fixture(scope="module")
def greedy(llm):
    completion = complete(llm)
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None
    return completion.token_ids


def test_a_biased_token_always_comes_out(llm):
    assert complete(llm, logit_bias={7: 100.0}).token_ids == 8 * (7,)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_ends_repetition(llm, name):
    """The bias makes one token come out again and again, but for the penalty."""
    bias = {7: 100.0, 8: 99.0}
    completion = complete(llm, logit_bias=bias, **{name: 2.0})
    assert set(completion.token_ids) > {7}
    reward = 0.5 if name == "repetition_penalty" else -2.0
    assert set(complete(llm, logit_bias=bias, **{name: reward}).token_ids) == {7}


def test_a_bad_word_does_not_come_out(llm, greedy):
    word = chr(greedy[0])
    first = complete(llm, bad_words=[word]).token_ids
    assert greedy[0] not in first
    pair = chr(greedy[0]) + chr(greedy[1])
    assert greedy[:1] == complete(llm, bad_words=[pair]).token_ids[:1]
    assert greedy[:2] != complete(llm, bad_words=[pair]).token_ids[:2]


def test_min_tokens_puts_off_a_stop_token(llm, greedy):
    assert len(complete(llm, stop_token_ids=greedy[:1]).token_ids) == 1
    assert greedy[0] not in complete(llm, stop_token_ids=greedy[:1], min_tokens=4).token_ids[:4]


def test_logprobs_are_the_models_own(tiny_llama, llm, greedy):
    completion = complete(llm, logprobs=3, presence_penalty=0.0)
    assert completion.token_ids == greedy
    ids = torch.tensor([PROMPT + list(greedy)])
    with torch.inference_mode():
        expected = tiny_llama.reference(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(dim=-1)
    total = 0.0
    for token_id, position, values in zip(greedy, completion.logprobs, expected, strict=True):
        assert list(position) == values.topk(3).indices.tolist()
        assert next(iter(position)) == token_id
        assert [entry.rank for entry in position.values()] == [1, 2, 3]
        assert [entry.decoded_token for entry in position.values()] == [chr(i) for i in position]
        for i, entry in position.items():
            assert entry.logprob == pytest.approx(float(values[i]), abs=1e-3)
        total += position[token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


def test_requests_with_and_without_logprobs_share_a_batch(llm, greedy):
    params = [GREEDY, dataclasses.replace(GREEDY, logprobs=0), GREEDY]
    outputs = llm.generate([PROMPT] * 3, params)
    assert [o.outputs[0].token_ids for o in outputs] == [greedy] * 3
    lengths = [o.outputs[0].logprobs and len(o.outputs[0].logprobs) for o in outputs]
    assert lengths == [None, 8, None]


def test_every_parameter_at_once_gives_the_same_tokens_under_preemption(tiny_llama):
    params = SamplingParams(
        temperature=1.2,
        top_k=150,
        top_p=0.97,
        min_p=0.001,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={5: 1.0},
        seed=3,
        max_tokens=12,
    )
    prompts = [PROMPT, PROMPT[:20], PROMPT[:30]]
    roomy = tiny_llama.llm(num_blocks=64).generate(prompts, params)
    tight_llm = tiny_llama.llm(num_blocks=7)
    tight = tight_llm.generate(prompts, params)
    assert tight_llm.engine.stats.num_preemptions > 0
    assert [o.outputs[0].token_ids for o in tight] == [o.outputs[0].token_ids for o in roomy]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_token_ids": [199]}, "stop_token_ids holds token id 199"),
        ({"logit_bias": {199: 1.0}}, "logit_bias holds token id 199"),
        ({"logprobs": 200}, "logprobs must be at most the vocabulary's 199 tokens, got 200"),
        ({"bad_words": ["☃"]}, "bad_words: '☃' holds token id 9731"),
        ({"bad_words": [chr(i) for i in range(199)]}, "leave nothing to sample"),
    ],
)
def test_what_the_model_cannot_serve_is_refused(llm, changes, message):
    with pytest.raises(ValueError, match=message):
        complete(llm, **changes)
    assert not llm.engine.has_unfinished_requests()


def test_bad_words_are_encoded_once(tiny_llama):
    """Though a request is checked before it is queued, and several have the same parameters."""

    class CountingTokenizer(LetterTokenizer):
        num_encoded = 0

        def encode(self, text, *, add_special_tokens=True):
            self.num_encoded += 1
            return super().encode(text, add_special_tokens=add_special_tokens)

    tokenizer = CountingTokenizer()
    llm = LLM(dataclasses.replace(tiny_llama.loaded, tokenizer=tokenizer), num_blocks=64)
    llm.generate([PROMPT, PROMPT[:9]], dataclasses.replace(GREEDY, bad_words=["ab", "c"]))
    assert tokenizer.num_encoded == 4, "each word alone and after a space"


def test_bad_words_need_a_tokenizer(tiny_llama):
    with pytest.raises(ValueError, match="bad_words need a tokenizer"):
        complete(tiny_llama.llm(num_blocks=16), bad_words=["a"])
