# SPDX-License-Identifier: Apache-2.0
"""``paged-kv chat``: answers on stdout, everything else on stderr."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import signal
import sys
import time
from typing import TYPE_CHECKING

from paged_kv.cli.conversation import Conversation
from paged_kv.cli.options import engine_options, sampling_params
from paged_kv.cli.stdout import write
from paged_kv.engine import AsyncLLM
from paged_kv.models.optional import import_optional

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rich.console import Console

    from paged_kv.engine import RequestOutput, SamplingParams
    from paged_kv.engine.inputs import EncodedPrompt

__all__ = ["chat"]

_HELP = """\
/system TEXT  tell the model how to behave; without TEXT: not any more
/reset        forget what was said
/stats        tokens, speed and what came from the prefix cache
/exit         leave, as does Ctrl-D
Ctrl-C        interrupt an answer; the model remembers what it has said"""


def chat(arguments: argparse.Namespace) -> int:
    """Run the command with parsed arguments; return the exit status.

    Raises:
        ValueError: A mistake of the user, or a model without a chat template.
        OSError: A file that cannot be read.
        ImportError: A library that is not installed.
        KeyboardInterrupt: Ctrl-C, where stdin is not a terminal.
    """
    if sys.stdin is None:  # closed by the caller: `<&-` in a shell
        msg = "stdin is closed"
        raise ValueError(msg)
    # Each answer draws a seed from the engine's, else all would use the same random numbers.
    params = dataclasses.replace(sampling_params(arguments), seed=None)
    import_optional("rich", "to talk")
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    llm = AsyncLLM(arguments.model, **engine_options(arguments))
    loop = asyncio.new_event_loop()
    try:
        _Chat(llm, params, arguments.system, console, loop).run()
    finally:
        loop.run_until_complete(llm.shutdown())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    return 0


@dataclasses.dataclass(slots=True)
class _Answer:
    """What has come of an answer so far; times in seconds."""

    text: str = ""
    num_tokens: int = 0
    result: RequestOutput | None = None
    started: float = dataclasses.field(default_factory=time.perf_counter)
    first_token: float = 0.0
    last_token: float = 0.0

    def describe(self) -> str:
        text = f"{self.num_tokens} tokens, the first after {self.first_token:.2f} s"
        seconds = self.last_token - self.first_token
        if seconds > 0:
            text += f", then {(self.num_tokens - 1) / seconds:.1f} tokens/s"
        return text


class _Chat:
    def __init__(
        self,
        llm: AsyncLLM,
        params: SamplingParams,
        system: str | None,
        console: Console,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        # Room for an answer, but never more than half of what there is.
        room = llm.max_model_len // 2
        if params.max_tokens is not None:
            room = min(room, params.max_tokens)
        self._llm = llm
        self._params = params
        self._console = console
        self._loop = loop
        self._conversation = Conversation(llm.encode_chat, llm.max_model_len - room, system)
        self._is_terminal = sys.stdin.isatty()
        self._last: tuple[EncodedPrompt, _Answer] | None = None
        # A model that cannot chat is told before the first message.
        self._conversation.prompt("Hello")

    def run(self) -> None:
        """Read messages and answer them until the user leaves."""
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # history and editing in input()
            self._tell("/help lists commands")
        while (line := self._read()) is not None:
            message = line.strip()
            if message.startswith("/"):
                if not self._obey(message):
                    return
            elif message:
                self._reply(message)

    def _read(self) -> str | None:
        """The next line, None at the end."""
        if not self._is_terminal:
            return sys.stdin.readline() or None
        try:
            return input(self._prompt())
        except EOFError:
            self._console.print()
            return None
        except KeyboardInterrupt:
            self._console.print()
            self._tell("Ctrl-D or /exit leaves")
            return ""

    def _prompt(self) -> str:
        if sys.stdout.isatty():
            return "> "
        self._console.print("> ", end="")
        return ""

    def _obey(self, command: str) -> bool:
        """Carry out a command; False: leave."""
        name, _, text = command.partition(" ")
        if name == "/exit":
            return False
        if name == "/help":
            self._tell(_HELP)
        elif name == "/reset":
            self._conversation.reset()
            self._tell("forgotten")
        elif name == "/stats":
            self._tell(self._describe())
        elif name == "/system":
            self._conversation.system = text.strip()
            self._tell("system message set" if text.strip() else "no system message")
        else:
            self._tell(f"{name} is no command; /help lists them")
        return True

    def _reply(self, message: str) -> None:
        answer = _Answer()
        num_turns = self._conversation.num_turns
        try:
            prompt = self._conversation.prompt(message)
            num_forgotten = num_turns - self._conversation.num_turns
            if num_forgotten:
                self._tell(f"the oldest {num_forgotten} of {num_turns} turns are forgotten")
            is_complete = self._run_until_interrupted(prompt, answer)
        except ValueError as error:  # such as a message that is too long
            if not self._is_terminal:
                raise
            self._tell(str(error))
            return
        self._last = prompt, answer
        write("\n")
        # A question without an answer is not remembered: templates want them in turn.
        if answer.text:
            self._conversation.add_turn(message, answer.text)
        if not is_complete:
            if not self._is_terminal:
                raise KeyboardInterrupt
            self._tell("interrupted")
        elif answer.result is not None and answer.result.outputs[0].finish_reason == "length":
            self._tell("the answer has reached the largest number of tokens")

    def _run_until_interrupted(self, prompt: EncodedPrompt, answer: _Answer) -> bool:
        task = self._loop.create_task(self._answer(prompt, answer))
        with _interrupt_cancels(task, self._loop):
            try:
                self._loop.run_until_complete(task)
            except asyncio.CancelledError:
                return False
        return True

    async def _answer(self, prompt: EncodedPrompt, answer: _Answer) -> None:
        async with contextlib.aclosing(self._llm.stream(prompt, self._params)) as updates:
            async for update in updates:
                answer.last_token = time.perf_counter() - answer.started
                answer.first_token = answer.first_token or answer.last_token
                answer.num_tokens += 1
                answer.text += update.text
                answer.result = update.result
                write(update.text)

    def _describe(self) -> str:
        lines = [f"remembered:   {self._conversation.num_turns} turns"]
        if self._last is not None:
            prompt, answer = self._last
            num_tokens = len(prompt.token_ids)
            lines.append(f"last prompt:  {num_tokens} of {self._llm.max_model_len} tokens")
            if answer.result is not None:
                lines[-1] += f", {answer.result.num_cached_tokens} from the prefix cache"
            lines.append(f"last answer:  {answer.describe()}")
        stats = self._llm.stats
        lines.append(
            f"all prompts:  {stats.num_prompt_tokens} tokens, "
            f"{stats.num_cached_prompt_tokens} from the prefix cache"
        )
        lines.append(
            f"all answers:  {stats.num_generated_tokens} tokens, "
            f"{stats.generated_tokens_per_second:.1f} tokens/s"
        )
        return "\n".join(lines)

    def _tell(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _interrupt_cancels(task: asyncio.Task[None], loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Ctrl-C cancels the task instead of raising somewhere in the loop."""
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
