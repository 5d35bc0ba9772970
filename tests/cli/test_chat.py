# SPDX-License-Identifier: Apache-2.0
"""``paged-kv chat``: what the model is told, what is remembered, and how it ends."""

from __future__ import annotations

import builtins
import io
import os
import re
import signal
import sys

import pytest

from paged_kv.cli import main
from paged_kv.cli.conversation import Conversation
from paged_kv.engine import AsyncLLM
from paged_kv.engine.inputs import EncodedPrompt
from paged_kv.engine.model_runner import ModelRunner


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that the model has got, as text."""
    seen = []
    stream = AsyncLLM.stream

    def record(self, prompt, *arguments, **options):
        seen.append(prompt.text)
        return stream(self, prompt, *arguments, **options)

    monkeypatch.setattr(AsyncLLM, "stream", record)
    return seen


@pytest.fixture
def chat(model, capsys, monkeypatch):
    """Run ``paged-kv chat`` with lines from a pipe; return (status, stdout, stderr)."""

    def run(*lines, arguments=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        argv = ["chat", "--model", str(model), "--num-blocks", "64", "--max-tokens", "8"]
        status = main([*argv, "--temperature", "0", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def talk(chat, monkeypatch):
    """Like ``chat`` from a terminal. A line that is an exception is what a key raises."""

    def run(*lines, arguments=()):
        typed = iter([*lines, EOFError()])

        def read(prompt=""):
            line = next(typed)
            if isinstance(line, BaseException):
                raise line
            return line

        def replace_stdin(text):
            return Terminal(text)

        monkeypatch.setattr(io, "StringIO", replace_stdin)
        monkeypatch.setattr(builtins, "input", read)
        return chat(arguments=arguments)

    return run


def test_a_pipe_is_answered_line_by_line_with_the_text_alone_on_stdout(chat, generate):
    status, stdout, stderr = chat("hello", "", "  ")
    assert (status, stderr) == (0, "the answer has reached the largest number of tokens\n")
    assert stdout == generate("--chat")[1]


def test_what_was_said_is_remembered_and_comes_from_the_prefix_cache(chat, prompts):
    status, _, stderr = chat("a first message", "and", "/stats", arguments=("--stop", "<"))
    assert status == 0
    first, second = prompts
    assert first == "<user>a first message<assistant>"
    assert second.startswith(first)
    assert second.endswith("<user>and<assistant>")
    assert re.search(r"last prompt:  \d+ of 256 tokens, (16|32|48) from the prefix cache", stderr)
    assert "remembered:   2 turns" in stderr


def test_system_message_and_reset(chat, prompts):
    chat("a", "/reset", "b", "/system", "/reset", "c", arguments=("--system", "be kind"))
    assert prompts == [
        "<system>be kind<user>a<assistant>",
        "<system>be kind<user>b<assistant>",
        "<user>c<assistant>",
    ]


def test_commands_are_told_on_stderr_and_exit_leaves(chat, prompts):
    status, stdout, stderr = chat("/help", "/system x", "/unknown", "/stats", "/exit", "hello")
    assert (status, stdout, prompts) == (0, "", [])
    for part in ("/reset", "system message set", "/unknown is no command", "remembered:   0"):
        assert part in stderr


def test_old_turns_are_forgotten_with_a_notice(chat, prompts):
    status, _, stderr = chat(*(letter * 60 for letter in "abcd"))
    assert status == 0
    assert "turns are forgotten" in stderr
    assert "aaa" not in prompts[-1]
    assert "ddd" in prompts[-1]


def test_a_conversation_forgets_whole_turns_and_never_the_system_message():
    def encode(messages):
        text = "".join(f"[{m['role'][0]}{m['content']}]" for m in messages)
        return EncodedPrompt(text, text.encode())

    conversation = Conversation(encode, max_prompt_tokens=40, system="S")
    for text in ("one", "two", "three"):
        conversation.add_turn(text, text.upper())
    assert conversation.prompt("x").text == "[sS][uthree][aTHREE][ux]"
    assert conversation.num_turns == 1
    # 40 tokens are not too many, and one that is too long alone is for the engine to refuse.
    assert len(conversation.prompt("x" * 17).token_ids) == 40
    assert conversation.num_turns == 1
    assert conversation.prompt("x" * 60).text == f"[sS][u{'x' * 60}]"
    assert conversation.num_turns == 1, "what was said stays, for the next message"


def test_ctrl_c_interrupts_the_answer_and_keeps_what_was_said(talk, prompts, monkeypatch):
    interrupt_at(monkeypatch, step=4)
    status, stdout, stderr = talk("hello", "go on", KeyboardInterrupt(), "/stats")
    assert status == 0
    assert "interrupted" in stderr
    assert "Ctrl-D or /exit leaves" in stderr
    said = stdout.split("\n")[0]
    assert 0 < len(said) < 8
    assert prompts[1] == f"<user>hello<assistant>{said}<user>go on<assistant>"
    # The interrupt has not emptied the prefix cache.
    assert re.search(r"tokens, (16|32) from the prefix cache", stderr)


def test_ctrl_c_ends_a_chat_from_a_pipe_quietly(chat, monkeypatch):
    interrupt_at(monkeypatch, step=4)
    status, _, stderr = chat("hello", "again", arguments=("--max-tokens", 200))
    assert (status, stderr) == (130, "")


def interrupt_at(monkeypatch, *, step):
    execute_model, steps = ModelRunner.execute_model, iter(range(10**6))

    def execute(self, output, **options):
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return execute_model(self, output, **options)

    monkeypatch.setattr(ModelRunner, "execute_model", execute)


def test_a_message_that_is_too_long_is_refused_and_the_chat_goes_on(talk, prompts):
    status, stdout, stderr = talk("x" * 300, "hello")
    assert status == 0
    assert re.search(r"prompt has \d+ tokens, at most 255 fit", stderr)
    assert prompts[-1] == "<user>hello<assistant>"
    assert len(stdout.splitlines()) >= 1


def test_from_a_pipe_a_message_that_is_too_long_is_an_error(chat):
    status, _, stderr = chat("x" * 300, "hello")
    assert status == 2
    assert stderr.startswith("paged-kv: error: prompt has")


def test_a_model_without_a_template_is_told_before_the_first_message(model, chat, tmp_path):
    for source in model.iterdir():
        if source.name != "tokenizer_config.json":
            (tmp_path / source.name).write_bytes(source.read_bytes())
    status, stdout, stderr = chat("hello", arguments=("--model", tmp_path))
    assert (status, stdout) == (2, "")
    assert "chat template" in stderr
    assert len(stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "-1"), "temperature must be finite"),
        (("--kv-cache-dtype", "int4"), "--kv-cache-dtype"),
        (("--max-model-len", "1"), "max_model_len must be at least 2"),
    ],
)
def test_a_wrong_argument_is_one_line(chat, arguments, message):
    status, stdout, stderr = chat("hello", arguments=arguments)
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert len(stderr.splitlines()) == 1
