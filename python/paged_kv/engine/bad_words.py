# SPDX-License-Identifier: Apache-2.0
"""Words that may not come out: as token ids, and which token would complete one now."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from paged_kv.engine.inputs import check_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.engine.inputs import TokenEncoder

__all__ = ["BadWordMatcher", "encode_bad_words"]


def encode_bad_words(
    bad_words: Sequence[str], tokenizer: TokenEncoder, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word as it stands at the beginning of a text and after a space.

    The form after a space counts only if it has as many tokens and begins with another one: then
    the space is part of the first token. Otherwise it ends in the same tokens, or would ban the
    space itself.

    Args:
        bad_words: Words; white space before them is dropped, unless it is all there is.
        tokenizer: The model's tokenizer.
        vocab_size: Each id must be in ``[0, vocab_size)``.

    Returns:
        Token sequences, each with at least one id.

    Raises:
        ValueError: A word has no tokens, or one outside of the model's vocabulary.

    Source:
        vLLM 0.32 ``vllm/sampling_params.py::SamplingParams.update_from_tokenizer``.
    """
    sequences = []
    for word in bad_words:
        stripped = word.lstrip() or word
        first = tokenizer.encode(stripped, add_special_tokens=False)
        if not first:
            msg = f"bad_words: {word!r} has no tokens"
            raise ValueError(msg)
        sequences.append(check_token_ids(first, vocab_size, f"bad_words: {word!r}"))
        spaced = tokenizer.encode(" " + stripped, add_special_tokens=False)
        if len(spaced) == len(first) and spaced[0] != first[0]:
            sequences.append(check_token_ids(spaced, vocab_size, f"bad_words: {word!r}"))
    return tuple(sequences)


class BadWordMatcher:
    """Finds the tokens that would complete a word of several tokens.

    Args:
        sequences: What :func:`encode_bad_words` returns.

    Attributes:
        single_token_ids: Words of one token: these may never come out.

    Example:
        >>> matcher = BadWordMatcher([(9,), (1, 2, 3), (2, 4)])
        >>> matcher.single_token_ids, matcher.completing_token_ids([7, 1, 2], 0)
        ((9,), [3, 4])
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.single_token_ids = tuple(ids[0] for ids in sequences if len(ids) == 1)
        # By the token before the last: most steps compare nothing.
        self._by_previous: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for ids in sequences:
            if len(ids) > 1:
                self._by_previous[ids[-2]].append((list(ids[:-1]), ids[-1]))

    def completing_token_ids(self, token_ids: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Last tokens of the words whose other tokens the output ends with.

        Args:
            token_ids: Prompt and output.
            num_prompt_tokens: A word has to lie in the output.
        """
        if len(token_ids) == num_prompt_tokens:
            return []
        candidates = self._by_previous.get(token_ids[-1], ())
        return [
            last
            for prefix, last in candidates
            if len(prefix) <= len(token_ids) - num_prompt_tokens
            and list(token_ids[-len(prefix) :]) == prefix
        ]
