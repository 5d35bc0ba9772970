# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import mmap
import subprocess
import sys

import pytest
import torch
from engine.memory_use import MemoryUse

from paged_kv.engine import EngineConfig, memory, memory_profile

ONE = torch.ones(1)


def config(**arguments):
    arguments = {"max_num_seqs": 8, "max_model_len": 512} | arguments
    return EngineConfig(**arguments)


MEASURE = """
import sys
from paged_kv.engine import EngineConfig, memory_profile
from paged_kv.models import load_model

loaded = load_model(sys.argv[1])
for num_tokens in (64, 65536):
    config = EngineConfig(max_num_seqs=8, max_model_len=512, max_num_batched_tokens=num_tokens)
    print(memory_profile.measure_step_bytes(loaded, config))
"""


def test_a_larger_step_takes_more(tiny_llama, tmp_path):
    """In a process of its own: one that has memory free takes no more for a step."""
    tiny_llama.reference.save_pretrained(tmp_path)
    output = subprocess.check_output([sys.executable, "-c", MEASURE, tmp_path], text=True)
    small, large = map(int, output.split())
    # 65,536 tokens: at least a tensor of gate and up, 50 MB.
    assert large - small > 0.8 * 65536 * 2 * 96 * 4


def test_measuring_leaves_the_model_as_it_is(tiny_llama):
    prompt = list(range(20))
    before = tiny_llama.llm().generate(prompt)[0].outputs[0].token_ids
    memory_profile.measure_step_bytes(tiny_llama.loaded, config())
    assert tiny_llama.llm().generate(prompt)[0].outputs[0].token_ids == before


def test_the_cache_gets_what_is_left(tiny_llama, monkeypatch):
    monkeypatch.setattr(memory_profile, "total_memory_bytes", lambda _device: 10 << 30)
    monkeypatch.setattr(memory_profile, "used_memory_bytes", lambda _device: 1 << 30)
    monkeypatch.setattr(memory_profile, "measure_step_bytes", lambda *_: 2 << 30)
    given = config(memory_utilization=0.5)
    assert memory_profile.choose_kv_cache_bytes(tiny_llama.loaded, given) == 2 << 30
    with pytest.raises(ValueError, match=r"memory_utilization 0\.2 is 2048 MiB: model and process"):
        memory_profile.choose_kv_cache_bytes(tiny_llama.loaded, config(memory_utilization=0.2))


def test_sizes_that_are_given_win(tiny_llama):
    for given in (config(num_blocks=7, memory_utilization=0.5), config()):
        assert memory_profile.choose_kv_cache_bytes(tiny_llama.loaded, given) is None
    given = config(kv_cache_memory_bytes=1000, memory_utilization=0.5)
    assert memory_profile.choose_kv_cache_bytes(tiny_llama.loaded, given) == 1000


def test_an_engine_takes_the_bytes_that_it_is_given(tiny_llama):
    llm = tiny_llama.llm(num_blocks=None, kv_cache_memory_bytes=1 << 20)
    block_bytes = llm.engine.cache_engine.num_bytes // llm.engine.cache_engine.num_blocks
    assert (1 << 20) - block_bytes < llm.engine.cache_engine.num_bytes <= 1 << 20


@pytest.mark.parametrize(
    ("sizes", "takes_all"),
    [
        ({"num_blocks": 8192}, True),
        ({"num_blocks": None, "kv_cache_memory_bytes": 64 << 20}, True),
        ({"num_blocks": None}, False),
    ],
)
def test_memory_of_a_given_size_is_taken_at_once(tiny_llama, monkeypatch, sizes, takes_all):
    monkeypatch.setattr(memory, "default_num_blocks", lambda *_: 8192)
    before = MemoryUse.now()
    llm = tiny_llama.llm(**sizes)
    num_bytes = llm.engine.cache_engine.num_bytes
    assert num_bytes > 32 << 20
    taken = (MemoryUse.now() - before).resident_bytes
    assert taken > num_bytes / 2 if takes_all else taken < num_bytes / 2


def test_an_engine_profiles_where_a_share_is_given(tiny_llama, monkeypatch):
    monkeypatch.setattr(memory_profile, "total_memory_bytes", lambda _device: 64 << 30)
    monkeypatch.setattr(memory_profile, "used_memory_bytes", lambda _device: 0)
    monkeypatch.setattr(memory_profile, "measure_step_bytes", lambda *_: (64 << 30) - (3 << 20))
    llm = tiny_llama.llm(num_blocks=None, memory_utilization=1.0)
    assert 2 << 20 < llm.engine.cache_engine.num_bytes <= 3 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_len": 2000}, "max_model_len must be at most the model's 1024, got 2000"),
        ({"kv_scales": {"layer": (ONE, ONE)}, "kv_cache_dtype": "int8"}, "has no layer 'layer'"),
        ({"kv_scales": {}}, "kv_scales are those of a quantised cache"),
    ],
)
def test_plain_mistakes_are_told_before_anything_is_measured(
    tiny_llama, monkeypatch, arguments, message
):
    def refuse(*_, **_options):
        pytest.fail("this takes seconds")

    monkeypatch.setattr(memory_profile, "measure_step_bytes", refuse)
    monkeypatch.setattr(tiny_llama.loaded.model, "prepare_weights", refuse)
    with pytest.raises(ValueError, match=message):
        tiny_llama.llm(num_blocks=None, memory_utilization=1.0, **arguments)


def test_a_container_limit_counts_as_the_memory(monkeypatch, tmp_path):
    limit, usage = tmp_path / "max", tmp_path / "current"
    usage.write_text("1000000\n")
    limit.write_text("5000000\n")
    monkeypatch.setattr(memory, "_CGROUP_FILES", ((str(limit), str(usage)),))
    assert memory.total_memory_bytes() == 5000000


def test_the_resident_set_is_what_a_process_uses():
    """In pages of their own: malloc may give out freed ones, which are resident already."""
    before = memory.used_memory_bytes()
    with mmap.mmap(-1, 256 << 20) as pages:
        for offset in range(0, len(pages), mmap.PAGESIZE):
            pages[offset] = 1
        assert memory.used_memory_bytes() - before > 128 << 20
