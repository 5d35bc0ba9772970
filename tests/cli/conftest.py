# SPDX-License-Identifier: Apache-2.0
"""A tiny model in a folder, and the command run on it in this process."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.cli import main

VOCAB_SIZE = 260


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("byte_llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE - 1,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture
def generate(model, capsys):
    """Run ``paged-kv generate`` in this process; return (status, stdout, stderr)."""

    def run(*arguments, prompts=("hello",)):
        argv = ["generate", "--model", str(model), "--num-blocks", "64", "--max-tokens", "8"]
        for prompt in prompts:
            argv += ["--prompt", prompt]
        status = main([*argv, *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
