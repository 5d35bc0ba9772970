# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paged_kv.models.chat_template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Tokenizer"]


class Tokenizer:
    """A tokenizer with its model's special-token rules and chat template.

    `paged_kv.models.load_model` makes it. The ids are those that transformers' tokenizer gives for
    the same files.

    Args:
        backend: a ``tokenizers.Tokenizer``; its post-processor holds the BOS and EOS rule.
        bos_token_id: begin-of-sequence id, or None.
        eos_token_ids: ids that end a generation.
        chat_template: Jinja source, or None.
        special_tokens: text of the special tokens a chat template may name, e.g. ``bos_token``.

    Example:
        >>> from paged_kv.models import load_model
        >>> tokenizer = load_model("smollm2-135m").tokenizer
        >>> tokenizer.decode(tokenizer.encode("paged attention"))
        'paged attention'
    """

    def __init__(
        self,
        backend: Any,  # noqa: ANN401  (tokenizers is optional: no types without it)
        *,
        bos_token_id: int | None,
        eos_token_ids: frozenset[int],
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._chat_template_source = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._chat_template: ChatTemplate | None = None
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        # A file may ask for both; a prompt is neither cut nor filled up.
        backend.no_truncation()
        backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the model's may be larger (padding)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template."""
        return self._chat_template_source is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids.

        Special tokens written out in the text become their ids.

        Args:
            text: any text.
            add_special_tokens: add BOS (and EOS) if the model's rule says so. Pass False for text
                from `apply_chat_template`, which has them already.

        Raises:
            ValueError: `text` isn't valid Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            msg = f"text is not valid Unicode: {error}"
            raise ValueError(msg) from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text; bytes that are no valid UTF-8 become U+FFFD.

        Args:
            ids: token ids; ids without a token (a model's vocabulary may be padded) give nothing.
            skip_special_tokens: leave special tokens out.

        Raises:
            ValueError: an id is negative or over 32 bits.
        """
        ids = list(ids)
        for token_id in ids:
            if not 0 <= token_id < 2**32:
                msg = f"token id {token_id} is outside 0 .. 2**32 - 1"
                raise ValueError(msg)
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Turn a conversation into the prompt's text, special tokens included.

        Encode the result with ``add_special_tokens=False``.

        Args:
            messages: dicts with ``role`` and ``content``, oldest first.
            add_generation_prompt: end with the start of the assistant's turn.

        Raises:
            ImportError: jinja2 is not installed.
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if self._chat_template_source is None:
            msg = "the model has no chat template"
            raise ValueError(msg)
        if self._chat_template is None:
            self._chat_template = ChatTemplate(self._chat_template_source, self._special_tokens)
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)
