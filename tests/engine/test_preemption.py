# SPDX-License-Identifier: Apache-2.0
"""Making room: by computing again, by swapping, in the order of priorities."""

from __future__ import annotations

import pytest
import torch
from engine.engine_probes import assert_made_room, record_swaps

from paged_kv import SamplingParams
from paged_kv.engine.inputs import EncodedPrompt

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
PROMPTS = [
    torch.randint(0, 199, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (20, 23, 30)
]
TIGHT = {"block_size": 8, "num_blocks": 12, "swap_space_bytes": 2**22}


@pytest.fixture(scope="session")
def expected(tiny_llama):
    return [tiny_llama.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_no_token(tiny_llama, expected, mode, policy, caching):
    llm = tiny_llama.llm(
        **TIGHT, preemption_mode=mode, scheduling_policy=policy, enable_prefix_caching=caching
    )
    swaps = record_swaps(llm)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert_made_room(llm, swaps)
    assert llm.engine.kv_cache_manager.usage == 0


def test_swapping_computes_no_token_twice(tiny_llama):
    llm = tiny_llama.llm(**TIGHT, preemption_mode="swap", enable_prefix_caching=False)
    num_computed = []
    execute = llm.engine.model_runner.execute_model
    llm.engine.model_runner.execute_model = lambda output, **options: (
        num_computed.append(output.total_num_scheduled_tokens) or execute(output, **options)
    )
    llm.generate(PROMPTS, GREEDY)
    assert llm.engine.stats.num_preemptions > 0
    # The last token of each is sampled and not computed.
    assert sum(num_computed) == sum(map(len, PROMPTS)) + 3 * (NUM_TOKENS - 1)


def test_a_swap_space_that_is_too_small_falls_back_to_recomputing(tiny_llama, expected):
    llm = tiny_llama.llm(**{**TIGHT, "swap_space_bytes": 0}, preemption_mode="swap")
    made = record_swaps(llm)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert made == {"out": [], "in": []}
    assert llm.engine.stats.num_preemptions > 0


def test_priorities_decide_who_is_served_first(tiny_llama):
    llm = tiny_llama.llm(max_num_seqs=1, scheduling_policy="priority")
    engine = llm.engine
    for name, priority in (("low", 5), ("high", 0), ("middle", 2)):
        engine.add_request(
            name, EncodedPrompt(None, PROMPTS[0]), GREEDY, priority=priority, arrival_time=0.0
        )
    finished = []
    while engine.has_unfinished_requests():
        finished += [update.request_id for update in engine.step() if update.result is not None]
    assert finished == ["high", "middle", "low"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption_mode": "drop"}, "preemption_mode must be one of recompute, swap, got 'drop'"),
        ({"scheduling_policy": "sjf"}, "scheduling_policy must be one of fcfs, priority"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype must be one of auto, fp8"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1.0"),
        ({"memory_utilization": 0.0}, r"memory_utilization must be in \(0, 1\], got 0.0"),
        ({"swap_space_bytes": -1}, "swap_space_bytes must be at least 0, got -1"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be at least 0"),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 8},
            "it needs enable_chunked_prefill",
        ),
        ({"enable_chunked_prefill": False, "max_model_len": 4096}, "max_num_batched_tokens must"),
    ],
)
def test_wrong_options_are_refused(tiny_llama, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_llama.llm(**options)
