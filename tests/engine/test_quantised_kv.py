# SPDX-License-Identifier: Apache-2.0
"""Quantised caches behind the engine: scales, and how near the results are."""

from __future__ import annotations

import pytest
import torch
from model._tiny_models import make_tiny, random_ids

from paged_kv import SamplingParams
from paged_kv._cache_panels import as_nhd
from paged_kv.engine.kv_scales import (
    _largest_of_heads,
    calibrate_kv_scales,
    load_kv_scales,
    save_kv_scales,
)
from paged_kv.kv_cache import KVCache
from paged_kv.metadata import AttentionMetadata
from paged_kv.models import load_model
from paged_kv.testing import to_layout

PROMPT = torch.randint(0, 199, (60,), generator=torch.Generator().manual_seed(5)).tolist()
DTYPES = ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def prompt_logprobs(llm):
    (output,) = llm.generate(PROMPT, PARAMS)
    positions = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return torch.tensor([position[token].logprob for position, token in positions])


@pytest.fixture(scope="module")
def exact(tiny_llama):
    return prompt_logprobs(tiny_llama.llm())


@pytest.mark.parametrize("kv_cache_dtype", DTYPES)
def test_scales_of_a_calibration_keep_the_results_near(tiny_llama, exact, kv_cache_dtype):
    scales = calibrate_kv_scales(tiny_llama.loaded, kv_cache_dtype, [PROMPT])
    llm = tiny_llama.llm(kv_cache_dtype=kv_cache_dtype, kv_scales=scales)
    near = (prompt_logprobs(llm) - exact).abs().mean()
    wrong = {name: (k * 40, v * 40) for name, (k, v) in scales.items()}
    far_llm = tiny_llama.llm(kv_cache_dtype=kv_cache_dtype, kv_scales=wrong)
    far = (prompt_logprobs(far_llm) - exact).abs().mean()
    assert 0 < near < (0.6 if kv_cache_dtype == "fp8_e5m2" else 0.3)
    # The precision of fp8 hardly depends on the scale.
    assert far > near if kv_cache_dtype == "int8" else far > 0


def test_a_quantised_cache_takes_a_quarter_of_the_memory(tiny_llama):
    exact_bytes = tiny_llama.llm().engine.cache_engine.num_bytes
    assert tiny_llama.llm(kv_cache_dtype="int8").engine.cache_engine.num_bytes * 4 == exact_bytes


def test_scales_are_those_of_the_largest_key_and_value_of_each_head(tiny_llama):
    scales = calibrate_kv_scales(tiny_llama.loaded, "int8", [PROMPT[:20], PROMPT])
    llm = tiny_llama.llm(enable_prefix_caching=False)
    llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1))
    for name, cache in llm.engine.cache_engine.kv_caches.items():
        for scale, tensor in zip(scales[name], (cache.key, cache.value), strict=True):
            largest = as_nhd(tensor).abs().amax(dim=(0, 1, 3))
            assert torch.all(scale * 127 >= largest)
            torch.testing.assert_close(scale, largest * 1.1 / 127, rtol=0.3, atol=0)


def test_the_largest_of_each_head_is_found_in_any_layout():
    cache = torch.randn(4, 16, 2, 32)
    block_ids, num_tokens = [3, 1], 20
    expected = cache[block_ids].flatten(0, 1)[:20].abs().amax((0, 2))
    for layout in ("nhd", "hnd", "panels"):
        for is_key in (True, False):
            laid_out = to_layout(cache, layout, is_key=is_key)
            assert torch.equal(_largest_of_heads(laid_out, block_ids, num_tokens), expected)


def test_without_scales_the_engine_finds_some(tiny_llama, exact):
    llm = tiny_llama.llm(kv_cache_dtype="int8")
    assert (prompt_logprobs(llm) - exact).abs().mean() < 0.5
    cache = next(iter(llm.engine.cache_engine.kv_caches.values()))
    assert cache.k_scale.shape == (2,)
    assert torch.all(cache.k_scale != 1)


def test_scales_survive_a_file(tiny_llama, tmp_path):
    scales = calibrate_kv_scales(tiny_llama.loaded, "fp8", [PROMPT])
    save_kv_scales(tmp_path / "scales.json", scales)
    loaded = load_kv_scales(tmp_path / "scales.json")
    assert loaded.keys() == scales.keys()
    for name, pair in scales.items():
        for before, after in zip(pair, loaded[name], strict=True):
            assert torch.equal(before, after)


def test_layers_of_other_groups_have_no_part_in_a_scale(tmp_path):
    """They use the same memory, in other blocks."""
    make_tiny("gemma3", seed=3).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    prompt = random_ids(60)
    scales = calibrate_kv_scales(loaded, "int8", [prompt], block_size=4)
    caches = [
        KVCache(*torch.zeros(2, 1, len(prompt), loaded.config.num_kv_heads, 32))
        for _ in range(loaded.config.num_layers)
    ]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, len(prompt)], dtype=torch.int32),
        seq_lens=torch.tensor([len(prompt)], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(len(prompt)),
        max_query_len=len(prompt),
        max_seq_len=len(prompt),
    )
    ids = torch.tensor(prompt)
    loaded.model(ids, torch.arange(len(prompt)), caches, [metadata] * len(caches))
    for layer, cache in enumerate(caches):
        pair = scales[f"model.layers.{layer}.self_attn"]
        for scale, tensor in zip(pair, (cache.key, cache.value), strict=True):
            largest = tensor.abs().amax(dim=(0, 1, 3))
            torch.testing.assert_close(scale, largest * 1.1 / 127, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"model.layers.9.self_attn": (torch.ones(1), torch.ones(1))}, "no layer 'model.layers.9"),
        ({"model.layers.0.self_attn": (torch.ones(3), torch.ones(1))}, "takes 1 scale or 2"),
    ],
)
def test_scales_that_do_not_fit_the_model_are_refused(tiny_llama, scales, message):
    with pytest.raises(ValueError, match=message):
        tiny_llama.llm(kv_cache_dtype="int8", kv_scales=scales)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}x", '{"a": {"k_scale": [1]}}', '{"a": {"k_scale": [0], "v_scale": [1]}}']
)
def test_a_file_that_holds_no_scales_is_refused(tmp_path, text):
    path = tmp_path / "scales.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"scales\.json: not a file of scales"):
        load_kv_scales(path)


def test_wrong_arguments_are_refused(tiny_llama):
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of fp8"):
        calibrate_kv_scales(tiny_llama.loaded, "auto", [PROMPT])
    with pytest.raises(ValueError, match="prompts must be lists of at least one token"):
        calibrate_kv_scales(tiny_llama.loaded, "int8", [[]])
