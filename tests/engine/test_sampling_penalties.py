# SPDX-License-Identifier: Apache-2.0
"""Repetition, frequency and presence penalties, and the counts they need."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from engine.sampling_reference import make_row, random_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from paged_kv.engine.penalties import Penalties, TokenCounts, apply_penalties
from paged_kv.engine.sampler import Sampler
from paged_kv.engine.sampling_params import SamplingParams


def penalized(logits, prompt, output, penalties):
    counts = TokenCounts(prompt)
    counts.add(output)
    changed = logits.clone()
    apply_penalties(changed, [0], [counts], [penalties])
    return changed


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 99), max_size=60), st.lists(st.lists(st.integers(0, 99))))
def test_counts_grow_like_a_counter(prompt, pieces):
    counts, expected = TokenCounts(prompt), Counter()
    for piece in pieces:
        counts.add(piece)
        expected.update(piece)
    assert len(np.unique(counts.token_ids)) == len(counts.token_ids)
    assert set(counts.token_ids.tolist()) == {*prompt, *expected}
    for token_id, count in zip(counts.token_ids.tolist(), counts.output_counts, strict=True):
        assert count == expected[token_id]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_agrees_with_transformers(penalty):
    logits = random_logits(1)
    prompt, output = [3, 3, 8, 40], [8, 9, 9]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), logits.clone()
    )
    assert torch.equal(penalized(logits, prompt, output, Penalties(repetition=penalty)), expected)


def test_frequency_counts_the_output_and_presence_asks_whether_it_holds_a_token():
    logits = torch.zeros(1, 6)
    prompt, output = [0, 0, 1], [1, 2, 2, 2]
    by_frequency = penalized(logits, prompt, output, Penalties(frequency=0.5))
    assert by_frequency.tolist() == [[0.0, -0.5, -1.5, 0.0, 0.0, 0.0]]
    by_presence = penalized(logits, prompt, output, Penalties(presence=0.5))
    assert by_presence.tolist() == [[0.0, -0.5, -0.5, 0.0, 0.0, 0.0]]
    rewarded = penalized(logits, prompt, output, Penalties(presence=-2.0, frequency=-1.0))
    assert rewarded.tolist() == [[0.0, 3.0, 5.0, 0.0, 0.0, 0.0]]


def test_repetition_comes_before_frequency_and_presence():
    logits = torch.tensor([[4.0, -4.0]])
    changed = penalized(logits, [], [0, 1, 1], Penalties(2.0, 1.0, 0.25))
    assert changed.tolist() == [[4 / 2 - 1 - 0.25, -4 * 2 - 2 - 0.25]]


def test_each_row_has_its_own_tokens_and_penalties():
    logits = torch.ones(3, 5)
    counts = [TokenCounts([0]), TokenCounts()]
    counts[1].add([3, 4])
    apply_penalties(logits, [2, 0], counts, [Penalties(repetition=2.0), Penalties(presence=1.0)])
    assert logits.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0.5, 1, 1, 1, 1]]


def test_penalties_ban_nothing_and_lift_no_ban():
    logits = torch.tensor([[-1.0, 0.0, -torch.inf, 1.0]])
    for factor in (1e300, 1e-300):
        changed = penalized(logits, [0, 1, 2, 3], [], Penalties(repetition=factor))
        assert changed.isfinite().tolist() == [[True, True, False, True]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, repetition_penalty=2.0),
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
    ],
)
def test_the_sampler_counts_tokens_as_they_come(params):
    """The best token gives way to the next best once it has come out."""
    logits = torch.tensor([[1.5, 1.4, 1.3, 1.2]])
    row, sampler = make_row(params, prompt=[3]), Sampler()
    for _ in range(3):
        row.token_ids.extend(sampler.sample(logits, [row]).token_ids)
    assert row.token_ids[1:] == [0, 1, 2]
    resumed = make_row(params, row.token_ids[1:], prompt=[3])
    assert sampler.sample(logits, [resumed]) == sampler.sample(logits, [row])


def test_only_the_repetition_penalty_sees_the_prompt():
    logits = torch.tensor([[1.5, 1.4]])
    for name, expected in (
        ("repetition_penalty", 1),
        ("frequency_penalty", 0),
        ("presence_penalty", 0),
    ):
        params = SamplingParams(**{"temperature": 0.0, name: 2.0})
        row = make_row(params, prompt=[0, 0])
        assert Sampler().sample(logits, [row]).token_ids == [expected], name


def test_a_row_counts_each_token_once():
    row = make_row(SamplingParams(repetition_penalty=2.0), prompt=[3])
    for token_id, expected in ((4, {3: 0, 4: 1}), (4, {3: 0, 4: 2}), (3, {3: 1, 4: 2})):
        row.token_ids.append(token_id)
        row.count_tokens()
        counts = row.count_tokens()
        held = dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True))
        assert held == expected
