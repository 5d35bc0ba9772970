# SPDX-License-Identifier: Apache-2.0
"""The batch-invariant mode: the same bits, however a request came to its tokens."""

from __future__ import annotations

import pytest
import torch

from paged_kv import SamplingParams

PROMPTS = [
    torch.randint(0, 199, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (45, 20, 33)
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, logprobs=3)

RUNS = {
    "warm": {},
    "chunked": {"max_num_batched_tokens": 11, "max_num_seqs": 3},
    "recomputed": {"block_size": 8, "num_blocks": 15},
    "swapped": {"block_size": 8, "num_blocks": 15, "preemption_mode": "swap"},
    "uncached": {"enable_prefix_caching": False},
}


def logprobs_of(output):
    return [
        {token: entry.logprob for token, entry in position.items()}
        for position in output.outputs[0].logprobs
    ]


@pytest.fixture(scope="module")
def cold(tiny_llama):
    """Each prompt alone, with nothing cached."""
    results = []
    for prompt in PROMPTS:
        llm = tiny_llama.llm(batch_invariant=True)
        results += map(logprobs_of, llm.generate(prompt, PARAMS))
    return results


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_log_probabilities_have_the_same_bits(tiny_llama, cold, options):
    llm = tiny_llama.llm(batch_invariant=True, **options)
    first = [logprobs_of(output) for output in llm.generate(PROMPTS, PARAMS)]
    second = [logprobs_of(output) for output in llm.generate(PROMPTS, PARAMS)]
    assert first == cold
    assert second == cold, "with what is cached"
    if "num_blocks" in options:
        assert llm.engine.stats.num_preemptions > 0


def test_engines_of_one_model_may_differ(tiny_llama, cold):
    """The model is shared, also with the engine that finds the scales of a quantised cache."""
    model = tiny_llama.loaded.model
    invariant, other = tiny_llama.llm(batch_invariant=True), tiny_llama.llm()
    other.generate(PROMPTS, PARAMS)
    assert not model.batch_invariant
    assert [logprobs_of(output) for output in invariant.generate(PROMPTS, PARAMS)] == cold
    assert model.batch_invariant
    quantised = tiny_llama.llm(batch_invariant=True, kv_cache_dtype="int8")
    quantised.generate(PROMPTS[0], PARAMS)
    assert model.batch_invariant
