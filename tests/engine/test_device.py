# SPDX-License-Identifier: Apache-2.0
"""The engine on another device: on the emulated CUDA kernels, and where no value can be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine.device_stand_ins import EmulatedOps, MetaSampler
from model._tiny_models import make_tiny, random_ids

from paged_kv import LLM, SamplingParams, _device_rows
from paged_kv.engine import EngineConfig, config, device, memory, memory_profile
from paged_kv.engine.inputs import EncodedPrompt
from paged_kv.models import load_model

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [random_ids(n, seed=n) for n in (20, 23, 30)]
SIZES = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
OPTIONS = {
    "roomy": {"num_blocks": 128},
    "chunks": {"num_blocks": 128, "max_num_batched_tokens": 9},
    # All prompts fit, all outputs do not.
    "recompute": {"num_blocks": 11, "max_num_batched_tokens": 16},
    "swap": {"num_blocks": 11, "max_num_batched_tokens": 16, "preemption_mode": "swap"},
    "fp8": {"num_blocks": 128, "kv_cache_dtype": "fp8"},
}
CASES = [*(("llama_untied", name) for name in OPTIONS), ("gemma3", "roomy")]
llama = pytest.mark.parametrize("folder", ["llama_untied"], indirect=True)
each_case = pytest.mark.parametrize(("folder", "name"), CASES, indirect=["folder"])


@pytest.fixture
def _emulated_ops(monkeypatch):
    """The CUDA ops in the place of the CPU's, and block tables that are sent as to a device."""
    monkeypatch.setattr(torch.ops, "paged_kv", EmulatedOps())
    monkeypatch.setattr(_device_rows, "lies_on_host", lambda _device: False)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    make_tiny(request.param).save_pretrained(path)
    return path


def generate(folder, name):
    """Tokens of two rounds, the second with prefix hits; and the engine."""
    llm = LLM(folder, **SIZES | OPTIONS[name])
    rounds = [llm.generate(PROMPTS, GREEDY) for _ in range(2)]
    hits = [output.num_cached_tokens for output in rounds[1]]
    return [[o.outputs[0].token_ids for o in outputs] for outputs in rounds], hits, llm.engine


@each_case
def test_emulated_kernels_give_the_same_tokens(folder, name, request):
    expected, *_ = generate(folder, name)
    request.getfixturevalue("_emulated_ops")
    tokens, hits, engine = generate(folder, name)
    assert tokens == expected
    is_tight = name in ("recompute", "swap")
    assert (engine.stats.num_preemptions > 0) == is_tight
    assert is_tight or all(hits)


@pytest.fixture
def _meta(monkeypatch):
    """Engines may be made on the device "meta", whose tensors have shapes and no values."""
    monkeypatch.setattr(config, "check_device", lambda _device: None)


@pytest.mark.usefixtures("_meta")
@each_case
def test_every_tensor_of_a_step_is_on_the_device(folder, name):
    """An op that is given one of another device raises."""
    loaded = load_model(folder)
    scales = None
    if name == "fp8":
        layers = loaded.model.kv_cache_specs(8, torch.float32)
        scales = {layer: (torch.ones(1), torch.ones(1)) for layer in layers}
    engine = LLM(loaded, device="meta", kv_scales=scales, **SIZES | OPTIONS[name]).engine
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    for cache in engine.cache_engine.kv_caches.values():
        tensors += [cache.key, cache.value, cache.k_scale, cache.v_scale]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    engine._sampler = MetaSampler()
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=3, n=2 - i % 2, ignore_eos=True)
        engine.add_request(str(i), EncodedPrompt(None, tuple(prompt)), params)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine._sampler.num_tokens == 3 * (2 + 1 + 2)


@llama
@pytest.mark.usefixtures("_meta")
def test_a_step_is_measured_on_the_device(folder):
    """All its tensors are there, so it takes next to nothing of the host's memory."""
    given = EngineConfig(device="meta", max_num_batched_tokens=2**16, max_model_len=512)
    loaded = load_model(folder)
    loaded.model.to("meta")
    assert memory_profile.measure_step_bytes(loaded, given) < 32 << 20


@llama
def test_an_accelerator_s_memory_is_what_torch_says(monkeypatch, folder):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (3 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(memory_profile, "measure_step_bytes", lambda *_: 1 << 30)
    monkeypatch.setattr(config, "check_device", lambda _device: None)
    assert memory.available_memory_bytes("cuda:1") == 3 << 30
    assert memory.total_memory_bytes("cuda") == 8 << 30
    assert memory.used_memory_bytes("cuda") == 5 << 30
    # The swap space is the host's.
    given = EngineConfig(device="cuda", memory_utilization=0.875, preemption_mode="swap")
    assert memory_profile.choose_kv_cache_bytes(load_model(folder), given) == 1 << 30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "device 'cuda': (this paged_kv was built without CUDA|torch .* finds 0 CUDA)"),
        ("cuda:64", "device 'cuda:64': (this paged_kv was|torch .* finds [0-9]+ CUDA devices)"),
        ("gpu", "device must be cpu, cuda or cuda:N, got 'gpu'"),
        ("meta", "device must be cpu, cuda or cuda:N, got 'meta'"),
        (None, "device must be cpu, cuda or cuda:N, got None"),
    ],
)
def test_a_device_that_there_is_not_is_refused(name, message):
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=message):
        EngineConfig(device=name)


def test_a_build_with_kernels_still_needs_a_device(monkeypatch):
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cpu", "cuda", "cuda:1"):
        device.check_device(name)
    with pytest.raises(ValueError, match=r"device .cuda:2.: torch .* finds 2 CUDA devices"):
        device.check_device("cuda:2")
    with pytest.raises(ValueError, match="kv_cache_dtype int8 needs device cpu, got 'cuda'"):
        EngineConfig(device="cuda", kv_cache_dtype="int8")


def test_arrays_reach_a_device_in_one_copy(monkeypatch):
    arrays = [
        np.arange(3, dtype=np.int64),
        np.arange(5, dtype=np.int32),
        np.zeros((0, 4), np.float32),
        np.arange(12, dtype=np.float64).reshape(3, 4)[:, ::2],
    ]
    copies = []
    to = torch.Tensor.to

    def record(tensor, *args, **kwargs):
        copies.append(tensor)
        return to(tensor, "cpu", copy=True)

    monkeypatch.setattr(torch.Tensor, "to", record)
    # Its type is not "cpu", so the copy is made; it ends up where values can be read.
    for array, tensor in zip(arrays, device.upload(arrays, torch.device("meta")), strict=True):
        assert tensor.shape == array.shape
        assert tensor.dtype == torch.from_numpy(array).dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert len(copies) == 1


def test_what_is_uploaded_lies_in_the_memory_that_is_given():
    """On a CPU too, where it shares the arrays' otherwise."""
    arrays = [np.arange(3, dtype=np.int64), np.arange(5, dtype=np.int32), np.ones(2, np.int32)]
    memory = torch.full((device.upload_bytes(arrays) + 8,), 0x7F, dtype=torch.uint8)
    first = device.upload(arrays, torch.device("cpu"), memory)
    again = device.upload([array + 1 for array in arrays], torch.device("cpu"), memory)
    for array, before, tensor in zip(arrays, first, again, strict=True):
        np.testing.assert_array_equal(before.numpy(), array + 1)
        assert before.data_ptr() == tensor.data_ptr()
        assert tensor.untyped_storage().data_ptr() == memory.data_ptr()
        assert tensor.data_ptr() % tensor.element_size() == 0
    assert (memory[-8:] == 0x7F).all()
