# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math

import pytest

from paged_kv.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("n", 0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("bad_words", [""]),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", 1.5),
        ("n", True),
        ("n", 2.0),
        ("repetition_penalty", "1"),
        ("presence_penalty", None),
        ("frequency_penalty", True),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: "a"}),
        ("bad_words", "word"),
        ("bad_words", [3]),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("prompt_logprobs", "1"),
        ("max_tokens", 1.0),
        ("seed", "7"),
        ("stop", [3]),
        ("stop_token_ids", ["a"]),
        ("skip_reading_prefix_cache", 1),
        ("extra_args", ["kv_cache_report_mode"]),
    ],
)
def test_a_wrong_type_is_refused_by_name(field, value):
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: value})


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens"):
        SamplingParams(max_tokens=2, min_tokens=3)
    assert SamplingParams(max_tokens=None, min_tokens=3).min_tokens == 3


def test_limits_are_allowed():
    params = SamplingParams(
        temperature=0, top_k=-1, top_p=1, min_p=1, seed=-(2**63), max_tokens=1, stop_token_ids=None
    )
    assert params.is_greedy
    assert params.stop_token_ids == ()
    assert not SamplingParams(temperature=0.5, seed=2**64 - 1).is_greedy


def test_the_limits_of_penalties_and_logprobs_are_allowed():
    params = SamplingParams(
        repetition_penalty=1e-3,
        presence_penalty=-2,
        frequency_penalty=2,
        logprobs=-1,
        prompt_logprobs=0,
        bad_words=None,
    )
    assert (params.logprobs, params.prompt_logprobs, params.bad_words) == (-1, 0, ())


def test_several_greedy_completions_are_allowed():
    assert SamplingParams(n=4, temperature=0.0).n == 4


def test_logit_bias_is_copied_and_clamped():
    given = {3: 250, "4": -1e9, 5: 0.5, 6: -math.inf}
    params = SamplingParams(logit_bias=given)
    given.clear()
    assert params.logit_bias == {3: 100.0, 4: -100.0, 5: 0.5, 6: -100.0}
    assert SamplingParams().logit_bias is None
    assert hash(params) == hash(SamplingParams())


def test_bad_words_are_kept_once():
    assert SamplingParams(bad_words=["a", "b", "a"]).bad_words == ("a", "b")


def test_stop_is_a_string_or_a_list_of_strings():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop=None).stop_strings == ()


def test_params_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 1


def test_extra_args_do_not_hinder_hashing():
    params = SamplingParams(extra_args={"kv_cache_report_mode": "full"})
    assert params.extra_args == {"kv_cache_report_mode": "full"}
    assert hash(params) == hash(SamplingParams())
    assert params != SamplingParams()


def test_the_prefix_cache_is_read_but_for_prompt_logprobs(make_request):
    def skips(params):
        return make_request(4, params=params).skip_reading_prefix_cache

    assert not skips(SamplingParams())
    assert skips(SamplingParams(skip_reading_prefix_cache=True))
    with_logprobs = SamplingParams(prompt_logprobs=0)
    assert skips(with_logprobs)
    assert not skips(dataclasses.replace(with_logprobs, prompt_logprobs=None))
    with pytest.raises(ValueError, match="must not be False with prompt_logprobs"):
        dataclasses.replace(with_logprobs, skip_reading_prefix_cache=False)
