# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paged_kv.models.gguf_config import CONTROL_TOKEN_TYPE, eos_token_ids
from paged_kv.models.gguf_sentencepiece import gemma_bpe, gemma_pieces
from paged_kv.models.optional import import_optional
from paged_kv.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paged_kv.models.gguf_file import GgufFile

__all__ = ["tokenizer_from_gguf"]

_USER_DEFINED_TOKEN_TYPE = 4

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3 takes digits in groups of up to three, Qwen2 one by one; else they are the same.
_LLAMA3_SPLIT, _QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a byte-level BPE vocabulary cuts text before merging.

    Attributes:
        splits: regular expressions, applied one after the other to the pieces so far.
        ignore_merges: a piece that is a token is taken whole.
        normalize_nfc: compose characters first.
        add_bos: the BOS rule of files that don't say.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    normalize_nfc: bool = False
    add_bos: bool = False


_LLAMA3 = _PreTokenizer((_LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
_GPT2 = _PreTokenizer((_GPT2_SPLIT,))
# By tokenizer.ggml.pre. Source: the tokenizer.json of the models themselves, and llama.cpp
# src/llama-vocab.cpp, which maps the names.
_PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenizer((_QWEN2_SPLIT,), normalize_nfc=True),
    "deepseek-r1-qwen": _PreTokenizer((_QWEN2_SPLIT,), normalize_nfc=True),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2_SPLIT)),
    "gpt-2": _GPT2,
    "default": _GPT2,
}
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer | None:
    """Build the tokenizer that a GGUF file describes.

    Byte-level BPE ("gpt2") vocabularies are supported, with the pre-tokenizers of GPT-2, SmolLM,
    Llama 3 and Qwen2, and the SentencePiece ("llama") vocabularies of Gemma 3. Control tokens
    become special tokens, user-defined ones added tokens.

    Returns:
        None if the file has no tokenizer.

    Raises:
        ImportError: the library tokenizers is not installed.
        ValueError: a kind of tokenizer that isn't supported, or metadata that doesn't fit together.
            The message names the file.
    """
    if "tokenizer.ggml.model" not in file.metadata:
        return None
    try:
        return _tokenizer(file)
    except ValueError as error:
        msg = f"{file.path}: {error}"
        raise ValueError(msg) from None


def _tokenizer(file: GgufFile) -> Tokenizer:
    metadata = file.metadata
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        msg = "tokenizer.ggml.token_type must have one entry a token"
        raise ValueError(msg)
    ids = {key: _token_id(metadata, id_key, tokens) for key, id_key in _SPECIAL_TOKENS.items()}

    model = metadata["tokenizer.ggml.model"]
    if model == "gpt2":
        pre_tokenizer = _pre_tokenizer(metadata)
        merges = _strings(metadata, "tokenizer.ggml.merges")
        backend = _byte_level_bpe(tokens, merges, pre_tokenizer)
        adds_bos = pre_tokenizer.add_bos
    elif model == "llama" and metadata.get("general.architecture") == "gemma3":
        pieces = gemma_pieces(tokens)
        _check_distinct(pieces)
        unk_token_id = ids["unk_token"]
        backend = gemma_bpe(pieces, None if unk_token_id is None else pieces[unk_token_id])
        adds_bos = True
    else:
        msg = (
            f"tokenizer.ggml.model {model!r} is not supported: gpt2 (byte-level BPE) is, and "
            "llama (SentencePiece) in Gemma 3 files"
        )
        raise ValueError(msg)
    _add_tokens(backend, tokens, types)
    _set_rule(backend, metadata, tokens, ids, adds_bos=adds_bos)
    chat_template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_token_id=ids["bos_token"],
        eos_token_ids=eos_token_ids(file),
        chat_template=chat_template if isinstance(chat_template, str) else None,
        special_tokens={key: tokens[i] for key, i in ids.items() if i is not None},
    )


def _pre_tokenizer(metadata: dict[str, Any]) -> _PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        msg = f"tokenizer.ggml.pre {name!r} is not supported: {', '.join(_PRE_TOKENIZERS)} are"
        raise ValueError(msg)
    return _PRE_TOKENIZERS[name]


def _check_distinct(tokens: list[str]) -> None:
    if len(set(tokens)) != len(tokens):
        msg = "tokenizer.ggml.tokens has a token twice"
        raise ValueError(msg)


def _byte_level_bpe(tokens: list[str], merges: list[str], pre_tokenizer: _PreTokenizer) -> Any:  # noqa: ANN401  (tokenizers is optional: no types without it)
    tokenizers = import_optional("tokenizers", "to build a tokenizer")
    _check_distinct(tokens)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = []
    for merge in merges:
        # The space that parts the two is never the first character.
        rest, space, right = merge[1:].partition(" ")
        left = merge[:1] + rest
        if not space or not {left, right, left + right} <= vocab.keys():
            msg = f"tokenizer.ggml.merges: {merge!r:.80} is not a merge of two tokens into a token"
            raise ValueError(msg)
        pairs.append((left, right))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, pairs, ignore_merges=pre_tokenizer.ignore_merges)
    )
    if pre_tokenizer.normalize_nfc:
        backend.normalizer = tokenizers.normalizers.NFC()
    steps = tokenizers.pre_tokenizers
    backend.pre_tokenizer = steps.Sequence(
        [steps.Split(tokenizers.Regex(split), "isolated") for split in pre_tokenizer.splits]
        + [steps.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _add_tokens(backend: Any, tokens: list[str], types: list[Any]) -> None:  # noqa: ANN401
    """Make control and user-defined tokens match whole in a text."""
    tokenizers = import_optional("tokenizers", "to build a tokenizer")
    vocab = backend.get_vocab(with_added_tokens=False)
    for wanted, special in ((CONTROL_TOKEN_TYPE, True), (_USER_DEFINED_TOKEN_TYPE, False)):
        added = [
            tokenizers.AddedToken(token, special=special, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            # Not those that the vocabulary spells otherwise: merges make them.
            if token_type == wanted and token in vocab
        ]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def _set_rule(
    backend: Any,  # noqa: ANN401
    metadata: dict[str, Any],
    tokens: list[str],
    ids: dict[str, int | None],
    *,
    adds_bos: bool,
) -> None:
    wanted = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    for key, value in wanted.items():
        if not isinstance(value, bool):
            msg = f"tokenizer.ggml.add_{key} must be a bool, got {value!r:.80}"
            raise ValueError(msg)  # noqa: TRY004  (the file is bad, not an argument)
    bos, eos = (
        (tokens[token_id], token_id) if wanted[key] and (token_id := ids[key]) is not None else None
        for key in ("bos_token", "eos_token")
    )
    pieces = [bos[0] if bos else None, "$A", eos[0] if eos else None]
    tokenizers = import_optional("tokenizers", "to build a tokenizer")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=[piece for piece in pieces if piece is not None],
        special_tokens=list({token for token in (bos, eos) if token is not None}),
    )


def _token_id(metadata: dict[str, Any], key: str, tokens: list[str]) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        msg = f"tokenizer.ggml.{key} must be a token id, got {token_id!r:.80}"
        raise ValueError(msg)
    return token_id


def _strings(metadata: dict[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        msg = f"{key} must be a list of strings"
        raise ValueError(msg)
    return values
