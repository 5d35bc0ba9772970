# SPDX-License-Identifier: Apache-2.0
"""Recorded decode steps: the same bits as without, whatever happens between them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine.graph_stand_in import fill_with_garbage
from model._tiny_models import VARIANTS, make_tiny, random_ids
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from paged_kv import LLM, SamplingParams
from paged_kv.engine import EngineConfig, config, decode_recordings
from paged_kv.engine.decode_recordings import DecodeRecordings
from paged_kv.engine.inputs import EncodedPrompt
from paged_kv.engine.op_recorder import OpRecorder
from paged_kv.engine.step_inputs import StepArrays
from paged_kv.models import load_model

# Two share 20 tokens. Batches grow as prompts are computed, and shrink as requests end.
PROMPTS = [random_ids(n, seed=n) for n in (20, 30, 3, 11)]
PROMPTS.insert(1, PROMPTS[0] + random_ids(3, seed=1))
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=2, n=1 + (n == 18))
    for n in (18, 15, 12, 9, 6)
]
SIZES = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16}
DTYPES = (torch.float32, torch.bfloat16)
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 2**22}
# Blocks such that all prompts fit, all outputs do not.
FEW_BLOCKS = {"llama_untied": 25, "qwen2": 25, "qwen3": 25, "gemma3": 75}
OPTIONS = {
    "roomy": {},
    "batch_invariant": {"batch_invariant": True},
    "fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"kv_cache_dtype": "int8"},
    "recompute": {"preemption_mode": "recompute"},
    "swap": SWAP,
    "without prefix cache": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {}
    for name in FEW_BLOCKS:
        folders[name] = tmp_path_factory.mktemp(name)
        make_tiny(name, seed=3).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def models(folders):
    return {
        (name, dtype): load_model(folder, dtype=dtype)
        for name, folder in folders.items()
        for dtype in DTYPES
    }


def recordings_of(llm) -> DecodeRecordings:
    return llm.engine.model_runner._decode_steps


def poison_before_each_replay(llm):
    """All that a recording writes before it reads."""
    recordings = recordings_of(llm)
    run, tables = recordings.run, llm.engine._batch.block_tables

    def run_poisoned(step):
        fill_with_garbage(recordings._recorder.arena)
        recordings._hidden.fill_(torch.nan)
        for array in recordings._inputs:
            array.fill(2**30)
        for table in tables.input_block_tables:
            table.fill_(2**31 - 1)
        tables.slot_mappings.fill_(2**62)
        return run(step)

    recordings.run = run_poisoned


def cache_bits(llm):
    for cache in llm.engine.cache_engine.kv_caches.values():
        yield from (cache.key.view(torch.int8), cache.value.view(torch.int8))


def generate(loaded, options, *, record):
    """Results of two rounds, caches and engine; the second round hits the first one's prefixes."""
    llm = LLM(loaded, record_decode_steps=record, **options)
    if record:
        poison_before_each_replay(llm)
    for bits in cache_bits(llm):
        bits.fill_(-1)
    rounds = [[output.outputs for output in llm.generate(PROMPTS, PARAMS)] for _ in range(2)]
    return rounds, list(cache_bits(llm)), llm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("name", FEW_BLOCKS)
def test_results_and_caches_are_those_without_recordings(models, name, case, dtype):
    """Tokens, log probabilities and every bit that was written to a cache or left alone."""
    num_blocks = FEW_BLOCKS[name] if case in ("recompute", "swap") else 400
    options = SIZES | {"num_blocks": num_blocks} | OPTIONS[case]
    expected, expected_bits, _ = generate(models[name, dtype], options, record=False)
    rounds, bits, llm = generate(models[name, dtype], options, record=True)
    assert rounds == expected
    assert all(map(torch.equal, bits, expected_bits))
    assert len(recordings_of(llm)._replays) >= 4, "batches of as many sizes"
    stats = llm.engine.stats
    assert (stats.num_preemptions > 0) == (case in ("recompute", "swap"))
    assert case != "roomy" or stats.num_cached_prompt_tokens > 0


def test_a_replay_runs_no_module_and_makes_no_tensor(models):
    """Also not on the way from the schedule to the hidden states."""
    llm = LLM(models["gemma3", torch.float32], num_blocks=400, **SIZES)
    runner, engine = llm.engine.model_runner, llm.engine
    seen, calls = [], []
    execute = runner.execute_model

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.slice, torch.ops.aten.view):
                return func(*args, **(kwargs or {}))
            seen[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    def watched(output, **options):
        seen.append([])
        with Ops():
            return execute(output, **options)

    engine.add_request("a", EncodedPrompt(None, tuple(PROMPTS[0])), PARAMS[0])
    while not recordings_of(llm)._replays:
        engine.step()
    runner.execute_model = watched
    handles = [
        module.register_forward_hook(lambda *_: calls.append(1))
        for module in runner._model.modules()
    ]
    try:
        for _ in range(6):
            engine.step()
    finally:
        for handle in handles:
            handle.remove()
    assert not calls
    made = [name for ops in seen for name in ops if "empty" in name or "new_" in name]
    assert made == []
    assert all("paged_kv.paged_attention_varlen.default" in ops for ops in seen)


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path, monkeypatch):
    family, shape = VARIANTS["llama_untied"]
    num_bytes = []
    for num_layers in (2, 12):
        monkeypatch.setitem(
            VARIANTS, "llama_untied", (family, shape | {"num_hidden_layers": num_layers})
        )
        make_tiny("llama_untied").save_pretrained(tmp_path)
        llm = LLM(tmp_path, num_blocks=400, **SIZES)
        llm.generate(PROMPTS, PARAMS)
        assert len(recordings_of(llm)._replays) > 3
        num_bytes.append(recordings_of(llm)._recorder.arena.num_bytes)
    assert 0 < num_bytes[1] < 1.2 * num_bytes[0]


def test_engines_that_share_a_model_keep_their_modes(models):
    """`set_batch_invariant` flips between their steps; a recording is its engine's."""
    loaded = models["gemma3", torch.float32]
    alone = [
        generate(loaded, SIZES | {"num_blocks": 400, "batch_invariant": mode}, record=False)[0][0]
        for mode in (True, False)
    ]
    engines = [LLM(loaded, num_blocks=400, batch_invariant=mode, **SIZES) for mode in (True, False)]
    results = [{}, {}]
    for llm in engines:
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            llm.engine.add_request(str(i), EncodedPrompt(None, tuple(prompt)), params)
    while any(llm.engine.has_unfinished_requests() for llm in engines):
        for llm, found in zip(engines, results, strict=True):
            for update in llm.engine.step():
                if update.result is not None:
                    found[update.result.request_id] = update.result.outputs
            assert loaded.model.batch_invariant == llm.engine.config.batch_invariant
    for found, expected in zip(results, alone, strict=True):
        assert [found[str(i)] for i in range(len(PROMPTS))] == expected


def test_recordings_keep_the_weights_that_they_read(folders):
    """A model that is moved afterwards leaves them as they were."""
    loaded = load_model(folders["qwen3"])
    llm = LLM(loaded, num_blocks=99, **SIZES)
    recordings = recordings_of(llm)
    llm.generate(PROMPTS[:1], PARAMS[1])
    step = step_of(5)
    with torch.inference_mode():
        expected = recordings.run(step).clone()
    storages = [StorageWeakRef(each.untyped_storage()) for each in loaded.model.parameters()]
    loaded.model.double()
    assert not any(storage.expired() for storage in storages)
    with torch.inference_mode():
        assert torch.equal(recordings.run(step), expected)
    del llm, recordings
    assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize("failing_layer", [0, 1])
def test_after_an_error_while_recording_the_engine_serves_on(models, monkeypatch, failing_layer):
    loaded = models["llama_untied", torch.float32]
    expected = generate(loaded, SIZES | {"num_blocks": 400}, record=False)[0][0]
    llm = LLM(loaded, num_blocks=400, **SIZES)
    layer = loaded.model.layers[failing_layer]
    forward, mode = layer.forward, torch.utils._python_dispatch._get_current_dispatch_mode

    def fail_while_recording(*args, **options):
        if mode() is not None:
            raise ZeroDivisionError
        return forward(*args, **options)

    monkeypatch.setattr(layer, "forward", fail_while_recording)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS, PARAMS)
        assert mode() is None
        assert not recordings_of(llm)._replays
        assert not llm.engine.has_unfinished_requests()
    monkeypatch.undo()
    monkeypatch.setattr(decode_recordings, "NUM_STEPS_BEFORE_RECORDING", 0)
    assert [output.outputs for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert recordings_of(llm)._replays


def test_a_model_that_looks_at_values_is_told_how_to_run(models, monkeypatch):
    """Recorded, it would give the first step's tokens for ever."""
    loaded = models["llama_untied", torch.float32]
    layer = loaded.model.layers[0]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x, *args: forward(x * x.abs().max().item(), *args))
    with pytest.raises(
        RuntimeError, match=r"cannot hold what looks at .*record_decode_steps=False"
    ):
        LLM(loaded, num_blocks=99, **SIZES).generate(PROMPTS[:1], PARAMS[1])
    LLM(loaded, num_blocks=99, record_decode_steps=False, **SIZES).generate(PROMPTS[:1], PARAMS[1])


# ---- without an engine


def step_of(*ids):
    num_seqs = len(ids)
    return StepArrays(
        input_ids=np.array(ids, np.int64),
        positions=np.array(ids, np.int64) + 1,
        query_start_loc=np.arange(num_seqs + 1, dtype=np.int32),
        rows=np.arange(num_seqs, dtype=np.int32),
        seq_lens=np.array(ids, np.int32) + 2,
    )


@pytest.fixture
def sizes():
    """Of the passes that have run; a replay is none."""
    return []


@pytest.fixture
def forward(sizes):
    def forward(inputs):
        sizes.append(len(inputs.rows))
        starts = inputs.query_start_loc[:-1]
        total = inputs.input_ids + inputs.positions + inputs.rows + inputs.seq_lens + starts
        return total[:, None].float()

    return forward


def expected_of(*ids):
    return [[3.0 * token + 3.0 + 2.0 * row] for row, token in enumerate(ids)]


def test_each_size_is_recorded_once_and_replayed_for_other_values(forward, sizes):
    recordings = DecodeRecordings(forward, torch.zeros(5, 1))
    for ids in ((7, 8, 9), (1, 2), (4, 0, 5), (3, 3), (1, 2, 3, 4, 5), (9,), (6, 5, 4), (0,)):
        assert recordings.run(step_of(*ids)).tolist() == expected_of(*ids)
    assert sizes == [3, 2, 5, 1]


def test_a_size_is_recorded_once_it_has_come_some_times(forward, sizes, monkeypatch):
    monkeypatch.setattr(decode_recordings, "NUM_STEPS_BEFORE_RECORDING", 2)
    recorded = []

    class Recorder(OpRecorder):
        def capture(self, run):
            recorded.append(len(sizes))
            return super().capture(run)

    recordings = DecodeRecordings(forward, torch.zeros(5, 1), Recorder(torch.device("cpu")))
    for ids in ((1, 2), (3, 4), (1,), (5, 6), (7, 8), (9, 9), (2,), (3,)):
        assert recordings.run(step_of(*ids)).tolist() == expected_of(*ids)
    assert sizes == [2, 2, 1, 2, 1, 1]
    assert recorded == [3, 5]


def test_steps_of_one_token_a_request_fit_if_they_are_not_too_many(forward):
    recordings = DecodeRecordings(forward, torch.zeros(2, 1))
    assert recordings.fits(step_of(5))
    assert recordings.fits(step_of(5, 9))
    assert not recordings.fits(step_of(5, 9, 1))
    step = step_of(5, 9)
    prefill = step._replace(rows=step.rows[:1], query_start_loc=step.query_start_loc[[0, 2]])
    assert not recordings.fits(prefill)


def test_larger_steps_run_without_a_recording(models, monkeypatch):
    monkeypatch.setattr("paged_kv.engine.model_runner.MAX_RECORDED_SIZE", 2)
    loaded = models["llama_untied", torch.float32]
    expected = generate(loaded, SIZES | {"num_blocks": 400}, record=False)[0]
    rounds, _, llm = generate(loaded, SIZES | {"num_blocks": 400}, record=True)
    assert rounds == expected
    assert set(recordings_of(llm)._replays) == {1, 2}


# ---- configuration


def test_steps_are_recorded_on_a_cpu_unless_it_is_turned_off(models, monkeypatch):
    loaded = models["llama_untied", torch.float32]
    assert isinstance(recordings_of(LLM(loaded, num_blocks=8)), DecodeRecordings)
    assert recordings_of(LLM(loaded, num_blocks=8, record_decode_steps=False)) is None
    assert EngineConfig().records_decode_steps
    assert EngineConfig(record_decode_steps=True).records_decode_steps
    assert not EngineConfig(record_decode_steps=False).records_decode_steps
    monkeypatch.setattr(config, "check_device", lambda _device: None)
    on_gpu = EngineConfig(device="cuda")
    assert not on_gpu.records_decode_steps
    assert not dataclasses.replace(on_gpu, cuda_graphs=True).records_decode_steps
    with pytest.raises(ValueError, match="record_decode_steps needs device cpu, got 'cuda': use"):
        EngineConfig(device="cuda", record_decode_steps=True)


@pytest.mark.parametrize("value", [1, 0, "yes"])
def test_the_switch_is_a_bool(value):
    with pytest.raises(TypeError, match="record_decode_steps must be True, False or None, got "):
        EngineConfig(record_decode_steps=value)


@pytest.mark.parametrize("bad_id", [-1, 160, 2**40])
def test_ids_are_checked_when_a_request_comes(models, bad_id):
    """The passes of an engine do not look at them."""
    engine = LLM(models["llama_untied", torch.float32], num_blocks=8).engine
    prompt = EncodedPrompt(None, (3, bad_id))
    for call in (
        lambda: engine.check_request(prompt, PARAMS[0]),
        lambda: engine.add_request("a", prompt, PARAMS[0]),
    ):
        with pytest.raises(ValueError, match=f"prompt holds token id {bad_id} at position 1; the"):
            call()
    assert not engine.has_unfinished_requests()
