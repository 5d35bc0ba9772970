# SPDX-License-Identifier: Apache-2.0
"""The batch-invariant mode: the same bits, however a request came to its tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from engine.engine_probes import assert_made_room, record_swaps
from model._tiny_models import make_tiny, random_ids

from paged_kv import LLM, SamplingParams
from paged_kv.models import load_model

PROMPTS = [random_ids(length) for length in (45, 20, 33)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, logprobs=3, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """A model and what is asked of it.

    Attributes:
        variant: Of the tiny models; Gemma 3 has layers with a window and without, and products
            that are torch's.
        dtype: Of weights and activations.
        kv_cache_dtype: Of keys and values.
        n: Completions of each prompt.
    """

    variant: str
    dtype: str
    kv_cache_dtype: str = "auto"
    n: int = 1

    def __str__(self) -> str:
        return f"{self.variant}-{self.dtype}-{self.kv_cache_dtype}-n{self.n}"

    def llm(self, model, **options) -> LLM:
        sizes = {"num_blocks": 256, "swap_space_bytes": 2**22} | options
        return LLM(model, batch_invariant=True, kv_cache_dtype=self.kv_cache_dtype, **sizes)


CASES = [
    Case("llama_untied", "float32"),
    Case("llama_untied", "bfloat16"),
    Case("gemma3", "float32"),
    Case("gemma3", "bfloat16"),
    Case("llama_untied", "float32", kv_cache_dtype="int8"),
    Case("gemma3", "float32", n=2),
]

# Pools too small for all prompts at once, by block size.
NUM_TIGHT_BLOCKS = {"llama_untied": {8: 15, 16: 9}, "gemma3": {8: 46, 16: 29}}

RUNS = {
    "warm": {},
    "chunked": {"max_num_batched_tokens": 11, "max_num_seqs": 3},
    "recomputed": {"preemption_mode": "recompute", "block_size": 16},
    "swapped": {"preemption_mode": "swap", "block_size": 16},
    "recomputed-nhd": {"preemption_mode": "recompute", "block_size": 8},
    "swapped-nhd": {"preemption_mode": "swap", "block_size": 8},
    "uncached": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    @cache
    def load(variant, dtype):
        folder = tmp_path_factory.mktemp(variant)
        make_tiny(variant, seed=3).save_pretrained(folder)
        return load_model(folder, dtype=getattr(torch, dtype))

    return load


@pytest.fixture(scope="module")
def cold(load):
    """Each prompt alone, one completion, with nothing cached.

    Blocks of 8 tokens are in another layout than those of 16, whose sums have another order.
    """

    @cache
    def cold(case, block_size):
        results = []
        for prompt in PROMPTS:
            llm = case.llm(load(case.variant, case.dtype), block_size=block_size)
            results += logprobs_of(llm.generate(prompt, PARAMS))
        return results

    return lambda case, block_size=16: cold(dataclasses.replace(case, n=1), block_size)


def logprobs_of(outputs):
    """For each completion, in order, its log probabilities by position and token."""
    return [
        [
            {token: entry.logprob for token, entry in position.items()}
            for position in completion.logprobs
        ]
        for output in outputs
        for completion in output.outputs
    ]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_log_probabilities_have_the_same_bits(load, cold, case, run):
    options = dict(RUNS[run])
    block_size = options.get("block_size", 16)
    if "preemption_mode" in options:
        options["num_blocks"] = NUM_TIGHT_BLOCKS[case.variant][block_size]
    llm = case.llm(load(case.variant, case.dtype), **options)
    swaps = record_swaps(llm)
    params = dataclasses.replace(PARAMS, n=case.n)
    expected = [logprobs for logprobs in cold(case, block_size) for _ in range(case.n)]
    assert logprobs_of(llm.generate(PROMPTS, params)) == expected
    assert logprobs_of(llm.generate(PROMPTS, params)) == expected, "with what is cached"
    if "preemption_mode" in options:
        assert_made_room(llm, swaps)


def test_engines_of_one_model_may_differ(load, cold):
    """The model is shared, also with the engine that finds the scales of a quantised cache."""
    case = CASES[0]
    loaded = load(case.variant, case.dtype)
    invariant, other = case.llm(loaded), LLM(loaded, num_blocks=256)
    other.generate(PROMPTS, PARAMS)
    assert not loaded.model.batch_invariant
    assert logprobs_of(invariant.generate(PROMPTS, PARAMS)) == cold(case)
    assert loaded.model.batch_invariant
    quantised = LLM(loaded, num_blocks=256, batch_invariant=True, kv_cache_dtype="int8")
    quantised.generate(PROMPTS[0], PARAMS)
    assert loaded.model.batch_invariant
