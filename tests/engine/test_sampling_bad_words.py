# SPDX-License-Identifier: Apache-2.0
"""Bad words: their token ids and the token that is banned."""

from __future__ import annotations

import pytest
import torch
from engine.sampling_reference import make_row

from paged_kv.engine.bad_words import BadWordMatcher, encode_bad_words
from paged_kv.engine.sampler import Sampler
from paged_kv.engine.sampling_params import SamplingParams


class WordTokenizer:
    """Two letters a token; a space is part of the token after it, or a token if none follows."""

    def encode(self, text, *, add_special_tokens=True):
        assert not add_special_tokens
        ids, rest = [], text.strip("~")
        while rest:
            length = 3 if rest[0] == " " else 2
            ids.append(sum(ord(c) for c in rest[:length]))
            rest = rest[length:]
        return ids


def test_words_are_encoded_with_and_without_a_space_before_them():
    a, b = ord("a"), ord("b")
    sequences = encode_bad_words(["  aabb"], WordTokenizer(), 1000)
    assert sequences == ((2 * a, 2 * b), (2 * a + 32, 2 * b))


def test_the_form_after_a_space_counts_only_if_the_space_joins_the_first_token():
    class SpaceAlone(WordTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return [7] * text.startswith(" ") + [ord(c) for c in text.lstrip()]

    class NoSpaces(WordTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return [ord(c) for c in text.lstrip()]

    for tokenizer in (SpaceAlone(), NoSpaces()):
        assert encode_bad_words(["ab"], tokenizer, 200) == ((97, 98),)


def test_a_word_without_tokens_or_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="bad_words: '~' has no tokens"):
        encode_bad_words(["~"], WordTokenizer(), 1000)
    with pytest.raises(ValueError, match=r"bad_words: 'aa' holds token id 194 .* has 194 ids"):
        encode_bad_words(["aa"], WordTokenizer(), 194)


def test_white_space_is_a_word_if_it_is_all():
    assert encode_bad_words(["\n"], WordTokenizer(), 1000) == ((10,), (42,))


def test_the_last_token_is_banned_when_the_output_ends_with_the_others():
    matcher = BadWordMatcher([(1, 2, 3), (2, 4), (5,), (1, 1)])
    assert matcher.single_token_ids == (5,)
    prompt = [9]
    for output, banned in [
        ([], []),
        ([1], [1]),
        ([1, 2], [3, 4]),
        ([2], [4]),
        ([2, 2], [4]),
        ([1, 2, 3], []),
        ([1, 1], [1]),
    ]:
        assert matcher.completing_token_ids(prompt + output, 1) == banned


def test_a_word_may_begin_in_the_output_only():
    matcher = BadWordMatcher([(1, 2, 3)])
    assert matcher.completing_token_ids([1, 2], 0) == [3]
    assert matcher.completing_token_ids([1, 2], 1) == []
    assert matcher.completing_token_ids([1, 2], 2) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_never_completes_a_word(temperature):
    logits = torch.tensor([[60.0, 40.0, 20.0, 0.0]])
    params = SamplingParams(temperature=temperature)
    row = make_row(params, prompt=[3], bad_words=[(0, 0), (1, 0, 1)])
    sampler = Sampler()
    for _ in range(6):
        row.token_ids.extend(sampler.sample(logits, [row]).token_ids)
    assert row.token_ids[1:] == [0, 1, 0, 2, 0, 1]
    single = make_row(params, bad_words=[(0,)])
    assert sampler.sample(logits, [single]).token_ids == [1]


def test_a_ban_wins_over_a_bias():
    params = SamplingParams(temperature=0.0, logit_bias={0: 100.0})
    row = make_row(params, bad_words=[(0,)])
    assert Sampler().sample(torch.zeros(1, 3), [row]).token_ids == [1]
