# SPDX-License-Identifier: Apache-2.0
"""How much the engine has the last layer compute."""

from __future__ import annotations

import pytest

from paged_kv import SamplingParams

PROMPTS = [list(range(1, 18)), list(range(20, 25))]


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_tokens_that_nobody_asks_for_leave_keys_and_values_only(tiny_llama, prompt_logprobs):
    llm = tiny_llama.llm(num_blocks=64)
    num_rows = []
    last_layer = llm.engine.model_runner._model.layers[-1]
    last_layer.mlp.register_forward_hook(lambda _, args, __: num_rows.append(len(args[0])))
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=prompt_logprobs),
    )
    assert num_rows == [len(PROMPTS) if prompt_logprobs is None else 17 + 5, len(PROMPTS)]
