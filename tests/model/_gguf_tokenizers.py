# SPDX-License-Identifier: Apache-2.0
"""Small vocabularies, byte-level BPE and SentencePiece, as the metadata of a GGUF file."""

from __future__ import annotations

import functools
import json

import tokenizers
from gguf import TokenType

SPECIAL_TOKENS = ("<unk>", "<s>", "<|im_end|>", "<|eot_id|>")
USER_DEFINED = "<think>"

_CORPUS = [
    "the quick brown fox jumps over the lazy dog don't won't I'll we've",
    "a quick test of the tokenizer: 1 22 333 4444, x = y + 1;  two  spaces\n\nnew lines",
    "Grüße naïve café 日本語 Привет def f(x): return x ** 2",
] * 3


@functools.cache
def _trained() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens by id, and merges as GGUF writes them; ids of special tokens come first."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = tuple(m if isinstance(m, str) else " ".join(m) for m in model["merges"])
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return (*tokens, USER_DEFINED), merges


def tokenizer_metadata(pre: str | None, **changes) -> dict:
    """Metadata of that vocabulary; `changes` by the key's last part, None to leave a key out."""
    tokens, merges = _trained()
    types = [int(TokenType.NORMAL)] * len(tokens)
    types[0] = int(TokenType.UNKNOWN)
    types[1:4] = [int(TokenType.CONTROL)] * 3
    types[-1] = int(TokenType.USER_DEFINED)
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": list(tokens),
        "token_type": types,
        "merges": list(merges),
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


GEMMA_CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
GEMMA_USER_DEFINED = ("\n", "\n\n", "  ", "   ", "    ", "<b>")


@functools.cache
def _trained_gemma() -> tuple[str, ...]:
    """Merged pieces in the order of the merges, then single characters, as in Gemma's files."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    # Pieces of words, as a larger corpus would give.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, show_progress=False)
    tokenizer.train_from_iterator([line for text in _CORPUS for line in text.split("\n")], trainer)
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    return (
        *(token for token in tokens if len(token) > 1 and token.strip("\u2581")),
        *(token for token in tokens if len(token) == 1),
    )


def gemma_tokenizer_metadata(**changes) -> dict:
    """Metadata of a vocabulary like Gemma's, without merges; `changes` as above."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    by_type = {
        TokenType.CONTROL: GEMMA_CONTROL,
        TokenType.USER_DEFINED: GEMMA_USER_DEFINED,
        TokenType.BYTE: byte_tokens,
        TokenType.NORMAL: _trained_gemma(),
    }
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": [token for tokens in by_type.values() for token in tokens],
        "scores": [-float(i) for tokens in by_type.values() for i in range(len(tokens))],
        "token_type": [int(kind) for kind, tokens in by_type.items() for _ in tokens],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
        "add_bos_token": True,
        "add_space_prefix": False,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}
