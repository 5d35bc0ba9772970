# SPDX-License-Identifier: Apache-2.0
"""Each sampling flag of ``paged-kv generate`` has its effect."""

from __future__ import annotations

import json

import pytest


def test_logprobs_are_in_the_json(generate):
    _, stdout, _ = generate("--format", "json", "--logprobs", 2)
    record = json.loads(stdout)
    assert {"cumulative_logprob", "logprobs"} <= record.keys()
    chosen = [position[0] for position in record["logprobs"]]
    assert [entry["token_id"] for entry in chosen] == record["token_ids"]
    assert sum(entry["logprob"] for entry in chosen) == pytest.approx(record["cumulative_logprob"])
    assert [len(position) for position in record["logprobs"]] == 8 * [2]  # greedy: it is the best
    assert list(chosen[0]) == ["token_id", "token", "logprob", "rank"]


@pytest.mark.parametrize(
    "flag",
    [("--repetition-penalty", 1e-3), ("--presence-penalty", -2), ("--frequency-penalty", -2)],
)
def test_a_penalty_changes_what_is_generated(generate, flag):
    """Rewards, since such small weights make every token about as likely."""
    sampling = ("--temperature", 0.2, "--seed", 3)
    _, plain, _ = generate(*sampling)
    _, rewarded, _ = generate(*sampling, *flag)
    assert rewarded != plain


def test_a_bad_word_does_not_come_out(generate):
    _, plain, _ = generate("--format", "json", "--seed", 1, "--temperature", 1)
    word = json.loads(plain)["text"].replace("\ufffd", "").strip()[0]
    _, stdout, _ = generate("--format", "json", "--seed", 1, "--temperature", 1, "--bad-word", word)
    assert word not in json.loads(stdout)["text"]


def test_min_tokens_puts_off_a_stop_string(generate):
    _, stdout, _ = generate("--format", "json")
    stop = json.loads(stdout)["text"][0]
    _, stdout, _ = generate("--format", "json", "--stop", stop)
    assert len(json.loads(stdout)["token_ids"]) < 5
    _, stdout, _ = generate("--format", "json", "--stop", stop, "--min-tokens", 5)
    assert len(json.loads(stdout)["token_ids"]) >= 5
