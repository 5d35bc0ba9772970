# SPDX-License-Identifier: Apache-2.0
"""Models of which some layers have a window: several KV cache groups behind one engine."""

from __future__ import annotations

import dataclasses

import pytest
from engine.engine_probes import assert_made_room, assert_no_prompt_is_cut, poison, record_swaps
from engine.tiny_reference import GREEDY, PROMPTS, TinyReference

from paged_kv import LLM


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TinyReference(tmp_path_factory.mktemp("gemma3"), "gemma3")


TIGHT = {
    "num_blocks": 52,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "swap_space_bytes": 2**22,
}
OPTIONS = {
    "roomy": {"num_blocks": 400},
    "uncached": {"num_blocks": 400, "enable_prefix_caching": False},
    "chunks": {"num_blocks": 400, "max_num_batched_tokens": 9, "max_num_seqs": 4},
    # All prompts together are longer than a step.
    "whole prompts": {
        "num_blocks": 400,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 80,
        "max_num_seqs": 16,
        "max_model_len": 80,
    },
    "tight": TIGHT,
    "swapping": {**TIGHT, "preemption_mode": "swap"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("num_completions", [1, 4])
def test_tokens_equal_transformers(tiny, options, num_completions):
    llm = LLM(tiny.loaded, block_size=4, **options)
    poison(llm)
    swaps = record_swaps(llm)
    params = dataclasses.replace(GREEDY, n=num_completions)
    on_step = None if options.get("enable_chunked_prefill", True) else assert_no_prompt_is_cut
    for _ in range(2):  # the second time with what the first has left in the prefix cache
        outputs = llm.generate(PROMPTS, params, on_step=on_step)
        for output, expected in zip(outputs, tiny.expected, strict=True):
            assert [c.token_ids for c in output.outputs] == [expected] * num_completions
    assert llm.engine.kv_cache_manager.usage == 0
    if options["num_blocks"] == TIGHT["num_blocks"]:
        assert_made_room(llm, swaps)


def test_blocks_are_given_back_as_they_leave_the_window(tiny):
    llm = LLM(tiny.loaded, block_size=4, num_blocks=400, max_num_batched_tokens=16, max_num_seqs=4)
    maps = []
    llm.generate(PROMPTS[3], GREEDY, on_step=lambda engine: maps.append(engine.block_map()))
    groups = llm.engine.kv_cache_manager.kv_cache_config.kv_cache_groups
    for group, block_ids in zip(groups, maps[-1].requests[0].block_ids, strict=True):
        num_held = sum(block_id != 0 for block_id in block_ids)
        is_full = type(group.kv_cache_spec).__name__ == "FullAttentionSpec"
        # 7 tokens lie in 2 or 3 blocks of 4.
        assert num_held in ([len(block_ids)] if is_full else [2, 3])
    assert len(groups) > 1
