# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from paged_kv import FullAttentionSpec, SlidingWindowSpec, get_kv_cache_groups
from paged_kv.engine import memory
from paged_kv.engine.cache_engine import CacheEngine

GIB = 2**30


def layers_of(num_layers, num_kv_heads, head_size, dtype, *, block_size=16, windows=()):
    """Specs of a model's layers; `windows`: those of the first layers, None for full attention."""
    shape = {
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "dtype": dtype,
    }
    windows = [*windows, *[None] * (num_layers - len(windows))]
    return {
        f"layer.{i}": SlidingWindowSpec(sliding_window=window, **shape)
        if window
        else FullAttentionSpec(**shape)
        for i, window in enumerate(windows)
    }


@pytest.mark.parametrize(
    ("layers", "bytes_per_token"),
    [
        # Llama-2-7B, Llama-3-8B (grouped heads), SmolLM2-135M, with their published sizes.
        (layers_of(32, 32, 128, "float16"), 524288),
        (layers_of(32, 8, 128, "bfloat16"), 131072),
        (layers_of(30, 3, 64, "float32"), 46080),
    ],
)
def test_bytes_of_a_block_of_known_models(layers, bytes_per_token):
    assert memory.bytes_per_block(get_kv_cache_groups(layers)) == 16 * bytes_per_token


def test_groups_take_turns_at_the_same_memory():
    """15 layers with a window and 3 without are 6 groups of 3."""
    layers = layers_of(18, 1, 256, "float32", windows=[512] * 15)
    groups = get_kv_cache_groups(layers)
    assert len(groups) == 6
    assert memory.bytes_per_block(groups) == 16 * 3 * 2 * 256 * 4


def plan(layers, **arguments):
    arguments = {"num_blocks": None, "max_model_len": None, "model_limit": 4096} | arguments
    return memory.plan_kv_cache(layers, max_num_batched_tokens=256, **arguments)


def test_the_longest_request_is_what_the_pool_holds_beside_the_null_block():
    layers = layers_of(2, 1, 8, "float32")
    assert plan(layers, num_blocks=11).max_model_len == 160
    assert plan(layers, num_blocks=1000).max_model_len == 4096
    assert plan(layers, num_blocks=11, max_model_len=100).max_model_len == 100


def test_a_window_needs_fewer_blocks():
    full = plan(layers_of(2, 1, 8, "float32"), num_blocks=101)
    hybrid = plan(layers_of(2, 1, 8, "float32", windows=[32]), num_blocks=101)
    assert full.max_model_len == 1600
    # Two groups; the one with the window holds it and what a step computes.
    assert 800 < hybrid.max_model_len < 1600


def test_bytes_become_blocks():
    layers = layers_of(2, 1, 8, "float32")
    block_bytes = 2 * 2 * 16 * 8 * 4
    planned = plan(layers, num_bytes=20 * block_bytes + 5)
    assert planned.block_bytes == block_bytes
    assert planned.kv_cache_config.num_blocks == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 11, "max_model_len": 161}, "at most the 160 tokens that 10 usable blocks"),
        ({"num_blocks": 11, "max_model_len": 5000}, "at most the model's 4096, got 5000"),
        ({"num_blocks": 1}, "1 KV blocks hold no request of 2 tokens"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(layers_of(2, 1, 8, "float32"), **arguments)


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
    config = plan(layers_of(2, 2, 64, "float32"), num_blocks=2**30).kv_cache_config
    with pytest.raises(MemoryError, match=r"1073741824 KV blocks take .* GiB, .* GiB are avail"):
        CacheEngine(config)
