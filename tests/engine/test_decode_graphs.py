# SPDX-License-Identifier: Apache-2.0
"""Decode steps as graphs, which recorded ops take the place of (graph_stand_in.py)."""

from __future__ import annotations

import weakref

import pytest
import torch
from engine.device_stand_ins import EmulatedOps, MetaSampler
from engine.graph_stand_in import GraphStandIn
from model._tiny_models import make_tiny, random_ids
from ops.backends import has_cuda
from torch.multiprocessing.reductions import StorageWeakRef

from paged_kv import LLM, SamplingParams, _device_rows
from paged_kv.engine import EngineConfig, config, decode_graphs, memory_profile
from paged_kv.engine.inputs import EncodedPrompt
from paged_kv.models import load_model

PROMPTS = [random_ids(n, seed=n) for n in (20, 23, 30, 3, 11)]
# Batches of 5 down to 1 as they end; the first has two completions. Blocks of 4: tables grow.
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=2, n=1 + (n == 18))
    for n in (18, 15, 12, 9, 6)
]
SIZES = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 64}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 2**22}
OPTIONS = {
    "roomy": {"num_blocks": 400},
    "chunks": {"num_blocks": 400, "max_num_batched_tokens": 9},
    # All prompts fit, all outputs do not.
    "recompute": {"num_blocks": 25, "max_num_batched_tokens": 16},
    "swap": {"num_blocks": 25, "max_num_batched_tokens": 16, **SWAP},
    "fp8": {"num_blocks": 400, "kv_cache_dtype": "fp8"},
}
GEMMA_OPTIONS = OPTIONS | {
    "recompute": {"num_blocks": 75, "max_num_batched_tokens": 16},
    "swap": {"num_blocks": 75, "max_num_batched_tokens": 16, **SWAP},
}
# On a GPU with graphs of CUDA's.
DEVICES = ["cpu", *(["cuda"] if has_cuda() else [])]
CASES = [("llama_untied", *options, device) for options in OPTIONS.items() for device in DEVICES]
CASES += [("gemma3", *options, device) for options in GEMMA_OPTIONS.items() for device in DEVICES]
ABSURD_ID, ABSURD_SLOT = 2**31 - 1, 2**62


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {}
    for name in ("llama_untied", "gemma3"):
        folders[name] = tmp_path_factory.mktemp(name)
        make_tiny(name, seed=3).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def models(folders):
    return {name: load_model(folder) for name, folder in folders.items()}


@pytest.fixture
def recorders(monkeypatch):
    """Graphs on any device; the recorders that were made."""
    monkeypatch.setattr(GraphStandIn, "made", [])
    monkeypatch.setattr(decode_graphs, "CudaGraphRecorder", GraphStandIn)
    monkeypatch.setattr(config, "check_cuda_graphs", lambda _device: None)
    return GraphStandIn.made


def poison_before_each_replay(engine):
    """All that a graph reads besides weights and caches, and all that it leaves.

    Returns a list that gets the size of each batch that is replayed.
    """
    graphs, tables = engine.model_runner._decode_steps, engine._batch.block_tables
    run, replayed = graphs.run, []

    def run_poisoned(step):
        graphs._inputs.fill_(0x7F)
        graphs._hidden.fill_(torch.nan)
        for table in tables.input_block_tables:
            table.fill_(ABSURD_ID)
        tables.slot_mappings.fill_(ABSURD_SLOT)
        replayed.append(len(step.rows))
        return run(step)

    graphs.run = run_poisoned
    return replayed


def cache_bits(engine):
    """The caches' bits, as integers: garbage may be NaN."""
    dtypes = {1: torch.int8, 4: torch.int32}
    for cache in engine.cache_engine.kv_caches.values():
        for tensor in (cache.key, cache.value):
            yield tensor.view(dtypes[tensor.element_size()])


def generate(loaded, options, **graph_options):
    """Results, caches (full of garbage before), sizes of replayed batches, other statistics."""
    graphs_or_not = graph_options or {"record_decode_steps": False}
    llm = LLM(loaded, batch_invariant=True, **SIZES | options, **graphs_or_not)
    replayed = poison_before_each_replay(llm.engine) if graph_options else []
    for bits in cache_bits(llm.engine):
        bits.fill_(-1)
    outputs = [output.outputs for output in llm.generate(PROMPTS, PARAMS)]
    return outputs, list(cache_bits(llm.engine)), replayed, llm.engine.stats


@pytest.mark.parametrize(
    ("name", "case", "options", "device"), CASES, ids=["-".join((*c[:2], c[3])) for c in CASES]
)
def test_results_and_caches_are_those_without_graphs(models, request, name, case, options, device):
    """To the bit: padding changes no result and writes nothing, not even to the null block."""
    if device == "cpu":
        request.getfixturevalue("recorders")
    options = options | {"device": device}
    expected, expected_bits, *_ = generate(models[name], options)
    outputs, bits, replayed, stats = generate(models[name], options, cuda_graphs=True)
    assert outputs == expected
    assert all(map(torch.equal, bits, expected_bits))
    assert any((tensor == -1).any() for tensor in bits)
    assert {3, 5} & set(replayed), "batches that are padded"
    assert len(replayed) < stats.num_steps, "prompts have no graph"
    assert (stats.num_preemptions > 0) == (case in ("recompute", "swap"))


@pytest.mark.parametrize("name", ["llama_untied", "gemma3"])
def test_emulated_kernels_take_padded_batches_too(models, recorders, monkeypatch, name):
    """A sequence without tokens, of length 0, in no row, with the slot -1."""
    monkeypatch.setattr(torch.ops, "paged_kv", EmulatedOps())
    monkeypatch.setattr(_device_rows, "lies_on_host", lambda _device: False)
    options = {"num_blocks": 400, "block_size": 8}
    expected, expected_bits, *_ = generate(models[name], options)
    outputs, bits, replayed, _ = generate(models[name], options, cuda_graphs=True)
    assert {3, 5} & set(replayed)
    assert outputs == expected
    assert all(map(torch.equal, bits, expected_bits))


@pytest.mark.parametrize("name", ["llama_untied", "gemma3"])
def test_a_captured_pass_has_no_tensor_of_another_device(folders, recorders, monkeypatch, name):
    """On "meta" the model computes as on a GPU: without the ops that only CPUs have."""
    monkeypatch.setattr(config, "check_device", lambda _device: None)
    engine = LLM(folders[name], device="meta", cuda_graphs=True, num_blocks=400, **SIZES).engine
    engine._sampler = MetaSampler()
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        engine.add_request(str(i), EncodedPrompt(None, tuple(prompt)), params)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine._sampler.num_tokens == 4 * len(PROMPTS)
    assert recorders[0].num_replays > 0


def test_all_sizes_are_captured_when_the_engine_is_made(models, recorders):
    llm = LLM(models["llama_untied"], num_blocks=400, cuda_graphs=True, **SIZES)
    (recorder,) = recorders
    assert [tape_size(tape) for tape in recorder.tapes] == [6, 4, 2, 1], "the largest first"
    llm.generate(PROMPTS, PARAMS)
    assert len(recorder.tapes) == 4


def tape_size(tape):
    """Tokens that a captured pass looks up."""
    (ids,) = (op.args[2] for op in tape if op.op == torch.ops.aten.index_select.default)
    return len(ids)


def test_a_batch_larger_than_all_sizes_runs_without_a_graph(models, recorders):
    expected, *_ = generate(models["llama_untied"], OPTIONS["roomy"])
    outputs, _, replayed, _ = generate(
        models["llama_untied"], OPTIONS["roomy"], cuda_graphs=True, cuda_graph_sizes=[3, 2, 3]
    )
    assert outputs == expected
    assert [tape_size(tape) for tape in recorders[0].tapes] == [3, 2]
    assert set(replayed) == {3, 2}
    assert recorders[0].num_replays == len(replayed)


def test_engines_that_share_a_model_keep_their_modes(models, recorders):
    """Graphs are captured in their engine's mode; its head runs in it after a replay too."""
    loaded = models["gemma3"]
    one, other = (
        LLM(loaded, num_blocks=400, batch_invariant=mode, cuda_graphs=True, **SIZES).engine
        for mode in (True, False)
    )
    assert [product_rows(recorder.tapes[0]) for recorder in recorders] == [{16}, {6}]
    one.add_request("a", EncodedPrompt(None, tuple(PROMPTS[0])), PARAMS[1])
    for _ in range(2):
        one.step()
        assert loaded.model.batch_invariant
        other.add_request("b", EncodedPrompt(None, tuple(PROMPTS[0])), PARAMS[1])
        other.step()
        other.abort_request(["b"])
        assert not loaded.model.batch_invariant
    assert recorders[0].num_replays == 1


def product_rows(tape):
    """Rows of the products that are torch's; in tiles of 16 where a batch must not matter."""
    return {len(op.args[0]) for op in tape if op.op == torch.ops.aten.mm.default}


def test_graphs_keep_the_weights_that_they_read(folders, recorders, monkeypatch):
    """As a graph of CUDA's, which holds addresses and no tensor, does not."""
    monkeypatch.setattr(GraphStandIn, "capture", lambda _recorder, _run: int)
    loaded = load_model(folders["gemma3"])
    llm = LLM(loaded, num_blocks=99, cuda_graphs=True, cuda_graph_sizes=[1], **SIZES)
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    del tensors
    loaded.model.double()
    assert not any(storage.expired() for storage in storages)
    del llm
    assert all(storage.expired() for storage in storages)
    assert len(recorders) == 1


def test_graphs_are_off_unless_asked_for(models, recorders):
    assert not EngineConfig().cuda_graphs
    assert EngineConfig().decode_graph_sizes == ()
    LLM(models["llama_untied"], num_blocks=8, **SIZES)
    assert not recorders


def test_graphs_are_measured_and_their_memory_is_not_given_to_the_cache(
    models, recorders, monkeypatch
):
    """A device where each graph takes 1 GiB, for as long as it lives."""
    graphs = []

    class Weighed(GraphStandIn):
        def capture(self, run):
            replay = super().capture(run)
            graphs.append(weakref.ref(replay))
            return replay

    def used_bytes(_device):
        return (7 + sum(graph() is not None for graph in graphs)) << 30

    monkeypatch.setattr(decode_graphs, "CudaGraphRecorder", Weighed)
    monkeypatch.setattr(memory_profile, "total_memory_bytes", lambda _device: 64 << 30)
    monkeypatch.setattr(memory_profile, "used_memory_bytes", used_bytes)
    monkeypatch.setattr(memory_profile, "measure_step_bytes", lambda *_: 2 << 30)
    given = {"memory_utilization": 0.5, "max_num_seqs": 4}
    loaded = models["gemma3"]
    plain, with_graphs = (
        memory_profile.choose_kv_cache_bytes(loaded, EngineConfig(**given, cuda_graphs=enabled))
        for enabled in (False, True)
    )
    assert plain == (32 - 7 - 2) << 30
    assert with_graphs == plain - (3 << 30), "sizes 1, 2 and 4"
    given["memory_utilization"] = 11 / 64
    with pytest.raises(ValueError, match="tokens 2048, CUDA graphs 3072, the swap space 0"):
        memory_profile.choose_kv_cache_bytes(loaded, EngineConfig(**given, cuda_graphs=True))
    assert len(recorders) == 2
