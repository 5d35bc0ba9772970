# SPDX-License-Identifier: Apache-2.0
"""The turns of a chat, kept within the length that the model can take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paged_kv.engine.inputs import EncodedPrompt
    from paged_kv.engine.llm import ChatMessage

__all__ = ["Conversation"]


class Conversation:
    """A system message, if any, and pairs of what the user and the model have said.

    Args:
        encode: Turns messages into a prompt.
        max_prompt_tokens: Longer prompts are made shorter by forgetting the oldest turns.
        system: Text of the system message, ``None`` or empty for none.

    Attributes:
        system: As given; may be changed.
        num_turns: Pairs that are remembered.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[ChatMessage]], EncodedPrompt],
        max_prompt_tokens: int,
        system: str | None,
    ) -> None:
        self.system = system
        self._encode = encode
        self._max_prompt_tokens = max_prompt_tokens
        self._turns: list[tuple[str, str]] = []

    @property
    def num_turns(self) -> int:
        """Pairs of messages that are remembered."""
        return len(self._turns)

    def reset(self) -> None:
        """Forget all turns, but not the system message."""
        self._turns.clear()

    def prompt(self, text: str) -> EncodedPrompt:
        """The prompt for the answer to ``text``; forgets the oldest turns if it is too long.

        Then it forgets enough for a quarter to be free: what follows a message that is gone is
        not in the prefix cache any more, and that should not happen in every turn.
        """
        prompt = self._encode(self._messages(text, self._turns))
        if len(prompt.token_ids) <= self._max_prompt_tokens:
            return prompt
        turns = self._turns
        while turns and len(prompt.token_ids) > self._max_prompt_tokens * 3 // 4:
            turns = turns[1:]
            prompt = self._encode(self._messages(text, turns))
        # A message that is too long alone will be refused: no reason to forget what was said.
        if len(prompt.token_ids) <= self._max_prompt_tokens:
            self._turns = turns
        return prompt

    def add_turn(self, text: str, answer: str) -> None:
        """Remember what was said and answered."""
        self._turns.append((text, answer))

    def _messages(self, text: str, turns: list[tuple[str, str]]) -> list[ChatMessage]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for said, answered in turns:
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": answered})
        return [*messages, {"role": "user", "content": text}]
