# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from paged_kv.engine.sampler import filter_logits, sample
from paged_kv.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
VOCAB_SIZE = 50


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_logits(num_rows, seed=0):
    return 3 * torch.randn(num_rows, VOCAB_SIZE, generator=generator(seed))


def kept_by_reference(row, params):
    """Token ids that survive the filters, one rule after the other in float64."""
    scaled = [(value / params.temperature, -i) for i, value in enumerate(row.double().tolist())]
    ranked = sorted(scaled, reverse=True)
    weights = [torch.tensor(value - ranked[0][0], dtype=torch.float64).exp() for value, _ in ranked]
    ids = [-negative for _, negative in ranked]
    kept = [(i, w) for i, w in zip(ids, weights, strict=True) if w >= params.min_p]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total = sum(w for _, w in kept)
    result, mass = set(), 0.0
    for token_id, weight in kept:
        if mass >= params.top_p and params.top_p < 1:
            break
        result.add(token_id)
        mass += float(weight / total)
    return result


def test_greedy_takes_the_best_token_and_the_first_among_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, -1.0], [-3.0, -2.0, -2.0]])
    assert sample(logits, [GREEDY] * 3, [None] * 3) == [1, 0, 1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=1),
        SamplingParams(top_k=7),
        SamplingParams(top_k=VOCAB_SIZE + 5),
        SamplingParams(top_p=0.6),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=0.2),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=2.0, top_k=9, top_p=0.8, min_p=0.05),
    ],
)
def test_filters_keep_what_a_rule_by_rule_reference_keeps(params):
    logits = random_logits(8)
    before = logits.clone()
    filtered = filter_logits(logits, [params] * 8)
    assert torch.equal(logits, before), "the argument was changed"
    for row, kept in zip(logits, filtered, strict=True):
        ids = set(kept.isfinite().nonzero().flatten().tolist())
        assert ids == kept_by_reference(row, params)
        survivors = sorted(ids)
        torch.testing.assert_close(kept[survivors], row[survivors] / params.temperature)


def test_rows_with_different_filters_do_not_mix():
    logits = random_logits(4)
    params = [
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.3, temperature=2.0),
    ]
    together = filter_logits(logits, params)
    for i in range(4):
        assert torch.equal(together[i : i + 1], filter_logits(logits[i : i + 1], [params[i]]))


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(500, 1)
    draws = generator(1)
    params = [SamplingParams(temperature=1.0)] * 500
    counts = torch.zeros(4)
    for _ in range(20):
        for token_id in sample(logits, params, [draws] * 500):
            counts[token_id] += 1
    torch.testing.assert_close(
        counts / counts.sum(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.015, rtol=0
    )


def test_a_token_with_probability_zero_never_comes_out():
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, 17] = 0.0
    draws = generator(0)
    for _ in range(50):
        assert sample(logits, [SamplingParams(temperature=5.0)], [draws]) == [17]


def test_a_seeded_row_does_not_depend_on_its_batch_mates():
    params = SamplingParams(temperature=1.0, top_p=0.9)
    logits = random_logits(6)
    alone, together = generator(42), generator(42)
    for _ in range(20):
        expected = sample(logits[2:3], [params], [alone])
        generators = [generator(i) for i in range(6)]
        generators[2] = together
        all_params = [GREEDY, SamplingParams(top_k=2), params, params, GREEDY, SamplingParams()]
        assert sample(logits, all_params, generators)[2:3] == expected


def test_banned_tokens_do_not_come_out():
    logits = torch.tensor([[9.0, 8.0, 1.0], [9.0, 8.0, 1.0], [9.0, 8.0, 1.0]])
    sampled = SamplingParams(temperature=1.0, top_k=1)
    params = [GREEDY, sampled, GREEDY]
    assert sample(logits, params, [None, generator(0), None], [[0], [0, 1], []]) == [1, 2, 0]
    assert logits[0, 0] == 9.0, "the argument was changed"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(value):
    logits = torch.zeros(2, 4)
    logits[1, 2] = value
    with pytest.raises(RuntimeError, match="logits must be finite"):
        sample(logits, [GREEDY, GREEDY], [None, None])


def test_an_empty_batch_gives_no_tokens():
    assert sample(torch.empty(0, 8), [], []) == []
