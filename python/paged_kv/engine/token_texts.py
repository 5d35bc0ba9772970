# SPDX-License-Identifier: Apache-2.0
"""The text of single tokens, as it stands in its context."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.engine.detokenizer import TokenDecoder

__all__ = ["TokenTexts"]

_REPLACEMENT = "\ufffd"


class TokenTexts:
    """Decodes single tokens that may stand at a position, special tokens included.

    The text is what the token adds to the tokens before it. That keeps a leading space, which
    some tokenizers strip from a token that stands alone, and gives the whole character to the
    token that ends it; a token that leaves a character incomplete has no text.

    Cost: two short decodes; one dictionary lookup for a token met before, unless it is part of a
    character.

    Args:
        tokenizer: The model's tokenizer.

    Source:
        Rules: vLLM 0.32 ``v1/engine/logprobs.py::LogprobsProcessor``.

    Example:
        >>> class Utf8:
        ...     def decode(self, ids, *, skip_special_tokens=True):
        ...         return bytes(ids).decode("utf-8", errors="replace")
        >>> first, second = "é".encode()
        >>> texts = TokenTexts(Utf8())
        >>> texts.decode(first, b"n"), texts.decode(second, [*b"n", first])
        ('', 'é')
    """

    NUM_CONTEXT_TOKENS = 4
    """Tokens before a token that may matter: a character has at most 4 bytes."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def decode(self, token_id: int, context: Sequence[int]) -> str:
        """The text that a token adds.

        Args:
            token_id: The token.
            context: The tokens before it, oldest first. Only the last four are read.
        """
        if token_id in self._known:
            return self._known[token_id]
        before = self._decode(context[-1:])
        text = self._added_text(token_id, context[-1:], before)
        if _REPLACEMENT not in text:
            # Without a token before it a leading space may be missing, and after an incomplete
            # character the text may hold that character.
            if before and not before.endswith(_REPLACEMENT):
                self._known[token_id] = text
            return text
        for num_tokens in range(2, min(len(context), self.NUM_CONTEXT_TOKENS) + 1):
            longer = context[-num_tokens:]
            whole = self._added_text(token_id, longer, self._decode(longer))
            if _REPLACEMENT not in whole:
                return whole
        return "" if text.endswith(_REPLACEMENT) else text

    def _added_text(self, token_id: int, context: Sequence[int], before: str) -> str:
        whole = self._decode([*context, token_id])
        if not whole.startswith(before):
            # The token ended a character that stood there as replacements.
            before = before.rstrip(_REPLACEMENT)
        return whole[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
