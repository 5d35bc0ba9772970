# SPDX-License-Identifier: Apache-2.0
"""Which token the sampler takes: the distribution of each row, and its independence of others."""

from __future__ import annotations

import pytest
import torch
from engine.sampling_reference import make_row, random_logits, reference_logits, reference_probs
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paged_kv.engine.sampler import NonFiniteLogitsError, Sampler
from paged_kv.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
VOCAB_SIZE = 50


def sample(logits, rows):
    before = logits.clone()
    token_ids = Sampler().sample(logits, rows).token_ids
    assert torch.equal(logits, before), "the argument was changed"
    return token_ids


def probs_of(logits, params):
    return Sampler().compute_probs(logits, [make_row(params) for _ in logits])


def test_greedy_takes_the_best_token_and_the_first_among_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, -1.0], [-3.0, -2.0, -2.0]])
    assert sample(logits, [make_row(GREEDY) for _ in range(3)]) == [1, 0, 1]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 5, 20, VOCAB_SIZE - 1, VOCAB_SIZE + 3]),
    top_p=st.sampled_from([1e-9, 0.3, 0.8, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.1]),
    presence_penalty=st.sampled_from([0.0, -0.3, 1.7]),
    logit_bias=st.sampled_from([None, {3: 2.0, 7: -100.0}, {0: 100.0}]),
    min_tokens=st.sampled_from([0, 3]),
)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(PARAMS, TOKENS, TOKENS), min_size=1, max_size=5), st.integers(0, 99))
def test_each_row_has_the_distribution_of_the_rule_by_rule_reference(cases, seed):
    end_token_ids, bad_words = [1, 2], [(4,), (5, 6), (6, 6, 8)]
    logits = random_logits(len(cases), seed=seed)
    rows = [
        make_row(params, output, (0, *prompt), end_token_ids=end_token_ids, bad_words=bad_words)
        for params, prompt, output in cases
    ]
    probs = Sampler().compute_probs(logits, rows)
    for row, values, actual in zip(rows, logits.tolist(), probs, strict=True):
        changed = reference_logits(values, row, end_token_ids=end_token_ids, bad_words=bad_words)
        expected = torch.tensor(reference_probs(changed, row.params))
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        (SamplingParams(temperature=0.6), TemperatureLogitsWarper(0.6)),
        (SamplingParams(top_k=9), TopKLogitsWarper(9)),
        (SamplingParams(top_p=0.7), TopPLogitsWarper(0.7)),
        (SamplingParams(min_p=0.1), MinPLogitsWarper(0.1)),
    ],
)
def test_filters_agree_with_transformers(params, warper):
    logits = random_logits(6)
    expected = warper(torch.zeros(6, 1, dtype=torch.int64), logits.clone()).softmax(dim=-1)
    torch.testing.assert_close(probs_of(logits, params), expected, atol=1e-6, rtol=1e-4)
    assert not torch.equal(probs_of(logits, params), probs_of(logits, SamplingParams()))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.97),
        SamplingParams(top_p=0.9, top_k=40),
        SamplingParams(top_k=900),
        SamplingParams(top_k=900, top_p=0.98, min_p=0.01),
        SamplingParams(temperature=3.0, top_p=1 - 1e-12),
    ],
)
def test_large_vocabularies_keep_the_same_tokens(params):
    """Nuclei within the candidates that are looked at first, and past them."""
    logits = random_logits(3, vocab_size=1234)
    probs = probs_of(logits, params)
    for actual, values in zip(probs, logits.tolist(), strict=True):
        expected = torch.tensor(reference_probs(values, params))
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


def test_equal_logits_at_the_edge_of_a_filter_stay_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        kept = probs_of(logits, params).nonzero()[:, 1].tolist()
        assert kept == [0, 1, 2, 3]


def test_draws_follow_the_distribution():
    """Chi-squared over 20,000 draws at consecutive positions, below the 0.999 quantile."""
    expected = torch.tensor([0.5, 0.3, 0.15, 0.05])
    num_rows, num_positions = 1000, 20
    logits = expected.log().repeat(num_rows, 1)
    sampler = Sampler()
    counts = torch.zeros(4)
    rows = [make_row(SamplingParams(), seed=seed) for seed in range(num_rows)]
    for _ in range(num_positions):
        token_ids = sampler.sample(logits, rows).token_ids
        counts += torch.bincount(torch.tensor(token_ids), minlength=4)
        for row, token_id in zip(rows, token_ids, strict=True):
            row.token_ids.append(token_id)
    mean = expected * num_rows * num_positions
    assert float(((counts - mean) ** 2 / mean).sum()) < 16.27


def test_every_token_of_a_large_vocabulary_can_come_out():
    """Chunks of the search, also the last and shorter one: uniform weights hit each token."""
    vocab_size = 600
    rows = [make_row(SamplingParams(), seed=seed) for seed in range(12000)]
    token_ids = Sampler().sample(torch.zeros(1, vocab_size).expand(12000, -1), rows).token_ids
    counts = torch.bincount(torch.tensor(token_ids), minlength=vocab_size)
    assert len(counts) == vocab_size
    assert int(counts.min()) > 0
    assert float(((counts - 20) ** 2 / 20).sum()) < 714  # 0.999 quantile of 599 degrees


@pytest.mark.parametrize("temperature", [1e-4, 5.0, 1e300])
@pytest.mark.parametrize("token_id", [0, 255, 256, 17, 299])
def test_a_token_with_probability_zero_never_comes_out(token_id, temperature):
    logits = torch.full((50, 300), -torch.inf)
    logits[:, token_id] = 0.0
    rows = [make_row(SamplingParams(temperature=temperature), seed=i) for i in range(50)]
    assert sample(logits, rows) == 50 * [token_id]


def test_a_row_does_not_depend_on_its_batch_mates_or_its_place():
    logits = random_logits(1, vocab_size=700, seed=3)
    cases = [
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(top_k=5),
        SamplingParams(top_k=400, top_p=0.99, temperature=2.0),
        SamplingParams(min_p=0.05, repetition_penalty=1.3, temperature=2.0),
        SamplingParams(logit_bias={3: 5.0}, logprobs=3),
        GREEDY,
    ]

    def rows():
        return [make_row(params, [5, 9, 9], seed=7 + i) for i, params in enumerate(cases)]

    alone = [Sampler().sample(logits, [row]) for row in rows()]
    sampler = Sampler()
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 0], [4]):
        batch = rows()
        together = sampler.sample(logits.expand(len(order), -1), [batch[i] for i in order])
        assert together.token_ids == [alone[i].token_ids[0] for i in order]
        assert together.logprobs == [alone[i].logprobs[0] for i in order]


def test_the_next_token_is_a_function_of_seed_and_position():
    logits = random_logits(1, seed=5)

    def run(seed, index=0):
        row = make_row(SamplingParams(temperature=2.0), seed=seed, index=index)
        sampler = Sampler()
        for _ in range(20):
            row.token_ids.extend(sampler.sample(logits, [row]).token_ids)
        return row.token_ids[1:]

    first = run(11)
    assert first == run(11)
    assert len({tuple(run(11, index)) for index in range(4)} | {tuple(run(12))}) == 5
    resumed = make_row(SamplingParams(temperature=2.0), first[:12], seed=11)
    assert sample(logits, [resumed]) == [first[12]]


def test_a_sampler_notices_that_the_batch_changed():
    sampler = Sampler()
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    banned = make_row(SamplingParams(temperature=0.0, logit_bias={2: -100}))
    assert sampler.sample(logits, [banned]).token_ids == [1]
    assert sampler.sample(logits, [make_row(GREEDY)]).token_ids == [2]
    assert sampler.sample(logits.expand(2, -1), [make_row(GREEDY), banned]).token_ids == [2, 1]
    assert sampler.sample(logits.expand(2, -1), [banned, make_row(GREEDY)]).token_ids == [1, 2]


def test_lower_precision_logits_are_sampled_in_float32():
    logits = random_logits(4)
    rows = [make_row(SamplingParams(top_p=0.9), seed=i) for i in range(4)]
    low = logits.bfloat16()
    assert sample(low, rows) == sample(low.float(), rows)


def test_end_tokens_are_banned_until_min_tokens_are_there():
    logits = torch.tensor([[1.0, 5.0, 3.0, 2.0]])
    params = SamplingParams(temperature=0.0, min_tokens=2)
    row = make_row(params, end_token_ids=[1, 2])
    tokens = []
    for _ in range(3):
        tokens += sample(logits, [row])
        row.token_ids.append(tokens[-1])
    assert tokens == [3, 3, 1]
    drawn = make_row(SamplingParams(min_tokens=1, top_k=1), end_token_ids=[1])
    assert sample(logits, [drawn]) == [2]


def test_logit_bias_is_added_to_greedy_and_sampled_rows():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    bias = {0: 3, 2: -0.5}
    assert sample(logits, [make_row(SamplingParams(temperature=0.0, logit_bias=bias))]) == [0]
    probs = probs_of(logits, SamplingParams(logit_bias=bias))
    torch.testing.assert_close(probs, torch.tensor([[3.0, 1.0, 1.5]]).softmax(dim=-1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(value):
    logits = torch.zeros(2, 4)
    logits[1, 2] = value
    for params in (GREEDY, SamplingParams(), SamplingParams(logit_bias={1: 1.0})):
        with pytest.raises(NonFiniteLogitsError, match="logits must be finite"):
            Sampler().sample(logits, 2 * [make_row(params)])


def test_a_row_without_any_token_left_is_an_error():
    nothing = torch.full((1, 4), -torch.inf)
    with pytest.raises(NonFiniteLogitsError, match="logits must be finite"):
        sample(nothing, [make_row(GREEDY)])
    nothing[0, 2] = 1.0
    with pytest.raises(NonFiniteLogitsError, match="no token is left"):
        sample(nothing, [make_row(SamplingParams(), bad_words=[(2,)])])


def test_extreme_parameters_give_no_nan():
    logits = torch.tensor([[-1e30, 0.0, 1e30, 3.0]])
    for params in (
        SamplingParams(repetition_penalty=1e300),
        SamplingParams(repetition_penalty=1e-300),
        SamplingParams(temperature=1e-5, top_p=1e-320, min_p=1e-320),
        SamplingParams(temperature=1e300, top_k=2**70),
    ):
        row = make_row(params, output=[0, 1, 2])
        probs = Sampler().compute_probs(logits, [row])
        assert bool(probs.isfinite().all())
        torch.testing.assert_close(probs.sum(), torch.tensor(1.0))


def test_an_empty_batch_gives_no_tokens():
    assert sample(torch.empty(0, 8), []) == []
