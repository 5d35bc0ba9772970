# SPDX-License-Identifier: Apache-2.0
"""Tokenizers rebuilt from GGUF metadata give transformers' ids."""

from __future__ import annotations

import pytest
import transformers
from model._gguf_tokenizers import (
    GEMMA_CONTROL,
    GEMMA_USER_DEFINED,
    SPECIAL_TOKENS,
    USER_DEFINED,
    gemma_tokenizer_metadata,
    tokenizer_metadata,
)
from model._gguf_writing import write_gguf
from model._texts import diverse_texts
from model._tiny_models import make_tiny

from paged_kv.models.gguf_file import GgufFile
from paged_kv.models.gguf_tokenizer import tokenizer_from_gguf


@pytest.fixture(scope="module")
def tiny_model():
    return make_tiny("llama_tied")


@pytest.fixture
def write(tmp_path, tiny_model):
    def write_file(pre, *, template=None, **changes):
        path = tmp_path / "m.gguf"
        metadata = tokenizer_metadata(pre, **changes)
        write_gguf(path, tiny_model, metadata=metadata | {"tokenizer.chat_template": template})
        return path

    return write_file


def _tokenizer(path):
    return tokenizer_from_gguf(GgufFile(path))


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_token_ids_equal_transformers(write, pre):
    path = write(pre, add_bos_token=pre == "llama-bpe")
    expected = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    if pre == "qwen2":
        # Transformers' GGUF reader forgets the NFC of Qwen2's own tokenizer.json.
        import tokenizers

        expected.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    if pre == "llama-bpe":
        # ... and that Llama 3 takes a piece that is a token whole.
        expected.backend_tokenizer.model.ignore_merges = True
    ours = _tokenizer(path)
    for text in diverse_texts(200, (*SPECIAL_TOKENS[1:], USER_DEFINED)):
        ids = ours.encode(text)
        assert ids == expected(text)["input_ids"], text


def test_digits(write):
    """Llama 3 groups digits by three, Qwen2 and SmolLM take them one by one, GPT-2 a whole run."""
    pieces = {}
    for pre in ("llama-bpe", "qwen2", "smollm", "gpt-2"):
        backend = _tokenizer(write(pre))._backend
        pieces[pre] = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a 12345")]
    assert pieces == {
        "llama-bpe": ["a", "Ġ", "123", "45"],
        "qwen2": ["a", "Ġ", "1", "2", "3", "4", "5"],
        "smollm": ["a", "Ġ", "1", "2", "3", "4", "5"],
        "gpt-2": ["a", "Ġ12345"],
    }


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "first"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("gpt-2", False, False),
        ("llama-bpe", None, True),  # what Llama 3's own tokenizer does
        ("llama-bpe", False, False),
        ("qwen2", None, False),
    ],
)
def test_bos_rule(write, pre, add_bos_token, first):
    tokenizer = _tokenizer(write(pre, add_bos_token=add_bos_token))
    assert tokenizer.bos_token_id == 1
    assert (tokenizer.encode("the")[0] == 1) is first
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 1


def test_a_template_with_bos_gives_one_bos(write):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = _tokenizer(write("llama-bpe", template=template))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the fox"}])
    assert text == "<s>the fox"
    assert tokenizer.encode(text, add_special_tokens=False).count(1) == 1


def test_eos_ids_include_well_known_control_tokens(write):
    """The file names <|im_end|>; <|eot_id|> ends a turn too, by its text."""
    assert _tokenizer(write("llama-bpe")).eos_token_ids == {2, 3}
    assert _tokenizer(write("llama-bpe", eos_token_id=1, eot_token_id=3)).eos_token_ids == {1, 2, 3}


def test_kinds_of_tokens(write):
    """Control and user-defined tokens match whole in a text; only control ones are skipped."""
    tokenizer = _tokenizer(write("llama-bpe"))
    ids = tokenizer.encode(f"<|im_end|>{USER_DEFINED}the", add_special_tokens=False)
    assert ids[:2] == [2, tokenizer.vocab_size - 1]
    assert tokenizer.decode(ids) == f"{USER_DEFINED}the"


BAD = {
    "model": ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported"),
    "model of another family": (
        {"model": "llama"},
        "tokenizer.ggml.model 'llama' is not supported: .* in Gemma 3 files",
    ),
    "pre": ({"pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported"),
    "merge": ({"merges": ["q zz"]}, "'q zz' is not a merge of two tokens"),
    "merge without a space": ({"merges": ["ab"]}, "'ab' is not a merge of two tokens"),
    "tokens": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of strings"),
    "duplicate": ({"tokens": ["a", "a", "b"], "token_type": [1] * 3}, "has a token twice"),
    "types": ({"token_type": [1]}, "token_type must have one entry a token"),
    "bos": ({"bos_token_id": 9999}, "bos_token_id must be a token id, got 9999"),
    "add_bos": ({"add_bos_token": "yes"}, "add_bos_token must be a bool, got 'yes'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata_is_refused_by_name(write, case):
    changes, message = BAD[case]
    path = write(**({"pre": "gpt-2"} | changes))
    with pytest.raises(ValueError, match=message) as error:
        _tokenizer(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.fixture
def write_gemma(tmp_path):
    def write_file(**changes):
        path = tmp_path / "m.gguf"
        metadata = gemma_tokenizer_metadata(**changes)
        write_gguf(path, make_tiny("gemma3"), arch="gemma3", metadata=metadata)
        return path

    return write_file


def test_gemma_token_ids_equal_transformers(write_gemma):
    """But for BOS, which some versions of transformers' reader leave out."""
    path = write_gemma()
    expected = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    ours = _tokenizer(path)
    for text in diverse_texts(200, (*GEMMA_CONTROL[1:3], *GEMMA_USER_DEFINED, "\u2581\u2581")):
        without_bos = ours.encode(text, add_special_tokens=False)
        assert without_bos == expected(text, add_special_tokens=False)["input_ids"], text
        assert ours.encode(text) == [2, *without_bos]
        decoded = ours.decode(without_bos, skip_special_tokens=False)
        assert decoded == text.replace("\u2581", " ")


@pytest.mark.parametrize(("add_bos_token", "first"), [(None, True), (True, True), (False, False)])
def test_gemma_bos_rule(write_gemma, add_bos_token, first):
    tokenizer = _tokenizer(write_gemma(add_bos_token=add_bos_token))
    assert tokenizer.bos_token_id == 2
    assert (tokenizer.encode("the")[0] == 2) is first


def test_gemma_spaces_bytes_and_control_tokens(write_gemma):
    """No space is put before a text; what has no piece is spelt in UTF-8 bytes."""
    tokenizer = _tokenizer(write_gemma())
    tokens = gemma_tokenizer_metadata()["tokenizer.ggml.tokens"]
    first_byte = tokens.index("<0x00>")
    ids = tokenizer.encode("the   \u03a9<end_of_turn>", add_special_tokens=False)
    assert [tokens[i] for i in ids] == ["the", "   ", "<0xCE>", "<0xA9>", "<end_of_turn>"]
    assert ids[2:4] == [first_byte + 0xCE, first_byte + 0xA9]
    assert tokenizer.decode(ids) == "the   \u03a9"
    assert tokenizer.eos_token_ids == {1, tokens.index("<end_of_turn>")}


def test_gemma_vocabulary_with_a_piece_twice_is_refused(write_gemma):
    """A run of spaces is the same piece in either spelling."""
    path = write_gemma(tokens=["<pad>", "<eos>", "<bos>", "  ", "\u2581\u2581"], token_type=[3] * 5)
    with pytest.raises(ValueError, match="has a token twice"):
        _tokenizer(path)
