# SPDX-License-Identifier: Apache-2.0
"""GGUF files give the same model as the weights they were written from; bad ones a clear error."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from model._gguf_writing import write_gguf
from model._paged_runner import PagedRunner
from model._tiny_models import hf_logits, make_tiny, random_ids

from paged_kv.models import load_model
from paged_kv.models.gguf_config import config_from_gguf
from paged_kv.models.gguf_file import GgufFile

# What the tiny model has otherwise than all published ones.
MORE_KEYS = {"gemma3": {"gemma3.attention.sliding_window_pattern": 3}}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def _logits(path, ids, dtype=torch.float32):
    model = load_model(path, dtype=dtype).model
    return PagedRunner(model, num_seqs=1, max_len=len(ids)).step({0: ids})[0]


@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        ("llama_untied", "llama"),  # grouped queries: q and k rows move by their own head counts
        ("llama_tied", "llama"),  # no output.weight
        ("llama_one_kv_head", "llama"),
        ("llama_biases", "llama"),  # biases move with their rows
        ("mistral", "llama"),  # llama.cpp writes Mistral as llama
        ("qwen2", "qwen2"),  # rows stay
        ("qwen3", "qwen3"),
        ("gemma3", "gemma3"),  # norm weights lie one higher
    ],
)
def test_same_weights_as_the_folder(tmp_path, variant, arch):
    """Not only the logits: each parameter is bit for bit the one of the folder."""
    hf_model = make_tiny(variant)
    hf_model.save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "m.gguf", hf_model, arch=arch, metadata=MORE_KEYS.get(variant))
    expected = load_model(tmp_path / "folder").model.state_dict()
    got = load_model(tmp_path / "m.gguf").model.state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name
    ids = random_ids(20)
    torch.testing.assert_close(
        _logits(tmp_path / "m.gguf", ids), hf_logits(hf_model, ids), **TOLERANCE
    )


def test_llama3_rope_comes_as_a_tensor_of_factors(tmp_path):
    """llama.cpp stores what llama3 scaling divides each frequency by."""
    hf_model = make_tiny("llama_llama3_rope")
    plain = 1.0 / 500.0 ** (np.arange(0, 32, 2, dtype=np.float32) / 32)
    factors = plain / hf_model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() == pytest.approx(8.0)
    write_gguf(tmp_path / "m.gguf", hf_model, extra_tensors={"rope_freqs.weight": factors})
    ids = random_ids(60)
    torch.testing.assert_close(
        _logits(tmp_path / "m.gguf", ids), hf_logits(hf_model, ids), rtol=1e-3, atol=1e-3
    )


def test_linear_rope(tmp_path):
    hf_model = make_tiny("llama_linear_rope")
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "m.gguf", hf_model, metadata=scaling)
    ids = random_ids(20)
    torch.testing.assert_close(
        _logits(tmp_path / "m.gguf", ids), hf_logits(hf_model, ids), **TOLERANCE
    )


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_the_packages_dequantised_ones(tmp_path, name):
    quantization = gguf.GGMLQuantizationType[name]
    hf_model = make_tiny("qwen2")
    write_gguf(tmp_path / "m.gguf", hf_model, arch="qwen2", quantization=quantization)
    with torch.no_grad():
        for parameter in hf_model.parameters():
            if parameter.dim() == 2:
                packed = gguf.quantize(parameter.numpy(), quantization)
                parameter.copy_(torch.from_numpy(gguf.dequantize(packed, quantization).copy()))
    ids = random_ids(20)
    torch.testing.assert_close(
        _logits(tmp_path / "m.gguf", ids), hf_logits(hf_model, ids), **TOLERANCE
    )


def test_large_tensors_are_dequantised_in_pieces(tmp_path):
    """Pieces of any size join to the whole; rows are never cut."""
    write_gguf(
        tmp_path / "m.gguf", make_tiny("llama_tied"), quantization=gguf.GGMLQuantizationType.Q8_0
    )
    file = GgufFile(tmp_path / "m.gguf")
    whole = list(file.read_rows("token_embd.weight"))
    pieces = list(file.read_rows("token_embd.weight", max_elements=200))
    assert len(whole) == 1
    assert {len(piece) for piece in pieces} == {3, 1}
    assert np.array_equal(np.concatenate(pieces), whole[0])


def test_a_file_in_parts(tmp_path):
    """Joined in the given order, wherever it was cut."""
    write_gguf(tmp_path / "m.gguf", make_tiny("llama_tied"))
    data = (tmp_path / "m.gguf").read_bytes()
    cuts = [0, 5, 777, len(data) // 2, len(data)]
    parts = [tmp_path / f"{i}.part" for i in range(4)]
    for path, start, end in zip(parts, cuts, cuts[1:], strict=False):
        path.write_bytes(data[start:end])
    whole, joined = GgufFile(tmp_path / "m.gguf"), GgufFile(*parts)
    assert (joined.metadata, joined.tensors) == (whole.metadata, whole.tensors)
    for name in whole.tensors:
        (got,), (expected,) = joined.read_rows(name), whole.read_rows(name)
        assert np.array_equal(got, expected)
    with pytest.raises(ValueError, match=r"0\.part: not a valid GGUF file"):
        GgufFile(*parts[:-1])


def test_bfloat16(tmp_path):
    write_gguf(tmp_path / "m.gguf", make_tiny("llama_tied"))
    model = load_model(tmp_path / "m.gguf", dtype=torch.bfloat16).model
    assert model.embed_tokens.dtype == torch.bfloat16
    assert model.rotary_emb.inv_freq.dtype == torch.float32


def test_unrelated_tensors_are_skipped(tmp_path):
    """Heads for other tasks and further layers change nothing that this model computes."""
    extra = {
        "blk.2.nextn.eh_proj.weight": np.ones((4, 4), np.float32),
        "cls.weight": np.ones((4, 4), np.float32),
    }
    write_gguf(tmp_path / "m.gguf", make_tiny("llama_tied"), extra_tensors=extra)
    load_model(tmp_path / "m.gguf")


BAD_FILES = {
    "missing tensor": (
        {"skip": ["blk.1.ffn_down.weight"]},
        r"tensor 'model.layers.1.mlp.down_proj.weight' is missing",
    ),
    "missing embedding": (
        {"skip": ["token_embd.weight"]},
        r"tensor 'token_embd.weight' is missing",
    ),
    "misshapen tensor": (
        {
            "skip": ["blk.0.ffn_up.weight"],
            "extra_tensors": {"blk.0.ffn_up.weight": np.ones((96, 32), np.float32)},
        },
        r"'model.layers.0.mlp.up_proj.weight' has shape \[96, 32\], expected \[96, 64\]",
    ),
    "unknown tensor in a layer": (
        {"extra_tensors": {"blk.1.attn_sinks.weight": np.ones(4, np.float32)}},
        r"'model.layers.1.attn_sinks.weight' is not part of the supported architectures",
    ),
    "missing key": (
        {"metadata": {"llama.block_count": None}},
        "metadata llama.block_count is missing",
    ),
    "key of another type": (
        {"metadata": {"llama.block_count": "two"}},
        "llama.block_count must be of type int, got 'two'",
    ),
    "head count a layer": (
        {"metadata": {"llama.attention.head_count_kv": [2, 1]}},
        "llama.attention.head_count_kv must be of type int",
    ),
    "absurd layer count": (
        {"metadata": {"llama.block_count": 2**23}},
        "8388608 layers are announced, but there are only",
    ),
    "absurd width": (
        {"metadata": {"llama.embedding_length": 2**31}},
        "hidden_size must be an int from 1",
    ),
    "no heads": (
        {"metadata": {"llama.attention.head_count": 0}},
        "llama.attention.head_count must be positive",
    ),
    "rope scaling": (
        {"metadata": {"llama.rope.scaling.type": "yarn"}},
        "llama.rope.scaling.type 'yarn' is not supported",
    ),
    "partial rope": (
        {"metadata": {"llama.rope.dimension_count": 16}},
        "llama.rope.dimension_count: only the head size, 32, is supported, got 16",
    ),
    "experts": (
        {"metadata": {"llama.expert_count": 8}},
        "llama.expert_count: mixtures of experts are not supported",
    ),
    "sliding window": (
        {"metadata": {"llama.attention.sliding_window": 64}},
        "llama.attention.sliding_window is not supported",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_refused_by_name(tmp_path, case):
    path = tmp_path / "bad.gguf"
    changes, message = BAD_FILES[case]
    write_gguf(path, make_tiny("llama_tied"), **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_model(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_other_architectures_are_refused_by_name(tmp_path):
    write_gguf(tmp_path / "m.gguf", make_tiny("llama_tied"), arch="gemma2")
    with pytest.raises(ValueError, match="architecture 'gemma2' is not supported: llama, qwen2, q"):
        load_model(tmp_path / "m.gguf")


def test_a_file_without_tokenizer_has_none(tmp_path):
    write_gguf(tmp_path / "m.gguf", make_tiny("llama_tied"))
    loaded = load_model(tmp_path / "m.gguf")
    assert loaded.tokenizer is None
    assert loaded.eos_token_ids == frozenset()


BAD_GEMMA3_FILES = {
    "softcap": ({"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping is not supp"),
    "no window": ({"gemma3.attention.sliding_window": None}, "sliding_window is missing"),
    "pattern": ({"gemma3.attention.sliding_window_pattern": 0}, "sliding_window_pattern must be"),
}


@pytest.mark.parametrize("case", BAD_GEMMA3_FILES)
def test_bad_gemma3_file_is_refused_by_name(tmp_path, case):
    metadata, message = BAD_GEMMA3_FILES[case]
    write_gguf(tmp_path / "m.gguf", make_tiny("gemma3"), arch="gemma3", metadata=metadata)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "m.gguf")


def test_gemma3_defaults_and_settings(tmp_path):
    """Files leave out the pattern of the layers and the base of the local frequencies."""
    path, hf_model = tmp_path / "m.gguf", make_tiny("gemma3")
    write_gguf(path, hf_model, arch="gemma3")
    config = config_from_gguf(GgufFile(path))
    assert [config.sliding_window_of(layer) for layer in range(5)] == [7] * 5
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    settings = {"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 500.0}
    metadata = {f"gemma3.{key}": value for key, value in settings.items()}
    write_gguf(path, hf_model, arch="gemma3", metadata=metadata)
    config = config_from_gguf(GgufFile(path))
    assert [config.sliding_window_of(layer) for layer in range(5)] == [7, None, 7, None, 7]
    assert config.local_rope_theta == 500.0
