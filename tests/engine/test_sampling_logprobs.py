# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of sampled and of prompt tokens, and the texts beside them."""

from __future__ import annotations

import math

import pytest
import torch
from engine.sampling_reference import make_row, random_logits

from paged_kv.engine.logprobs import (
    Logprob,
    PromptLogprobs,
    SampleLogprobs,
    TokenLogprobs,
    compute_logprobs,
)
from paged_kv.engine.sampler import Sampler
from paged_kv.engine.sampling_params import SamplingParams
from paged_kv.engine.token_texts import TokenTexts


class Utf8:
    """Every byte a token; 32 at the beginning is stripped, as some tokenizers do."""

    num_decodes = 0

    def decode(self, ids, *, skip_special_tokens=True):
        assert not skip_special_tokens, "a special token has a text here"
        self.num_decodes += 1
        return bytes(ids).decode("utf-8", errors="replace").removeprefix(" ")


@pytest.mark.parametrize("num_logprobs", [0, 1, 4, -1])
def test_the_token_comes_first_and_then_the_most_likely(num_logprobs):
    logits = random_logits(130)  # more than one chunk of rows
    token_ids = [(7 * i) % 50 for i in range(130)]
    entries = compute_logprobs(logits.bfloat16(), token_ids, num_logprobs)
    expected = logits.bfloat16().double().log_softmax(dim=-1)
    for entry, token_id, values in zip(entries, token_ids, expected, strict=True):
        best = values.sort(descending=True).values[: num_logprobs if num_logprobs >= 0 else 50]
        assert entry.token_ids[0] == token_id
        torch.testing.assert_close(
            torch.tensor(entry.logprobs), torch.cat([values[[token_id]], best]).float()
        )
        torch.testing.assert_close(torch.tensor(entry.logprobs), values[entry.token_ids].float())
        assert entry.rank == int((values >= values[token_id]).sum())


def test_logprobs_are_those_of_the_model_whatever_the_parameters():
    logits = random_logits(1)
    plain = logits.log_softmax(dim=-1)[0]
    params = SamplingParams(
        temperature=0.5, top_k=3, repetition_penalty=2.0, logit_bias={5: 90.0}, logprobs=2
    )
    [entry] = Sampler().sample(logits, [make_row(params, [1, 2, 3])]).logprobs
    assert entry.token_ids[0] == 5
    assert entry.logprobs[0] == pytest.approx(float(plain[5]))
    assert entry.token_ids[1:] == plain.topk(2).indices.tolist()


def test_each_row_gets_as_many_as_it_asks_for():
    rows = [
        make_row(SamplingParams(temperature=0.0, logprobs=n)) for n in (None, 0, 3, -1, None, 3)
    ]
    result = Sampler().sample(random_logits(6), rows)
    assert [e and len(e.token_ids) for e in result.logprobs] == [None, 1, 4, 51, None, 4]
    for token_id, entry in zip(result.token_ids, result.logprobs, strict=True):
        assert entry is None or entry.token_ids[0] == token_id
    plain = Sampler().sample(random_logits(1), [make_row(SamplingParams())])
    assert plain.logprobs == [None]


def test_positions_have_vllms_shape():
    logprobs = SampleLogprobs(None)
    logprobs.append(TokenLogprobs([5, 5, 7], [-0.1, -0.1, -3.0], 1), [])
    logprobs.append(TokenLogprobs([4, 8], [-2.0, -0.5], 6), [5])
    assert logprobs.positions == [
        {5: Logprob(-0.1, 1), 7: Logprob(-3.0, 2)},
        {4: Logprob(-2.0, 6), 8: Logprob(-0.5, 1)},
    ]
    assert [next(iter(position)) for position in logprobs.positions] == [5, 4]
    assert logprobs.cumulative_logprob == pytest.approx(-2.1)


def test_texts_are_those_in_context():
    """Leading spaces stay; a character belongs to the token that ends it, on every path."""
    texts = TokenTexts(Utf8())
    assert texts.decode(32, []) == ""
    assert texts.decode(32, [65]) == " "
    snowman = "☃".encode()
    context = [65, *snowman[:2]]
    assert texts.decode(snowman[0], [65]) == ""
    assert texts.decode(snowman[1], [65, snowman[0]]) == ""
    assert texts.decode(snowman[2], context) == "☃"
    assert texts.decode(66, context) == "B", "an alternative that breaks the character off"
    assert texts.decode(snowman[2], [65, *"é".encode()[:1]]) != "☃"
    face = "😀".encode()
    assert texts.decode(face[3], [*b"xyz", *face[:3]]) == "😀"
    # Nothing of this depends on what was asked before.
    assert TokenTexts(Utf8()).decode(66, context) == "B"
    assert texts.decode(snowman[2], context) == "☃"


def test_known_texts_are_not_decoded_again():
    tokenizer = Utf8()
    texts = TokenTexts(tokenizer)
    texts.decode(66, [65])
    num_decodes = tokenizer.num_decodes
    assert texts.decode(66, [67]) == "B"
    assert tokenizer.num_decodes == num_decodes


def test_sample_logprobs_decode_every_alternative_in_context():
    logprobs = SampleLogprobs(TokenTexts(Utf8()))
    logprobs.append(TokenLogprobs([66, 32], [-1.0, -0.5], 2), [65])
    assert [entry.decoded_token for entry in logprobs.positions[0].values()] == ["B", " "]


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("chunks", [[8], [7], [1] * 8, [3, 5], [5, 3]])
def test_prompt_logprobs_do_not_depend_on_the_chunks(chunks):
    logits = random_logits(len(PROMPT))
    logprobs = PromptLogprobs(PROMPT, 2, None)
    position = 0
    for length in chunks:
        assert logprobs.next_position == min(position, len(PROMPT) - 1)
        logprobs.append(position, logits[position : position + length])
        position += length
    assert logprobs.is_complete
    assert logprobs.num_missing_rows == 0
    assert len(logprobs.positions) == len(PROMPT)
    assert logprobs.positions[0] is None
    expected = logits.log_softmax(dim=-1)
    for position, entry in enumerate(logprobs.positions[1:]):
        token_id = PROMPT[position + 1]
        assert next(iter(entry)) == token_id
        assert entry[token_id].logprob == pytest.approx(float(expected[position, token_id]))
        for best in expected[position].topk(2).indices.tolist():
            assert entry[best].logprob == pytest.approx(float(expected[position, best]))


def test_a_prompt_that_is_computed_again_changes_nothing():
    logits = random_logits(len(PROMPT))
    logprobs = PromptLogprobs(PROMPT, 0, None)
    logprobs.append(0, logits[:4])
    before = list(logprobs.positions)
    logprobs.append(0, torch.full_like(logits[:3], torch.nan))
    assert logprobs.positions == before
    again = logits.clone()
    again[:4] = torch.nan
    logprobs.append(0, again)
    assert logprobs.positions[:5] == before
    assert logprobs.is_complete
    values = [entry.logprob for p in logprobs.positions[1:] for entry in p.values()]
    assert not any(map(math.isnan, values))


def test_a_gap_in_the_prompt_is_refused():
    logprobs = PromptLogprobs(PROMPT, 0, None)
    with pytest.raises(ValueError, match="go on at position 0, got logits from position 2"):
        logprobs.append(2, random_logits(1))
    assert logprobs.positions == [None]


def test_a_prompt_of_one_token_needs_no_logits():
    logprobs = PromptLogprobs([3], 5, None)
    assert logprobs.is_complete
    logprobs.append(0, random_logits(1))
    assert logprobs.positions == [None]


def test_prompt_texts_are_those_in_context():
    prompt = [65, *"☃".encode(), 32]
    logprobs = PromptLogprobs(prompt, 0, TokenTexts(Utf8()))
    logprobs.append(0, torch.zeros(4, 256))
    positions = zip(prompt[1:], logprobs.positions[1:], strict=True)
    texts = [position[token_id].decoded_token for token_id, position in positions]
    assert texts == ["", "", "☃", " "]
