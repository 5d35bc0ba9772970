# SPDX-License-Identifier: Apache-2.0
"""LLM and its engine: forms of input, ends, failures, statistics."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paged_kv import LLM, SamplingParams
from paged_kv.engine.memory import bytes_per_block

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = list(range(20, 60))


@pytest.fixture
def llm(tiny_llama):
    return tiny_llama.llm(num_blocks=64)


class ByteTokenizer:
    """The tiny model's ids as characters; id 10 + n is the n-th letter of a small alphabet."""

    has_chat_template = True

    def encode(self, text, *, add_special_tokens=True):
        return ([1] if add_special_tokens else []) + [ord(c) - 32 for c in text]

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(f"<{i}>" for i in ids)

    def apply_chat_template(self, messages, *, add_generation_prompt=True):
        return "".join(m["role"][0] + m["content"] for m in messages)


@pytest.fixture
def talking(tiny_llama):
    """The tiny model with a tokenizer whose text shows the ids."""
    return dataclasses.replace(tiny_llama.loaded, tokenizer=ByteTokenizer())


def used_blocks(llm):
    engine = llm.engine
    engine.kv_cache_manager.check_integrity()
    return (
        engine.cache_engine.num_blocks
        - 1
        - engine.kv_cache_manager.block_pool.get_num_free_blocks()
    )


def test_results_come_in_the_order_of_the_prompts_in_vllms_shape(llm):
    prompts = [PROMPT, {"prompt_token_ids": [5]}, [7, 8, 9]]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (5, 1, 3)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in outputs] == [tuple(PROMPT), (5,), (7, 8, 9)]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [5, 1, 3]
    for output in outputs:
        assert output.finished
        assert output.prompt is None
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].stop_reason is None
    assert len({o.request_id for o in outputs}) == 3
    assert llm.generate([]) == []


def test_default_params_sample_and_depend_on_the_engine_seed(tiny_llama):
    def run(seed):
        outputs = tiny_llama.llm(num_blocks=64, seed=seed).generate([PROMPT, PROMPT])
        return [o.outputs[0].token_ids for o in outputs]

    first = run(3)
    assert first == run(3) != run(4)
    assert first[0] != first[1], "requests without a seed must not share one"


def test_a_seed_gives_the_same_tokens_whatever_the_batch(tiny_llama):
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=11, max_tokens=8)
    alone = tiny_llama.llm(num_blocks=64).generate(PROMPT, params)[0]
    mates = [[3] * 50, PROMPT, [9, 8]]
    others = SamplingParams(temperature=1.0, seed=5, max_tokens=8)
    batch = tiny_llama.llm(num_blocks=64).generate(mates, [others, params, others])
    assert batch[1].outputs[0].token_ids == alone.outputs[0].token_ids
    tight = tiny_llama.llm(num_blocks=10).generate(mates, [others, params, others])
    assert tight[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_stop_token_ends_the_request_and_is_in_the_ids(llm):
    tokens = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    first_use = tokens.index(tokens[3])
    stopped = llm.generate(PROMPT, dataclasses.replace(GREEDY, stop_token_ids=[tokens[3]]))
    completion = stopped[0].outputs[0]
    assert completion.token_ids == tokens[: first_use + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[3])


def test_eos_ends_the_request_unless_ignored(tiny_llama, talking):
    tokens = tiny_llama.llm().generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    eos = tokens[2]
    end = tokens.index(eos) + 1
    llm = LLM(dataclasses.replace(talking, eos_token_ids=frozenset({eos})), num_blocks=64)
    completion = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    assert completion.token_ids == tokens[:end]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.text == ByteTokenizer().decode(tokens[: end - 1])
    ignoring = dataclasses.replace(GREEDY, ignore_eos=True)
    assert llm.generate(PROMPT, ignoring)[0].outputs[0].token_ids == tokens
    at_least = dataclasses.replace(GREEDY, min_tokens=5)
    assert len(llm.generate(PROMPT, at_least)[0].outputs[0].token_ids) >= 5


def test_stop_string_across_tokens_is_cut_off(talking):
    llm = LLM(talking, num_blocks=64)
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    a, b = whole.token_ids[2:4]
    stop = f"{a}><{b}"
    params = dataclasses.replace(GREEDY, stop=["never", stop])
    pieces = [(u.text, u.result) for u in llm.stream(PROMPT, params)]
    result = pieces[-1][1].outputs[0]
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.stop_reason == stop
    assert "".join(text for text, _ in pieces) == result.text
    assert result.token_ids == whole.token_ids[: len(pieces)]


def test_streamed_pieces_join_to_the_result(talking):
    llm = LLM(talking, num_blocks=64)
    texts, results = {}, {}
    for update in llm.stream(["ab", "hello"], GREEDY):
        texts[update.request_id] = texts.get(update.request_id, "") + update.text
        if update.result is not None:
            results[update.request_id] = update.result
    assert texts == {i: results[i].outputs[0].text for i in results}
    assert [r.prompt for r in results.values()] == ["ab", "hello"]


def test_closing_a_stream_early_frees_its_blocks(llm):
    stream = llm.stream([PROMPT, [1, 2, 3]], GREEDY)
    next(stream)
    assert used_blocks(llm) > 0
    stream.close()
    assert used_blocks(llm) == 0
    assert not llm.engine.has_unfinished_requests()


def test_a_stream_that_is_never_read_leaves_no_request(llm):
    llm.stream(PROMPT, GREEDY)
    assert not llm.engine.has_unfinished_requests()


def test_streams_of_one_object_may_be_advanced_in_turn(llm):
    """They share steps; neither takes the other's tokens, and one may end inside the other's."""
    prompts = [PROMPT, [7, 8]]
    lengths = [9, 3]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in lengths]
    expected = [
        llm.generate(*pair)[0].outputs[0].token_ids for pair in zip(prompts, params, strict=True)
    ]
    for first, second in ((0, 1), (1, 0)):
        streams = [llm.stream(*pair) for pair in zip(prompts, params, strict=True)]
        tokens = [[next(stream).token_id] for stream in streams]
        for i in (first, second):
            tokens[i] += [update.token_id for update in streams[i]]
        assert [tuple(ids) for ids in tokens] == expected
    assert used_blocks(llm) == 0


def test_a_stream_whose_request_is_gone_says_so(llm):
    stream = llm.stream([PROMPT, [7, 8]], GREEDY)
    next(stream), next(stream)
    llm.engine.abort_request([next(iter(llm.engine.scheduler.requests))])
    with pytest.raises(RuntimeError, match="request 0 was aborted, or a step of another call"):
        list(stream)
    assert used_blocks(llm) == 0
    assert not llm.engine.has_unfinished_requests()


def test_a_step_cannot_start_inside_a_step(llm):
    expected = llm.generate(PROMPT, GREEDY)[0].outputs
    with pytest.raises(RuntimeError, match="a step of this engine is running"):
        llm.generate(PROMPT, GREEDY, on_step=lambda _: llm.generate([9], GREEDY))
    assert used_blocks(llm) == 0
    assert llm.generate(PROMPT, GREEDY)[0].outputs == expected


def test_a_step_without_requests_does_nothing(llm):
    assert llm.engine.step() == []


def test_min_tokens_with_an_eos_id_that_the_embedding_lacks(tiny_llama):
    loaded = dataclasses.replace(tiny_llama.loaded, eos_token_ids=frozenset({10**6}))
    llm = LLM(loaded, num_blocks=16)
    params = dataclasses.replace(GREEDY, min_tokens=2)
    assert len(llm.generate(PROMPT, params)[0].outputs[0].token_ids) == 6


def test_extreme_sampling_parameters_leave_the_other_requests_alone(llm):
    """What one request asks for never fails the step that it shares with others."""
    expected = llm.generate(PROMPT, GREEDY)[0].outputs
    extremes = [
        SamplingParams(temperature=1.0, top_k=2**70, top_p=0.5),
        SamplingParams(temperature=1e300, min_tokens=3, stop_token_ids=[5]),
        SamplingParams(temperature=1e-4, top_p=1e-320, min_p=1.0),
    ]
    for extreme in extremes:
        outputs = llm.generate([PROMPT, PROMPT], [GREEDY, extreme])
        assert outputs[0].outputs == expected
        assert all(0 <= i < 199 for i in outputs[1].outputs[0].token_ids)


def test_min_tokens_that_leaves_nothing_to_sample_is_refused(llm):
    params = SamplingParams(min_tokens=1, stop_token_ids=range(199))
    with pytest.raises(ValueError, match="stop_token_ids leave nothing to sample"):
        llm.generate(PROMPT, params)


@pytest.mark.parametrize("value", [16.0, "16", True])
@pytest.mark.parametrize("name", ["block_size", "num_blocks", "max_num_seqs", "max_model_len"])
def test_sizes_that_are_no_integers_are_refused(tiny_llama, name, value):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
        tiny_llama.llm(**{name: value})


def test_chat_templates_the_messages_without_a_second_bos(talking):
    llm = LLM(talking, num_blocks=64)
    conversation = [{"role": "user", "content": "hi"}]
    output = llm.chat(conversation, GREEDY)[0]
    assert output.prompt == "uhi"
    assert list(output.prompt_token_ids) == ByteTokenizer().encode("uhi", add_special_tokens=False)
    both = llm.chat([conversation, [{"role": "user", "content": "yo"}]], GREEDY)
    assert [o.prompt for o in both] == ["uhi", "uyo"]


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "num_generated"), [(13, 50, 3), (14, 50, 2), (15, 50, 1)]
)
def test_a_request_ends_at_the_longest_length(tiny_llama, num_tokens, max_tokens, num_generated):
    """Prompt and output together reach max_model_len; the prompt alone must leave one token."""
    llm = tiny_llama.llm(num_blocks=64, max_model_len=16)
    params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
    completion = llm.generate(PROMPT[:num_tokens], params)[0].outputs[0]
    assert len(completion.token_ids) == num_generated
    assert completion.finish_reason == "length"


def test_max_tokens_none_goes_on_to_the_longest_length(tiny_llama):
    llm = tiny_llama.llm(num_blocks=64, max_model_len=24)
    params = dataclasses.replace(GREEDY, max_tokens=None)
    assert len(llm.generate([1, 2, 3, 4], params)[0].outputs[0].token_ids) == 20


@pytest.mark.parametrize("num_tokens", [16, 17, 40])
def test_a_prompt_without_room_for_a_token_is_refused(tiny_llama, num_tokens):
    llm = tiny_llama.llm(num_blocks=64, max_model_len=16)
    with pytest.raises(ValueError, match=rf"prompt has {num_tokens} tokens, at most 15 fit"):
        llm.generate([[1], PROMPT[:num_tokens]], GREEDY)
    assert llm.engine.stats.num_requests == 0


def test_a_prompt_that_never_fits_into_the_pool_is_refused_with_numbers(tiny_llama):
    llm = tiny_llama.llm(num_blocks=3)
    with pytest.raises(ValueError, match=r"at most 31 fit: the KV cache has 2 blocks of 16"):
        llm.generate(PROMPT, GREEDY)
    assert len(llm.generate(PROMPT[:31], GREEDY)[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([PROMPT, []], GREEDY, "prompt is empty"),
        ([PROMPT, [199]], GREEDY, "token id 199 at position 0"),
        ([PROMPT, [0, -1]], GREEDY, "token id -1 at position 1"),
        ([PROMPT, "text"], GREEDY, "no tokenizer"),
        ([PROMPT], [GREEDY, GREEDY], "1 prompts need as many sampling_params, got 2"),
        ([PROMPT], dataclasses.replace(GREEDY, stop_token_ids=[500]), "stop_token_ids holds"),
        ([PROMPT], dataclasses.replace(GREEDY, stop="x"), "stop strings need a tokenizer"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert used_blocks(llm) == 0
    assert llm.engine.stats.num_requests == 0
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"block_size": 0}, "block_size must be in"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens must be at least 256, got 8"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"max_model_len": 2000}, "at most the model's 1024, got 2000"),
        ({"max_model_len": 100, "num_blocks": 4}, "at most the 48 tokens"),
        ({"seed": 2**64}, "seed must be in"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, got int8"),
        ({"dtype": torch.float64}, "dtype must be one of"),
    ],
)
def test_wrong_sizes_are_refused(tiny_llama, kwargs, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny_llama.loaded, **kwargs)


class BrokenModelError(Exception):
    pass


def test_a_request_that_skips_the_prefix_cache_reads_nothing_and_leaves_its_blocks_there(llm):
    skipping = dataclasses.replace(GREEDY, skip_reading_prefix_cache=True)
    outputs = [llm.generate(PROMPT, params)[0] for params in (skipping, skipping, GREEDY)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 32]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


@pytest.mark.parametrize("failing_step", [0, 1, 3])
def test_a_failing_step_leaves_no_block_and_no_stale_prefix(
    llm, tiny_llama, monkeypatch, failing_step
):
    """The failed step's blocks were findable before they were computed: they must not be hit."""
    expected = tiny_llama.greedy(PROMPT, 6)
    runner = type(llm.engine.model_runner)
    execute_model, steps = runner.execute_model, iter(range(100))

    def fail(self, output, **options):
        if next(steps) == failing_step:
            raise BrokenModelError
        return execute_model(self, output, **options)

    monkeypatch.setattr(runner, "execute_model", fail)
    with pytest.raises(BrokenModelError):
        llm.generate([PROMPT, PROMPT[:17]], GREEDY)
    assert used_blocks(llm) == 0
    assert not llm.engine.has_unfinished_requests()
    output = llm.generate(PROMPT, GREEDY)[0]
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected


def test_an_exception_from_on_step_ends_the_call_cleanly(llm):
    def interrupt(engine):
        if engine.stats.num_steps == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, GREEDY, on_step=interrupt)
    assert used_blocks(llm) == 0
    assert len(llm.generate(PROMPT, GREEDY)) == 1


def test_abort_returns_what_a_request_had(llm):
    engine = llm.engine
    stream = llm.stream(PROMPT, GREEDY)
    update = next(stream)
    outputs = engine.abort_request([update.request_id, "unknown"])
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort"]
    assert outputs[0].outputs[0].token_ids == (update.token_id,)
    assert used_blocks(llm) == 0


def test_statistics_count_tokens_hits_and_blocks(llm):
    llm.generate([PROMPT, [*PROMPT, 7]], GREEDY)
    stats = llm.engine.stats
    assert (stats.num_requests, stats.num_finished_requests) == (2, 2)
    assert stats.num_prompt_tokens == 81
    assert stats.num_cached_prompt_tokens == 32
    assert stats.num_generated_tokens == 12
    assert stats.num_steps == 6
    assert stats.peak_num_used_blocks == 4
    # 40 + 5 and 41 + 5 tokens in 3 blocks each, 2 of them shared.
    assert stats.peak_fragmentation == pytest.approx((3 + 2) / 64)
    assert stats.generated_tokens_per_second > 0
    assert used_blocks(llm) == 0
    assert len(llm.engine.block_map().idle_cached_block_ids) == 2


def test_the_block_map_shows_a_step_before_blocks_are_given_back(llm):
    maps = []
    one_token = dataclasses.replace(GREEDY, max_tokens=1)
    llm.generate([PROMPT, [*PROMPT, 7]], one_token, on_step=lambda e: maps.append(e.block_map()))
    (block_map,) = maps
    first, second = block_map.requests
    assert (first.num_tokens, second.num_tokens) == (40, 41)
    (first_ids,), (second_ids,) = first.block_ids, second.block_ids
    assert first_ids[:2] == second_ids[:2]
    assert len(block_map.owners()) == 4
    assert llm.engine.stats.peak_fragmentation == pytest.approx((8 + 7) / 64)


def test_the_cache_has_the_size_that_is_reported(llm):
    caches = llm.engine.cache_engine.kv_caches.values()
    allocated = sum(cache.key.nbytes + cache.value.nbytes for cache in caches)
    assert allocated == llm.engine.cache_engine.num_bytes
    groups = llm.engine.kv_cache_manager.kv_cache_config.kv_cache_groups
    assert allocated == 64 * bytes_per_block(groups)
