# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM: many callers of one engine, who come, leave and fail independently."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import subprocess
import sys
import threading

import pytest

from paged_kv import AsyncLLM, SamplingParams
from paged_kv.engine import EngineDeadError, EngineGenerateError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
LONG = dataclasses.replace(GREEDY, max_tokens=900)
PROMPT = list(range(20, 60))


class BrokenModelError(Exception):
    pass


@pytest.fixture
def run(tiny_llama):
    """Run ``function(llm)`` in a new event loop; afterwards no block and no thread is left."""

    def call(function, **options):
        async def main():
            options.setdefault("num_blocks", 256)
            async with AsyncLLM(tiny_llama.loaded, **options) as llm:
                result = await asyncio.wait_for(function(llm), 60)
            assert used_blocks(llm) == 0
            assert not llm._llm.engine.has_unfinished_requests()
            assert not llm._thread._calls
            return result

        result = asyncio.run(main())
        assert not engine_threads()
        return result

    return call


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "paged_kv engine"]


def used_blocks(llm):
    pool = llm._llm.engine.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


async def finish(iterator):
    """The last item of an iterator."""
    last = None
    async for item in iterator:
        last = item
    return last


async def first_of(iterator):
    return await iterator.__anext__()


def test_concurrent_callers_get_what_llm_generates(tiny_llama, run):
    prompts = [PROMPT[:n] for n in (3, 17, 40)] + [[7, 8, 9]]
    expected = [o.outputs[0] for o in tiny_llama.llm().generate(prompts, GREEDY)]

    async def generate_all(llm):
        outputs = await asyncio.gather(*(finish(llm.generate(p, GREEDY)) for p in prompts))
        updates = await asyncio.gather(*(finish(llm.stream(p, GREEDY)) for p in prompts))
        return outputs, [update.result for update in updates]

    for outputs in run(generate_all):
        assert [output.outputs[0] for output in outputs] == expected
        assert [output.prompt_token_ids for output in outputs] == [tuple(p) for p in prompts]


def test_snapshots_grow_by_a_token_and_only_the_last_is_finished(run):
    async def collect(llm):
        return [output async for output in llm.generate(PROMPT, GREEDY, request_id="mine")]

    snapshots = run(collect)
    ids = [snapshot.outputs[0].token_ids for snapshot in snapshots]
    assert ids == [ids[-1][: len(some)] for some in ids]
    assert sorted(set(map(len, ids))) == list(map(len, ids)), "each is longer than the one before"
    assert len(ids[-1]) == GREEDY.max_tokens
    assert [s.finished for s in snapshots] == [False] * (len(snapshots) - 1) + [True]
    assert {s.request_id for s in snapshots} == {"mine"}


def test_updates_come_in_order_and_add_up_to_the_result(run):
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=5)

    async def collect(llm):
        return [update async for update in llm.stream(PROMPT, params)]

    updates = run(collect)
    completions = updates[-1].result.outputs
    assert [update.result for update in updates[:-1]] == [None] * (len(updates) - 1)
    for completion in completions:
        ids = tuple(u.token_id for u in updates if u.index == completion.index)
        assert ids == completion.token_ids


def test_a_slow_caller_holds_up_nobody_and_keeps_one_snapshot(run):
    async def be_slow(llm):
        slow = llm.generate(PROMPT, GREEDY)
        taken = [await first_of(slow)]
        await finish(llm.generate([1, 2], dataclasses.replace(GREEDY, max_tokens=30)))
        taken += [output async for output in slow]
        return taken

    taken = run(be_slow)
    assert len(taken) <= 3, "the first, one that was kept, and the result"
    assert taken[-1].finished
    assert len(taken[-1].outputs[0].token_ids) == GREEDY.max_tokens


def test_twenty_callers_of_whom_some_leave(tiny_llama, run):
    """In a pool in which they preempt one another; those who stay get what they get alone."""
    params = dataclasses.replace(GREEDY, max_tokens=12)
    prompts = [PROMPT[i : i + 12] for i in range(20)]
    expected = [o.outputs[0].token_ids for o in tiny_llama.llm().generate(prompts, params)]

    async def leave(llm, i):
        iterator = llm.generate(prompts[i], params)
        async for output in iterator:
            if len(output.outputs[0].token_ids) >= i // 2:
                break
        await iterator.aclose()

    async def cancel(llm, i):
        task = asyncio.create_task(finish(llm.generate(prompts[i], params)))
        await asyncio.sleep(0.002 * i)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def stay(llm, i):
        output = await finish(llm.generate(prompts[i], params))
        assert output.outputs[0].token_ids == expected[i]

    async def main(llm):
        kinds = (stay, leave, stay, cancel)
        await asyncio.gather(*(kinds[i % 4](llm, i) for i in range(20)))

    run(main, num_blocks=16)


@pytest.mark.parametrize("how", ["cancel", "aclose", "break", "abort"])
def test_leaving_frees_the_blocks(run, how):
    async def main(llm):
        iterator = llm.generate(PROMPT, LONG, request_id="x")
        await first_of(iterator)
        assert used_blocks(llm) > 0
        if how == "cancel":
            task = asyncio.create_task(finish(iterator))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        elif how == "aclose":
            await iterator.aclose()
        elif how == "break":
            del iterator  # what a loop does that is left
            gc.collect()
            await asyncio.sleep(0.01)
        await llm.abort("x")  # for the others only a way to wait for the thread
        num_used = used_blocks(llm)
        if how == "abort":
            output = await finish(iterator)
            assert output.finished
            assert output.outputs[0].finish_reason == "abort"
        assert num_used == 0
        assert len((await finish(llm.generate(PROMPT, GREEDY))).outputs[0].token_ids) == 6

    run(main, max_model_len=1000)


def test_abort_raises_to_a_caller_of_stream_and_ignores_unknown_ids(run):
    async def main(llm):
        iterator = llm.stream(PROMPT, LONG, request_id="x")
        await first_of(iterator)
        await llm.abort("unknown")
        await llm.abort("x")
        with pytest.raises(RuntimeError, match="request 'x' was aborted"):
            await finish(iterator)

    run(main)


def test_bad_requests_are_refused_in_the_call_and_disturb_nobody(run):
    async def main(llm):
        running = llm.generate(PROMPT, LONG, request_id="x")
        await first_of(running)
        for prompt, params, message in (
            ([], GREEDY, "prompt is empty"),
            ([199], GREEDY, "token id 199"),
            ("text", GREEDY, "no tokenizer"),
            ([1] * 2000, GREEDY, "at most"),
            ([1], dataclasses.replace(GREEDY, stop="x"), "stop strings need a tokenizer"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.generate(prompt, params)  # not awaited
        with pytest.raises(ValueError, match="request id 'x' is in use"):
            await finish(llm.generate([1], GREEDY, request_id="x"))
        assert not (await first_of(running)).finished
        await running.aclose()
        # The id is free again.
        assert (await finish(llm.generate([1], GREEDY, request_id="x"))).finished

    run(main)


def test_an_error_of_the_engine_in_add_reaches_its_caller_alone(run, monkeypatch):
    async def main(llm):
        running = llm.generate(PROMPT, LONG)
        await first_of(running)
        with monkeypatch.context() as patch:
            patch.setattr(llm._llm.engine, "add_request", fail)
            with pytest.raises(BrokenModelError):
                await finish(llm.generate([1], GREEDY))
        assert not (await first_of(running)).finished
        await running.aclose()

    run(main)


def fail(*arguments, **options):
    raise BrokenModelError("no luck")


def test_a_failing_step_raises_to_all_who_wait_and_the_engine_goes_on(tiny_llama, run):
    async def main(llm):
        runner = llm._llm.engine.model_runner
        execute_model, num_calls = runner.execute_model, iter(range(10**6))

        def fail_once(output, **options):
            return fail() if next(num_calls) == 3 else execute_model(output, **options)

        runner.execute_model = fail_once
        calls = [
            finish(make(PROMPT[:n], LONG)) for make in (llm.generate, llm.stream) for n in (3, 9)
        ]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == 4 * [EngineGenerateError]
        assert "step of the engine failed: BrokenModelError: no luck" in str(errors[0])
        assert len(set(map(id, errors))) == 4, "raising one must not grow another's traceback"
        assert {type(error.__cause__) for error in errors} == {BrokenModelError}
        output = await finish(llm.generate(PROMPT, GREEDY))
        assert output.outputs[0].token_ids == tiny_llama.greedy(PROMPT, 6)

    run(main)


def test_shutdown_ends_callers_and_can_be_repeated(run):
    async def main(llm):
        running = llm.generate(PROMPT, LONG)
        never_advanced = llm.generate(PROMPT, LONG)
        await first_of(running)
        await asyncio.gather(llm.shutdown(), llm.shutdown())
        assert not engine_threads()
        for iterator in (running, never_advanced):
            with pytest.raises(EngineDeadError, match="shut down"):
                await finish(iterator)
        with pytest.raises(EngineDeadError, match="shut down"):
            llm.generate(PROMPT, GREEDY)
        await llm.abort("unknown")

    run(main)


def test_callers_of_a_thread_that_has_failed_get_errors_with_its_cause(tiny_llama):
    async def main():
        llm = AsyncLLM(tiny_llama.loaded, num_blocks=64)
        llm._thread._deliver = fail_in_step = Once(fail, llm._thread._deliver)
        calls = [finish(llm.generate(PROMPT[:n], LONG)) for n in (3, 9)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert fail_in_step.has_failed
        assert [type(error) for error in errors] == 2 * [EngineDeadError]
        assert errors[0] is not errors[1]
        assert {type(error.__cause__) for error in errors} == {BrokenModelError}
        await llm.shutdown()

    asyncio.run(main())


class Once:
    """Calls one function, then always another."""

    def __init__(self, first, then):
        self.has_failed = False
        self._first, self._then = first, then

    def __call__(self, *arguments):
        function = self._then if self.has_failed else self._first
        self.has_failed = True
        return function(*arguments)


def test_an_idle_engine_sleeps(run):
    """Neither a step nor a look at the queues, before the first request and between two."""

    async def main(llm):
        engine, num_looks = llm._llm.engine, 0
        has_unfinished_requests = engine.has_unfinished_requests

        def count():
            nonlocal num_looks
            num_looks += 1
            return has_unfinished_requests()

        engine.has_unfinished_requests = count
        for _ in range(2):
            before = num_looks
            await asyncio.sleep(0.05)
            assert num_looks - before <= 2, "it has something to forget after a request"
            await finish(llm.generate(PROMPT, GREEDY))

    run(main)


def test_two_event_loops_share_an_engine(run):
    async def main(llm):
        expected = await finish(llm.generate(PROMPT, GREEDY))

        async def elsewhere():
            return await finish(llm.generate(PROMPT, GREEDY))

        both = await asyncio.gather(elsewhere(), asyncio.to_thread(asyncio.run, elsewhere()))
        assert [output.outputs for output in both] == 2 * [expected.outputs]

    run(main)


def test_a_loop_that_was_closed_holds_no_blocks(run):
    async def main(llm):
        loop = asyncio.new_event_loop()
        iterator = llm.generate(PROMPT, LONG, request_id="x")
        await asyncio.to_thread(loop.run_until_complete, first_of(iterator))
        loop.close()
        while llm._llm.engine.has_request("x"):
            await asyncio.sleep(0.001)
        with pytest.raises(StopIteration):  # as nobody can await it in its loop
            iterator.aclose().send(None)

    run(main)


def test_a_forgotten_object_ends_its_thread(tiny_llama):
    llm = AsyncLLM(tiny_llama.loaded, num_blocks=8)
    (thread,) = engine_threads()
    del llm
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive()


PROGRAM = """
import asyncio, sys
from paged_kv import AsyncLLM, SamplingParams

llm = AsyncLLM(sys.argv[1], num_blocks=64)
loop = asyncio.new_event_loop()
iterator = llm.generate([1, 2, 3], SamplingParams(max_tokens=200, seed=0))
loop.run_until_complete(iterator.__anext__())
"""


def test_a_program_ends_quietly_while_a_request_runs(tiny_llama, tmp_path):
    tiny_llama.reference.save_pretrained(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
