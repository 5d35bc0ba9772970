# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a SentencePiece BPE from the vocabulary of a GGUF file, which has no merges."""

from __future__ import annotations

from typing import Any

from paged_kv.models.optional import import_optional

__all__ = ["gemma_bpe", "gemma_pieces"]

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space


def gemma_pieces(tokens: list[str]) -> list[str]:
    """Spell tokens as SentencePiece does.

    The file has runs of spaces, which are tokens of their own, as they are; all other spaces it
    spells as SentencePiece does.
    """
    return [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]


def gemma_bpe(pieces: list[str], unk_token: str | None) -> Any:  # noqa: ANN401  (tokenizers is optional: no types without it)
    """Build the tokenizer of a Gemma model.

    Text is not cut before merging, a space is a character like others, and what has no token is
    spelt in bytes.

    Args:
        pieces: The vocabulary by id, as `gemma_pieces` spells it, no piece twice.
        unk_token: The piece for what can't be spelt.

    Returns:
        A ``tokenizers.Tokenizer`` without special tokens.

    Notes:
        Cost: one look at each way to cut each piece in two; about two seconds for 262,144 pieces.

    Source:
        transformers 5 models/gemma/tokenization_gemma.py (the steps) and its GGUF reader, whose ids
        these are.
    """
    tokenizers = import_optional("tokenizers", "to build a tokenizer")
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab, _merges(vocab), unk_token=unk_token, fuse_unk=True, byte_fallback=True
        )
    )
    backend.normalizer = tokenizers.normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    steps = tokenizers.decoders
    backend.decoder = steps.Sequence(
        [steps.Replace(_SPACE, " "), steps.ByteFallback(), steps.Fuse()]
    )
    return backend


def _merges(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """All ways to make a piece of two pieces, best first.

    SentencePiece makes the piece of the lowest id first. (Ids, not scores: user-defined pieces have
    none.) Between two ways to make a piece it takes the leftmost; a list can't say that, and like
    transformers we put the longer left part first.
    """
    return [
        (left, right)
        for piece in vocab
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
    ]
