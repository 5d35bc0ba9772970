# SPDX-License-Identifier: Apache-2.0
"""How much the engine has the last layer compute."""

from __future__ import annotations

import pytest

from paged_kv import SamplingParams

PROMPTS = [list(range(1, 18)), list(range(20, 25))]
NUM_TOKENS = 6


def inputs():
    return [{"prompt_token_ids": prompt} for prompt in PROMPTS]


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_tokens_that_nobody_asks_for_leave_keys_and_values_only(tiny_llama, prompt_logprobs):
    llm = tiny_llama.llm(num_blocks=64)
    num_rows = {"o_proj": [], "mlp": []}
    last_layer = llm.engine.model_runner._model.layers[-1]
    for name, module in (("o_proj", last_layer.self_attn.o_proj), ("mlp", last_layer.mlp)):
        module.register_forward_hook(
            lambda _, args, __, name=name: num_rows[name].append(len(args[0]))
        )
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=prompt_logprobs)
    llm.generate(inputs(), params)
    expected = [len(PROMPTS) if prompt_logprobs is None else 17 + 5, len(PROMPTS)]
    assert num_rows == {"o_proj": expected, "mlp": expected}


@pytest.mark.parametrize("num_completions", [1, 2])
@pytest.mark.parametrize("max_num_batched_tokens", [7, 2048])
@pytest.mark.parametrize("who_asks", [(), (0,), (1,), (0, 1)])
def test_tokens_are_the_same_whoever_asks_for_those_of_its_prompt(
    tiny_llama, who_asks, max_num_batched_tokens, num_completions
):
    llm = tiny_llama.llm(
        num_blocks=64, max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens
    )
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=NUM_TOKENS,
            n=num_completions,
            prompt_logprobs=0 if index in who_asks else None,
        )
        for index in range(len(PROMPTS))
    ]
    for prompt, output in zip(PROMPTS, llm.generate(inputs(), params), strict=True):
        expected = [tiny_llama.greedy(prompt, NUM_TOKENS)] * num_completions
        assert [completion.token_ids for completion in output.outputs] == expected
