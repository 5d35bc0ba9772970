# SPDX-License-Identifier: Apache-2.0
"""Specs, groups of layers, and how many blocks fit: as vLLM computes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paged_kv import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    estimate_max_model_len,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_max_concurrency_for_kv_cache_config,
    unify_kv_cache_spec_page_size,
)

DATA = Path(__file__).parents[1] / "data/kv_cache_sizing.json.gz"
SPECS = {
    "full": FullAttentionSpec,
    "window": SlidingWindowSpec,
    "chunked": ChunkedLocalAttentionSpec,
}
KINDS = {cls: kind for kind, cls in SPECS.items()}
SHAPE = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


def recorded_cases():
    with gzip.open(DATA, "rt", encoding="ascii") as file:
        return json.load(file)


def make_layers(records):
    layers = {}
    for name, record in records.items():
        arguments = {key: value for key, value in record.items() if key != "kind"}
        layers[name] = SPECS[record["kind"]](**arguments)
    return layers


def describe(spec):
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {"uniform": {name: describe(s) for name, s in spec.kv_cache_specs.items()}}
    result = {
        "kind": KINDS[type(spec)],
        "block_size": spec.block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "page": spec.page_size_bytes,
    }
    optional = ("sliding_window", "attention_chunk_size", "extra_retained_tokens")
    for name in (*optional, "page_size_padded"):
        if getattr(spec, name, None):
            result[name] = getattr(spec, name)
    return result


def describe_groups(groups):
    return [[group.layer_names, describe(group.kv_cache_spec)] for group in groups]


def describe_config(config):
    return {
        "num_blocks": config.num_blocks,
        "groups": describe_groups(config.kv_cache_groups),
        "tensors": [
            [t.size, t.layers, t.layer_stride, t.block_stride, t.offset]
            for t in config.kv_cache_tensors
        ],
    }


def compute(case):
    """What vLLM's record has, computed here."""
    limits = {"max_model_len": case["max_model_len"], "max_in_flight_tokens": case["in_flight"]}
    workers = [make_layers(worker) for worker in case["workers"]]
    result = {}
    try:
        configs = get_kv_cache_configs(
            workers,
            case["memory"],
            **limits,
            num_gpu_blocks_override=case["override"],
            prefix_cache_retention_interval=case["retention"],
            num_prefill_lookahead_tokens=case["lookahead"],
            disable_hybrid_kv_cache_manager=case["disable_hybrid"],
        )
    except ValueError:
        result["error"] = "ValueError"
    else:
        scheduler = generate_scheduler_kv_cache_config(configs)
        result["configs"] = [describe_config(config) for config in configs]
        result["scheduler"] = describe_config(scheduler)
        result["concurrency"] = get_max_concurrency_for_kv_cache_config(scheduler, **limits)
    layers = {name: spec for worker in workers for name, spec in worker.items()}
    try:
        groups = get_kv_cache_groups(layers, disable_hybrid_kv_cache_manager=case["disable_hybrid"])
    except ValueError:
        result["groups_error"] = True
    else:
        result["groups"] = describe_groups(groups)
        result["max_len"] = [
            estimate_max_model_len(groups, **limits, available_memory=memory)
            for memory in case["memory"]
        ]
    return result


def test_groups_blocks_and_places_are_those_of_vllm():
    cases = recorded_cases()
    for i, record in enumerate(cases):
        expected = record["result"]
        expected.pop("msg", None)
        if "groups_error" in expected:
            expected["groups_error"] = True
        assert compute(record["case"]) == expected, i
    assert sum("error" in record["result"] for record in cases) >= 5
    assert sum("configs" in record["result"] for record in cases) >= 20


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "float16", np.dtype("float16")])
def test_a_page_holds_keys_and_values_of_its_tokens(dtype):
    spec = FullAttentionSpec(**{**SHAPE, "dtype": dtype})
    assert spec.page_size_bytes == 2 * 16 * 8 * 128 * 2
    assert spec.unpadded_page_size_bytes == spec.page_size_bytes


def test_values_may_be_smaller_and_pages_larger():
    spec = FullAttentionSpec(**SHAPE, head_size_v=64, page_size_padded=1 << 20)
    assert spec.unpadded_page_size_bytes == 16 * 8 * (128 + 64) * 2
    assert spec.page_size_bytes == 1 << 20
    assert (spec.head_size_v, spec.page_size_padded) == (64, 1 << 20)


@pytest.mark.parametrize(
    ("spec", "num_blocks"),
    [
        (FullAttentionSpec(**SHAPE), 63),
        (SlidingWindowSpec(**SHAPE, sliding_window=100), 12),
        (SlidingWindowSpec(**SHAPE, sliding_window=100, extra_retained_tokens=20), 13),
        (SlidingWindowSpec(**SHAPE, sliding_window=5000), 64),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=100), 11),
    ],
)
def test_most_blocks_of_a_request(spec, num_blocks):
    used = spec.max_memory_usage_bytes(max_model_len=1000, max_in_flight_tokens=64)
    assert used == num_blocks * spec.page_size_bytes


def test_specs_are_compared_by_value():
    assert FullAttentionSpec(**SHAPE) == FullAttentionSpec(**SHAPE)
    assert hash(FullAttentionSpec(**SHAPE)) == hash(FullAttentionSpec(**SHAPE))
    assert FullAttentionSpec(**SHAPE) != FullAttentionSpec(**SHAPE, sliding_window=5)
    assert SlidingWindowSpec(**SHAPE, sliding_window=5) != FullAttentionSpec(**SHAPE)
    assert FullAttentionSpec(**SHAPE) != 3
    assert FullAttentionSpec(**SHAPE).copy_with_new_block_size(32).block_size == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size"),
        ({"num_kv_heads": -1}, "num_kv_heads"),
        ({"head_size": 2**40}, "head_size"),
        ({"head_size": 2**31, "num_kv_heads": 2**31}, "too large"),
        ({"dtype": "int64"}, "dtype"),
        ({"page_size_padded": 10}, "page_size_padded"),
        ({"sliding_window": 4, "attention_chunk_size": 4}, "both"),
    ],
)
def test_bad_specs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FullAttentionSpec(**{**SHAPE, **arguments})


def test_bad_windows_and_chunks_are_refused():
    with pytest.raises(ValueError, match="sliding_window"):
        SlidingWindowSpec(**SHAPE, sliding_window=0)
    with pytest.raises(ValueError, match="extra_retained_tokens"):
        SlidingWindowSpec(**SHAPE, sliding_window=1, extra_retained_tokens=-1)
    with pytest.raises(ValueError, match="attention_chunk_size"):
        ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=0)


def test_a_group_needs_a_spec():
    with pytest.raises(TypeError):
        KVCacheGroupSpec(["layer.0"], None)


def test_a_page_that_is_padded_already_cannot_be_made_larger_by_its_block():
    layers = {
        "a": FullAttentionSpec(**SHAPE, page_size_padded=1 << 18),
        "b": FullAttentionSpec(**{**SHAPE, "head_size": 1024}),
    }
    assert layers["b"].page_size_bytes == 1 << 19
    with pytest.raises(ValueError, match="layer a"):
        unify_kv_cache_spec_page_size(layers)


def test_workers_must_agree():
    one = {"a": FullAttentionSpec(**SHAPE)}
    other = {"a": FullAttentionSpec(**SHAPE, sliding_window=5)}
    limits = {"max_model_len": 64, "max_in_flight_tokens": 64}
    with pytest.raises(ValueError, match="differ in the spec of layer a"):
        get_kv_cache_configs([one, other], [10**9, 10**9], **limits)
    with pytest.raises(ValueError, match="available_memory"):
        get_kv_cache_configs([one], [10**9, 10**9], **limits)
    with pytest.raises(ValueError, match="equally many blocks"):
        generate_scheduler_kv_cache_config([KVCacheConfig(n, [], []) for n in (1, 2)])


def test_a_model_without_attention_has_the_null_block_alone():
    (config,) = get_kv_cache_configs([{}], [10**9], max_model_len=64, max_in_flight_tokens=64)
    assert (config.num_blocks, config.kv_cache_groups) == (1, [])
