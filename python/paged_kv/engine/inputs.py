# SPDX-License-Identifier: Apache-2.0
"""The forms in which a prompt may be given, checked and brought to one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    from paged_kv.models import Tokenizer

__all__ = [
    "ChatMessage",
    "EncodedPrompt",
    "PromptLike",
    "check_token_ids",
    "encode_chat",
    "encode_prompt",
    "split_prompts",
]

ChatMessage: TypeAlias = Mapping[str, str]
"""One turn of a conversation: ``{"role": "user", "content": "Hello"}``."""

PromptLike: TypeAlias = str | Sequence[int] | Mapping[str, object]
"""A text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""


class TokenEncoder(Protocol):
    """What encoding a prompt needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of ``text``."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it.

    Attributes:
        text: The text it came from, if any.
        token_ids: At least one id, each in the model's vocabulary.
    """

    text: str | None
    token_ids: Sequence[int]


def split_prompts(
    prompts: PromptLike | EncodedPrompt | Sequence[PromptLike | EncodedPrompt],
) -> list[PromptLike | EncodedPrompt]:
    """Tell one prompt from a list of prompts.

    Args:
        prompts: One prompt, or a list of them. A list that begins with a number is one prompt.

    Returns:
        The prompts, in order.

    Raises:
        TypeError: Not a prompt and not a list.

    Example:
        >>> split_prompts([1, 2, 3]), split_prompts(["a", [4]])
        ([[1, 2, 3]], ['a', [4]])
    """
    if isinstance(prompts, str | Mapping | EncodedPrompt):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        msg = f"prompts must be a string, token ids, a dict or a list of these, got {prompts!r}"
        raise TypeError(msg)
    if prompts and not isinstance(prompts[0], str | Mapping | Sequence | EncodedPrompt):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[PromptLike | EncodedPrompt]", prompts))


def encode_prompt(
    prompt: PromptLike | EncodedPrompt, tokenizer: TokenEncoder | None, vocab_size: int
) -> EncodedPrompt:
    """Check one prompt and tokenize it if it is text.

    Args:
        prompt: See :data:`PromptLike`. An encoded prompt is checked again.
        tokenizer: ``None`` if the model has none; then only token ids are accepted.
        vocab_size: Number of rows of the model's embedding.

    Raises:
        ValueError: No tokens, an id outside the vocabulary, text without a tokenizer, or a dict
            without or with both of the known keys.
        TypeError: Neither of the accepted forms.
    """
    if isinstance(prompt, Mapping):
        prompt = _content_of(prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            msg = "the model has no tokenizer: give prompts as token ids"
            raise ValueError(msg)
        prompt = EncodedPrompt(prompt, tokenizer.encode(prompt))
    if not isinstance(prompt, EncodedPrompt):
        prompt = EncodedPrompt(None, prompt)
    token_ids = check_token_ids(prompt.token_ids, vocab_size, "prompt")
    if not token_ids:
        msg = "prompt is empty: at least one token is needed"
        raise ValueError(msg)
    return EncodedPrompt(prompt.text, token_ids)


def encode_chat(
    messages: Sequence[ChatMessage], tokenizer: Tokenizer | None, vocab_size: int
) -> EncodedPrompt:
    """Turn a conversation into a prompt, by the model's chat template.

    Args:
        messages: The turns, oldest first; the model's turn is next.
        tokenizer: ``None`` if the model has none.
        vocab_size: Number of rows of the model's embedding.

    Raises:
        ValueError: The model has no tokenizer or no chat template, or refuses the messages.
    """
    if tokenizer is None:
        msg = "the model has no tokenizer: chat needs one"
        raise ValueError(msg)
    text = tokenizer.apply_chat_template(messages)
    # The template writes the special tokens itself.
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return encode_prompt(EncodedPrompt(text, tuple(token_ids)), None, vocab_size)


def check_token_ids(token_ids: object, vocab_size: int, name: str) -> tuple[int, ...]:
    """Return the ids as a tuple of int.

    Args:
        token_ids: A sequence of integers.
        vocab_size: Each id must be in ``[0, vocab_size)``.
        name: What the message calls the list.

    Raises:
        ValueError: An id is out of range.
        TypeError: Not a sequence of integers.
    """
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        msg = f"{name} must be a list of token ids, got {token_ids!r}"
        raise TypeError(msg)
    checked = []
    for position, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            msg = f"{name} must hold integers, got {token_id!r} at position {position}"
            raise TypeError(msg)
        value = operator.index(token_id)
        if not 0 <= value < vocab_size:
            msg = (
                f"{name} holds token id {value} at position {position}; "
                f"the vocabulary has {vocab_size} ids"
            )
            raise ValueError(msg)
        checked.append(value)
    return tuple(checked)


def _content_of(prompt: Mapping[str, object]) -> str | Sequence[int]:
    known = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
    if len(known) != 1 or len(prompt) != 1:
        msg = f"a prompt dict has one key, prompt or prompt_token_ids, got {list(prompt)}"
        raise ValueError(msg)
    content = prompt[known[0]]
    if isinstance(content, str) != (known[0] == "prompt"):
        expected = "a string" if known[0] == "prompt" else "a list of token ids"
        msg = f"{known[0]} must be {expected}, got {content!r}"
        raise TypeError(msg)
    return cast("str | Sequence[int]", content)
