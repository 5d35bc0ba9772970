# SPDX-License-Identifier: Apache-2.0
"""Several completions of one prompt, on shared blocks; log probabilities of prompts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine.engine_probes import assert_made_room, poison, record_swaps

from paged_kv import SamplingParams
from paged_kv.engine.inputs import EncodedPrompt

PROMPT = list(range(3, 43))  # two full blocks and a half
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SEEDED = SamplingParams(temperature=1.5, seed=11, max_tokens=6)


def with_n(params, n):
    return dataclasses.replace(params, n=n)


def token_ids(output):
    return [completion.token_ids for completion in output.outputs]


def test_greedy_completions_are_those_of_transformers(tiny_llama):
    llm = tiny_llama.llm()
    (output,) = llm.generate(PROMPT, with_n(GREEDY, 4))
    assert token_ids(output) == [tiny_llama.greedy(PROMPT, 6)] * 4
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert output.finished
    assert llm.engine.kv_cache_manager.usage == 0


def test_completions_share_the_full_blocks_of_their_prompt(tiny_llama):
    llm = tiny_llama.llm()
    tables = []
    llm.generate(PROMPT, with_n(GREEDY, 4), on_step=lambda e: tables.append(e.block_map()))
    rows = [request.block_ids[0] for request in tables[0].requests]
    assert len(rows) == 4
    assert len({row[:2] for row in rows}) == 1
    assert len({row[2] for row in rows}) == 4
    assert llm.engine.stats.peak_num_used_blocks == 2 + 4
    assert llm.engine.stats.num_prompt_tokens == len(PROMPT)


def test_each_completion_has_random_numbers_of_its_own(tiny_llama):
    llm = tiny_llama.llm()
    (alone,) = llm.generate(PROMPT, SEEDED)
    (output,) = llm.generate(PROMPT, with_n(SEEDED, 4))
    assert token_ids(output)[0] == token_ids(alone)[0]
    assert len(set(token_ids(output))) == 4
    (again, _other) = llm.generate([PROMPT, PROMPT[:20]], with_n(SEEDED, 4))
    assert token_ids(again) == token_ids(output)


@pytest.mark.parametrize(
    "limits",
    [{"max_num_seqs": 2}, {"num_blocks": 7}, {"enable_prefix_caching": False, "max_num_seqs": 3}],
    ids=["rows", "blocks", "uncached"],
)
def test_completions_for_which_there_is_no_room_wait(tiny_llama, limits):
    expected = token_ids(tiny_llama.llm().generate(PROMPT, with_n(SEEDED, 4))[0])
    llm = tiny_llama.llm(**limits)
    (output,) = llm.generate(PROMPT, with_n(SEEDED, 4))
    assert token_ids(output) == expected
    assert llm.engine.kv_cache_manager.usage == 0


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_no_token(tiny_llama, mode, caching):
    """Twelve sequences of three prompts, of which the pool holds some at a time."""
    prompts = [PROMPT, PROMPT[5:25], [*PROMPT[7:40], 5]]
    params = [with_n(GREEDY, 4), with_n(SEEDED, 4), with_n(SEEDED, 4)]
    expected = [[tiny_llama.greedy(PROMPT, 6)] * 4]
    expected += map(token_ids, tiny_llama.llm().generate(prompts[1:], params[1:]))
    llm = tiny_llama.llm(
        block_size=8,
        num_blocks=18,
        preemption_mode=mode,
        swap_space_bytes=2**22,
        enable_prefix_caching=caching,
    )
    poison(llm)
    swaps = record_swaps(llm)
    assert list(map(token_ids, llm.generate(prompts, params))) == expected
    assert_made_room(llm, swaps)
    assert llm.engine.kv_cache_manager.usage == 0


def test_updates_name_their_completion_and_the_last_one_has_the_result(tiny_llama):
    updates = list(tiny_llama.llm().stream(PROMPT, with_n(SEEDED, 3)))
    for index in range(3):
        tokens = tuple(update.token_id for update in updates if update.index == index)
        assert tokens == updates[-1].result.outputs[index].token_ids
    assert [update.result is None for update in updates] == [True] * (len(updates) - 1) + [False]


def test_abort_ends_all_completions(tiny_llama):
    llm = tiny_llama.llm()
    stream = llm.stream(PROMPT, with_n(SEEDED, 3))
    update = next(stream)
    (output,) = llm.engine.abort_request([update.request_id])
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3
    assert llm.engine.kv_cache_manager.usage == 0
    assert not llm.engine.has_unfinished_requests()


def test_ids_of_completions_are_in_use_too(tiny_llama):
    engine = tiny_llama.llm().engine
    prompt = EncodedPrompt(None, PROMPT)
    engine.add_request("a", prompt, with_n(SEEDED, 2))
    for _ in range(6):
        engine.step()  # until the second completion might have ended
        if not engine.has_request("a"):
            break
        with pytest.raises(ValueError, match="'a/1' is in use"):
            engine.add_request("a/1", prompt, GREEDY)
    engine.add_request("a/1", prompt, GREEDY)
    with pytest.raises(ValueError, match="'a/1' is in use"):
        engine.add_request("a", prompt, with_n(GREEDY, 2))
    engine.add_request("a", prompt, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.kv_cache_manager.usage == 0


def test_a_request_may_be_replaced_while_a_step_runs(tiny_llama):
    """Its token must not go to the request that has taken its id."""
    engine = tiny_llama.llm().engine
    prompt = EncodedPrompt(None, PROMPT)
    engine.add_request("a", prompt, GREEDY)
    engine.step()

    def replace(engine):
        engine.abort_request(["a"])
        engine.add_request("a", prompt, GREEDY)

    assert engine.step(replace) == []
    results = []
    while engine.has_unfinished_requests():
        results += [update.result for update in engine.step() if update.result is not None]
    assert token_ids(results[0]) == [tiny_llama.greedy(PROMPT, 6)]


# ---- log probabilities of the prompt


def expected_prompt_logprobs(tiny_llama):
    with torch.inference_mode():
        logits = tiny_llama.reference(torch.tensor([PROMPT])).logits[0].double()
    logprobs = logits.log_softmax(-1)
    return [logprobs[i, token].item() for i, token in enumerate(PROMPT[1:])]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}],
    ids=["whole", "chunks"],
)
def test_log_probabilities_of_a_prompt_are_those_of_transformers(tiny_llama, options):
    llm = tiny_llama.llm(**options)
    llm.generate(PROMPT, GREEDY)  # what is cached must be computed again
    params = dataclasses.replace(GREEDY, prompt_logprobs=2, n=2)
    (output,) = llm.generate(PROMPT, params)
    assert output.prompt_logprobs[0] is None
    found = [
        position[token].logprob
        for position, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    ]
    assert found == pytest.approx(expected_prompt_logprobs(tiny_llama), abs=1e-3)
    assert {len(position) for position in output.prompt_logprobs[1:]} <= {2, 3}
    assert output.num_cached_tokens == 0


def test_log_probabilities_of_a_prompt_survive_preemption(tiny_llama):
    llm = tiny_llama.llm(block_size=8, num_blocks=13)
    params = dataclasses.replace(GREEDY, prompt_logprobs=0, max_tokens=20)
    outputs = llm.generate([PROMPT, [*PROMPT[1:], 3]], params)
    assert llm.engine.stats.num_preemptions > 0
    assert [len(output.prompt_logprobs) for output in outputs] == [40, 40]
