# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: shards, tokenizer rules, and an error that names what is wrong."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from model._gguf_tokenizers import SPECIAL_TOKENS, tokenizer_metadata
from model._gguf_writing import write_gguf
from model._texts import diverse_texts
from model._tiny_models import make_tiny
from safetensors.torch import load_file, save_file

from paged_kv.models import load_model
from paged_kv.models.gguf_file import GgufFile
from paged_kv.models.gguf_tokenizer import tokenizer_from_gguf
from paged_kv.models.hf_config import config_from_hf


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model with a tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("saved")
    hf_model = make_tiny("llama_untied")
    hf_model.save_pretrained(folder)
    gguf_path = folder.parent / "tokenizer.gguf"
    write_gguf(gguf_path, hf_model, metadata=tokenizer_metadata("gpt-2"))
    tokenizer_from_gguf(GgufFile(gguf_path))._backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def _edit(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def test_shards_give_the_same_weights(saved, tmp_path):
    make_tiny("llama_untied").save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = load_model(saved).model.state_dict()
    for name, tensor in load_model(tmp_path).model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


class TestTokenizer:
    def test_ids_equal_transformers(self, folder):
        _edit(
            folder / "tokenizer_config.json",
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token="<s>",
            eos_token="<|im_end|>",
        )
        expected = transformers.AutoTokenizer.from_pretrained(folder)
        ours = load_model(folder).tokenizer
        for text in diverse_texts(200, SPECIAL_TOKENS):
            ids = ours.encode(text)
            assert ids == expected(text)["input_ids"], text
            assert ours.decode(ids) == expected.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )

    @pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
    @pytest.mark.parametrize("in_file", [True, False])
    def test_bos_rule_equals_transformers(self, folder, flags, in_file):
        """The rule is the one in tokenizer.json; the flags beside it decide nothing."""
        if in_file:
            rule = {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
            }
            _edit(folder / "tokenizer.json", post_processor=rule)
        _edit(
            folder / "tokenizer_config.json",
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token={"content": "<s>", "__type": "AddedToken"},
            eos_token="<|im_end|>",
            **flags,
        )
        expected = transformers.AutoTokenizer.from_pretrained(folder)
        ours = load_model(folder).tokenizer
        assert ours.encode("the fox") == expected("the fox")["input_ids"]
        assert ours.bos_token_id == 1

    def test_eos_ids_are_all_that_the_files_name(self, folder):
        """generation_config.json replaces config.json's; the tokenizer's own is added."""
        _edit(folder / "config.json", eos_token_id=9)
        _edit(folder / "generation_config.json", eos_token_id=[5, 7])
        _edit(folder / "tokenizer_config.json", eos_token="<|eot_id|>")
        loaded = load_model(folder)
        assert loaded.eos_token_ids == loaded.tokenizer.eos_token_ids == {5, 7, 3}
        (folder / "generation_config.json").unlink()
        assert load_model(folder).eos_token_ids == {9, 3}

    @pytest.mark.parametrize("place", ["config", "named", "file"])
    def test_chat_template_is_found(self, folder, place):
        source = "{{ bos_token }}{{ messages[0].content }}"
        if place == "file":
            (folder / "chat_template.jinja").write_text(source)
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]
        template = {"config": source, "named": named, "file": ...}[place]
        _edit(folder / "tokenizer_config.json", bos_token="<s>", chat_template=template)
        tokenizer = load_model(folder).tokenizer
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"

    def test_padding_and_truncation_of_the_file_are_off(self, folder):
        _edit(
            folder / "tokenizer.json",
            truncation={
                "direction": "Right",
                "max_length": 2,
                "strategy": "LongestFirst",
                "stride": 0,
            },
        )
        assert len(load_model(folder).tokenizer.encode("the quick brown fox jumps")) > 2

    def test_a_folder_without_tokenizer_has_none(self, folder):
        (folder / "tokenizer.json").unlink()
        assert load_model(folder).tokenizer is None

    def test_corrupt_tokenizer(self, folder):
        (folder / "tokenizer.json").write_text('{"version": "1.0"')
        with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable tokenizer"):
            load_model(folder)


class TestWeights:
    def _change(self, folder, change):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    def test_missing_tensor(self, folder):
        self._change(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
        with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is miss"):
            load_model(folder)

    def test_misshapen_tensor(self, folder):
        self._change(folder, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
        with pytest.raises(ValueError, match=r"norm\.weight' has shape \[63\], expected \[64\]"):
            load_model(folder)

    def test_integer_tensor(self, folder):
        integers = torch.ones(64, dtype=torch.int8)
        self._change(folder, lambda t: t.update({"model.norm.weight": integers}))
        with pytest.raises(ValueError, match=r"'model\.norm\.weight' has dtype I8"):
            load_model(folder)

    @pytest.mark.parametrize(
        "name", ["model.layers.0.self_attn.q_proj.bias", "model.norm.bias", "lm_head.bias"]
    )
    def test_tensor_that_would_change_the_result(self, folder, name):
        self._change(folder, lambda t: t.update({name: torch.ones(64)}))
        with pytest.raises(ValueError, match=f"{name}' is not part of the supported architect"):
            load_model(folder)

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.2.self_attn.q_proj.weight",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "score.weight",
        ],
    )
    def test_tensor_that_changes_nothing_is_skipped(self, folder, name):
        self._change(folder, lambda t: t.update({name: torch.ones(3)}))
        load_model(folder)

    def test_stored_copy_of_a_tied_head_is_skipped(self, folder):
        _edit(folder / "config.json", tie_word_embeddings=True)
        loaded = load_model(folder)
        assert loaded.model.lm_head is None

    def test_pickles_are_never_read(self, folder):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"only pickle weights \(pytorch_model\.bin\)"):
            load_model(folder)

    def test_no_weights(self, folder):
        (folder / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"no model\.safetensors and no model\.safetensors\.i"):
            load_model(folder)

    def test_missing_shard(self, tmp_path):
        make_tiny("llama_untied").save_pretrained(tmp_path, max_shard_size="50KB")
        shard = min(tmp_path.glob("*.safetensors"))
        shard.unlink()
        with pytest.raises(ValueError, match=shard.name):
            load_model(tmp_path)

    def test_shard_without_a_promised_tensor(self, folder):
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        index = {"weight_map": {"model.nothing": "a.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"'model\.nothing', promised by .* is missing"):
            load_model(folder)

    @pytest.mark.parametrize("file", ["../a.safetensors", "/etc/a.safetensors", "a.bin", 3])
    def test_index_may_not_leave_the_folder(self, folder, file):
        (folder / "model.safetensors").unlink()
        index = {"weight_map": {"model.norm.weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="not a safetensors file of the folder"):
            load_model(folder)


BAD_CONFIGS = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported"),
    "no architecture": ({"architectures": ...}, "architectures is missing"),
    "missing key": ({"hidden_size": ...}, "hidden_size must be an int, got None"),
    "type": ({"num_hidden_layers": "2"}, "num_hidden_layers must be an int, got '2'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: silu is"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "head ratio": ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    "odd head": ({"head_dim": 31}, "head_size must be even"),
    "layers": ({"num_hidden_layers": 2**22}, "4194304 layers are announced, but there are only"),
    "negative": ({"vocab_size": -1}, "vocab_size must be an int from 1 to"),
    "eps": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list"),
    "yarn": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "rope scaling 'yarn' is not supported: linear and llama3 are",
    ),
    "old rope key": (
        {"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope scaling 'dynamic' is not supported",
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
    "mixed layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types: only full_attention is supported",
    ),
    "qwen window": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
        "use_sliding_window: a window in some layers only is not supported",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config_is_refused_by_name(folder, case):
    changes, message = BAD_CONFIGS[case]
    _edit(folder / "config.json", **changes)
    # A layer count can only be judged beside the tensors: that error names the folder.
    with pytest.raises(ValueError, match=message) as error:
        load_model(folder)
    assert str(error.value).startswith(str(folder))
    if case != "layers":
        assert "config.json: " in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"a": ' * 5000])
def test_config_that_is_no_json_object(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"config\.json: (not a readable JSON|expected a JSON obj)"
    ):
        load_model(folder)


def test_missing_config(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: not a readable JSON file: No such file"):
        load_model(tmp_path)


def test_both_spellings_of_rope_settings_are_read(saved):
    raw = json.loads((saved / "config.json").read_text())
    raw.pop("rope_parameters")
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = config_from_hf(raw | {"rope_theta": 500000.0, "rope_scaling": llama3})
    new = config_from_hf(raw | {"rope_parameters": llama3 | {"rope_theta": 500000.0}})
    assert old == new
    assert (old.rope_theta, old.rope_scaling.factor) == (500000.0, 8.0)
    assert config_from_hf(raw).rope_scaling is None
