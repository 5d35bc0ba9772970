# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from paged_kv.engine import memory
from paged_kv.engine.cache_engine import CacheEngine
from paged_kv.models import ModelConfig

GIB = 2**30


def config_of(num_layers, num_heads, num_kv_heads, head_size):
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=num_heads * head_size,
        intermediate_size=64,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=4096,
    )


@pytest.mark.parametrize(
    ("config", "dtype", "bytes_per_token"),
    [
        # Llama-2-7B, Llama-3-8B (grouped heads), SmolLM2-135M, with their published sizes.
        (config_of(32, 32, 32, 128), torch.float16, 524288),
        (config_of(32, 32, 8, 128), torch.bfloat16, 131072),
        (config_of(30, 9, 3, 64), torch.float32, 46080),
    ],
)
def test_bytes_of_a_block_of_known_models(config, dtype, bytes_per_token):
    assert memory.bytes_per_block(config, 16, dtype) == 16 * bytes_per_token


@pytest.mark.parametrize(
    ("available", "blocks_per_sequence", "expected_mib"),
    [
        (8 * GIB, 10, 819),  # a tenth
        (100 * GIB, 10, 2048),  # never more than 2 GiB ...
        (100 * GIB, 3000, 3001),  # ... unless a sequence needs it,
        (4 * GIB, 3000, 2048),  # and that at most to half of the memory
        (0, 10, 2),
    ],
)
def test_default_on_a_cpu_is_bounded(monkeypatch, available, blocks_per_sequence, expected_mib):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda device: available)
    assert memory.default_num_blocks(2**20, blocks_per_sequence) == expected_mib


def test_available_memory_needs_no_accelerator():
    available = memory.available_memory_bytes()
    assert 2**20 < available < 2**50
    assert memory.available_memory_bytes(torch.device("cpu")) > 2**20


def test_a_container_limit_that_is_nearer_counts(monkeypatch, tmp_path):
    limit, usage = tmp_path / "max", tmp_path / "current"
    usage.write_text("1000000\n")
    monkeypatch.setattr(memory, "_CGROUP_FILES", ((str(limit), str(usage)),))
    whole = memory.available_memory_bytes()
    for text, expected in (("5000000\n", 4000000), ("500000\n", 0)):
        limit.write_text(text)
        assert memory.available_memory_bytes() == expected
    for text in ("max\n", str(2**63 - 4096)):
        limit.write_text(text)
        assert memory.available_memory_bytes() > whole // 2


def test_caches_beyond_the_memory_are_refused_before_they_are_allocated():
    config = config_of(2, 2, 2, 64)
    with pytest.raises(MemoryError, match=r"1073741824 KV blocks take .* GiB, .* GiB are avail"):
        CacheEngine(config, num_blocks=2**30, block_size=16, dtype=torch.float32)
