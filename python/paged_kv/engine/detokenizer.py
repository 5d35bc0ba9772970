# SPDX-License-Identifier: Apache-2.0
"""Turns a stream of token ids into text, piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Detokenizer", "StopStringFinder", "TokenDecoder"]

_REPLACEMENT = "\ufffd"
# A character of UTF-8 that is still incomplete has at most 3 bytes, and a token that adds text
# has at least one: so the character begins in one of the last 3 tokens.
_MAX_TOKENS_OF_INCOMPLETE_CHARACTER = 3
# Tokens decoded along with a new one: those of an incomplete character and one before them.
_NUM_CONTEXT_TOKENS = 4
_MAX_WINDOW_TOKENS = 8


class TokenDecoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``."""


class Detokenizer:
    """Decodes the output of one request incrementally.

    Text is given out as soon as later tokens cannot change it: only a tail that may be the
    beginning of a character is held back. The pieces of :meth:`append` and :meth:`flush` joined
    equal ``tokenizer.decode(all ids)``.

    Decoders are not linear: what a token decodes to depends on its neighbours (leading spaces,
    characters split over tokens). So a new token is decoded together with a few tokens before it
    (the window), and what was given out of the window's text already is cut off.

    One exception: a run of ``<0xNN>`` byte tokens that turns invalid after a valid beginning.
    Decoded at once, the ``tokenizers`` library replaces all of the run, also characters that a
    stream has given out long before.

    Cost: a constant number of decodes, of at most 8 tokens, per token.

    Example:
        >>> class Utf8:
        ...     def decode(self, ids, *, skip_special_tokens=True):
        ...         return bytes(ids).decode("utf-8", errors="replace")
        >>> detokenizer = Detokenizer(Utf8())
        >>> [detokenizer.append(byte) for byte in "né".encode()]
        ['n', '', 'é']
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        # Characters of the window's text that were given out.
        self._num_given = 0
        # Tokens since the text last ended on a complete character.
        self._num_incomplete = 0

    def append(self, token_id: int) -> str:
        """Add one token; return the text that is now certain, empty inside a character."""
        if self._is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_certain = self._count_certain_characters(text)
        piece = text[self._num_given : num_certain]
        self._num_given = max(self._num_given, num_certain)
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._shorten_window(num_held=len(text) - self._num_given)
        return piece

    def flush(self) -> str:
        """Return what is still held back, with replacement characters for cut characters."""
        piece = self._decode(self._window)[self._num_given :]
        self._num_given += len(piece)
        return piece

    def _is_silent(self, token_id: int) -> bool:
        """Whether the token never adds text, like a special token that is skipped.

        Such tokens are dropped: they may stand inside a character and would push its first bytes
        out of the window. The token is tried twice since a lone leading space is stripped.
        """
        return self._decode([token_id, token_id]) == ""

    def _count_certain_characters(self, text: str) -> int:
        if not text.endswith(_REPLACEMENT):
            self._num_incomplete = 0
            return len(text)
        self._num_incomplete += 1
        if self._num_incomplete <= _MAX_TOKENS_OF_INCOMPLETE_CHARACTER:
            return self._num_given
        # Bytes that are no text, or tokens that straddle characters. Each incomplete or invalid
        # sequence decodes to one replacement character, and only the last can still grow.
        return len(text) - 1

    def _shorten_window(self, num_held: int) -> None:
        # What is held lies in the tokens that stay. A character cut in two at the window's
        # beginning does no harm: only the length of the text before the held part counts.
        self._window = self._window[-_NUM_CONTEXT_TOKENS:]
        self._num_given = max(len(self._decode(self._window)) - num_held, 0)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class StopStringFinder:
    """Looks for stop strings in text that arrives in pieces.

    :meth:`append` never gives out text that may turn out to be part of a stop string, so the
    pieces joined are the final text, without the stop string.

    Cost: per piece, one search of the piece and of as many characters as the longest stop string
    has.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._num_held = max((len(s) for s in stop), default=1) - 1
        self._held = ""

    def append(self, piece: str) -> tuple[str, str | None]:
        """Add a piece.

        Returns:
            The text that can be given out, and the stop string found or ``None``. Of several
            stop strings the one that begins first counts, the longest of those.
        """
        text = self._held + piece
        hits = [(text.find(s), -len(s), s) for s in self._stop if s in text]
        if hits:
            start, _, stop_string = min(hits)
            self._held = ""
            return text[:start], stop_string
        cut = max(len(text) - self._num_held, 0)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Return the text still held back, when the request ends for another reason."""
        text, self._held = self._held, ""
        return text
