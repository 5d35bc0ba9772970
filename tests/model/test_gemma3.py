# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: its caches of two kinds, and the real model against transformers."""

from __future__ import annotations

import pytest
import torch
from model import _gemma3
from model._paged_runner import PagedRunner
from model._tiny_models import make_tiny

from paged_kv import get_kv_cache_groups
from paged_kv.models import RopeScaling, load_model
from paged_kv.models.hf_config import config_from_hf

PROMPT = "The capital of France is"
CONTINUATION = " the capital of the country of France. It is the largest city in France"


@pytest.fixture(scope="module")
def gemma3():
    return load_model("gemma3-270m")


def test_a_prompt_begins_with_bos(gemma3):
    """Without it the model babbles."""
    assert gemma3.tokenizer.encode(PROMPT) == [2, 818, 5279, 529, 7001, 563]


def test_short_prompt(gemma3):
    """Transformers gives this text too, for the same ids in float32."""
    runner = PagedRunner(gemma3.model, num_seqs=1, max_len=64, block_size=16)
    ids = runner.greedy(gemma3.tokenizer.encode(PROMPT), 15)
    assert gemma3.tokenizer.decode(ids) == CONTINUATION


def test_prompt_longer_than_the_window(gemma3):
    """Live against transformers: the logits of a prompt of over 512 tokens, then greedy ids.

    The prompt comes in chunks, the second one beyond the window; what has left it is forgotten.
    """
    hf_model = _gemma3.hf_model(gemma3.model.embed_tokens)
    prompt = gemma3.tokenizer.encode(_gemma3.LONG_PROMPT)
    assert len(prompt) > 600
    with torch.inference_mode():
        output = hf_model(torch.tensor([prompt]), use_cache=True, logits_to_keep=32)
        expected, expected_ids = output.logits[0], []
        last, cache = expected[-1], output[1]
        for _ in range(8):
            expected_ids.append(int(last.argmax()))
            output = hf_model(torch.tensor([expected_ids[-1:]]), None, None, cache)
            last = output.logits[0, -1]
    runner = PagedRunner(gemma3.model, num_seqs=1, max_len=len(prompt) + 8, block_size=16)
    runner.step({0: prompt[:550]}, logits_to_keep=1)
    got = runner.step({0: prompt[550:-1]}, logits_to_keep=31)[0]
    torch.testing.assert_close(got, expected[:-1], rtol=1e-3, atol=5e-3)
    assert runner.greedy(prompt[-1:], 8) == expected_ids


def test_caches_of_two_kinds(gemma3):
    """15 layers with a window and 3 without: six groups of three layers."""
    specs = gemma3.model.kv_cache_specs(16, torch.float32)
    kinds = [spec.kind for spec in specs.values()]
    assert [index for index, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11, 17]
    assert {spec.sliding_window for spec in specs.values() if spec.kind == "sliding_window"} == {
        512
    }
    groups = get_kv_cache_groups(specs)
    assert sorted((len(g.layer_names), g.kv_cache_spec.kind) for g in groups) == [
        (3, "full_attention"),
        *[(3, "sliding_window")] * 5,
    ]


BAD_CONFIGS = {
    "softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
    "bidirectional": ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not"),
    "activation": ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
    "layer types": ({"layer_types": ["chunked_attention"] * 5}, "'chunked_attention' is not supp"),
    "number of layer types": ({"layer_types": ["full_attention"]}, "expected 5 entries, got 1"),
    "no list of layer types": ({"layer_types": "full"}, "layer_types must be a list, got 'full'"),
    "local rope": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default"},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0},
            }
        },
        "sliding_attention: only rope_type default is supported",
    ),
}


@pytest.fixture
def raw_config():
    return make_tiny("gemma3").config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_unsupported_config_is_refused_by_name(raw_config, case):
    changes, message = BAD_CONFIGS[case]
    with pytest.raises(ValueError, match=message):
        config_from_hf(raw_config | changes)


def test_config_as_published(raw_config):
    """The checkpoints on the hub: flat rotary settings, and a pattern for the layers or none."""
    removed = {"layer_types", "rope_parameters", "tie_word_embeddings", "query_pre_attn_scalar"}
    published = {key: value for key, value in raw_config.items() if key not in removed}
    published |= {
        "num_hidden_layers": 8,
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = config_from_hf(published)
    assert [config.sliding_window_of(layer) for layer in range(8)] == [7] * 5 + [None] + [7] * 2
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 2e4)
    assert config.rope_scaling == RopeScaling("linear", factor=8.0)
    assert config.tie_word_embeddings
    assert config.attention_scale == 256**-0.5
    config = config_from_hf(published | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 64})
    assert [config.sliding_window_of(layer) for layer in range(8)] == [7, None] * 4
    assert config.attention_scale == 1 / 8


def test_smallest_config():
    """All that may be left out takes the values that transformers takes."""
    sizes = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
    }
    config = config_from_hf(sizes)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert (config.num_kv_heads, config.head_size, config.sliding_window) == (4, 256, 4096)
    assert config.sliding_window_of(5) is None
