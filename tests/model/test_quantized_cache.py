# SPDX-License-Identifier: Apache-2.0
"""Decoders over a quantised cache give what transformers gives on the quantised keys and values."""

from __future__ import annotations

import pytest
import torch
import transformers
from model._paged_runner import PagedRunner
from model._tiny_models import make_tiny, random_ids

from paged_kv.kv_cache import KVCache, kv_cache_dtype_str_to_dtype
from paged_kv.models import load_model
from paged_kv.reference import dequantize_kv, quantize_kv

KV_CACHE_DTYPES = ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
# Far apart, by side and by head: a swap of any two shows.
SCALES = {
    "per_tensor": (torch.tensor([0.11]), torch.tensor([0.03])),
    "per_head": (torch.tensor([0.11, 0.24]), torch.tensor([0.03, 0.055])),
}


class QuantizingCache(transformers.DynamicCache):
    """Hands attention what a quantised cache would hold, element by element."""

    def __init__(self, kv_cache_dtype: str, scales: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.kv_cache_dtype = kv_cache_dtype
        self.scales = scales

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        sides = [
            dequantize_kv(
                quantize_kv(states, self.kv_cache_dtype, scale, head_dim=1),
                self.kv_cache_dtype,
                scale,
                head_dim=1,
            )
            for states, scale in zip((key_states, value_states), self.scales, strict=True)
        ]
        return super().update(*sides, layer_idx, *args, **kwargs)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    hf_model = make_tiny("qwen3")
    folder = tmp_path_factory.mktemp("qwen3")
    hf_model.save_pretrained(folder)
    return hf_model, load_model(folder).model


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
def test_logits(pair, kv_cache_dtype, scales):
    """Prefill, then decode; a wrong scale, side or format is off by more than 6 %."""
    hf_model, model = pair
    ids = random_ids(26)
    runner = PagedRunner(
        model, num_seqs=1, max_len=26, kv_cache_dtype=kv_cache_dtype, scales=scales
    )
    logits = [runner.step({0: ids[:20]})[0]]
    logits += [runner.step({0: [token]})[0] for token in ids[20:]]
    cache = QuantizingCache(kv_cache_dtype, scales)
    with torch.inference_mode():
        # By place: the argument's name differs between versions of transformers.
        expected = hf_model(torch.tensor([ids]), None, None, cache).logits[0]
    got = torch.cat(logits)
    # Not nearer: an element beside a rounding boundary falls to the other side of it.
    assert (got - expected).norm() < 0.01 * expected.norm()


def test_element_types():
    given = {name: kv_cache_dtype_str_to_dtype(name, torch.bfloat16) for name in KV_CACHE_DTYPES}
    assert given == dict.fromkeys(KV_CACHE_DTYPES[:3], torch.uint8) | {"int8": torch.int8}
    assert kv_cache_dtype_str_to_dtype("auto", torch.bfloat16) == torch.bfloat16
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of auto, fp8, .* got 'int4'"):
        kv_cache_dtype_str_to_dtype("int4", torch.float32)


def test_caches_do_not_share_their_default_scales():
    """A calibration that writes to one layer's scales must not change another's."""
    first, second = (KVCache(torch.empty(0), torch.empty(0)) for _ in range(2))
    scales = {id(s) for c in (first, second) for s in (c.k_scale, c.v_scale)}
    assert len(scales) == 4


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *KV_CACHE_DTYPES])
def test_specs(pair, kv_cache_dtype):
    model = pair[1]
    specs = model.kv_cache_specs(16, torch.bfloat16, kv_cache_dtype)
    assert list(specs) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    element_bytes = 2 if kv_cache_dtype == "auto" else 1
    for spec in specs.values():
        assert spec.kind == "full_attention"
        assert spec.page_size_bytes == 2 * 16 * 2 * 32 * element_bytes


def test_a_window_gives_sliding_window_specs(tmp_path):
    make_tiny("mistral_sliding_window").save_pretrained(tmp_path)
    specs = load_model(tmp_path).model.kv_cache_specs(16, torch.float32).values()
    assert [(spec.kind, spec.sliding_window) for spec in specs] == [("sliding_window", 7)] * 2
