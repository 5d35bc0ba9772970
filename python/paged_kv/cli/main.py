# SPDX-License-Identifier: Apache-2.0
"""Arguments of the ``paged-kv`` command, and how it ends."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import paged_kv
from paged_kv.cli.arguments import (
    add_cache_arguments,
    add_model_arguments,
    add_sampling_arguments,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_EXIT_USER_ERROR = 2
# What a shell reports for a process that a signal ended: 128 + SIGINT, 128 + SIGPIPE.
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; default: those of the process.

    Returns:
        The exit status: 0; 2 for a mistake of the user, told in one line on stderr; 130 after
        Ctrl-C; 141 when the reader of stdout went away.
    """
    try:
        _check_stdout()
        arguments = _build_parser().parse_args(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except SystemExit as exit_request:  # argparse: --help, --version, bad arguments
        return exit_request.code if isinstance(exit_request.code, int) else _EXIT_USER_ERROR
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more when it exits; give it a file where that works.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    except (ValueError, OSError, ImportError, MemoryError) as error:
        print(_error_line(_describe(error)), file=sys.stderr)
        return _EXIT_USER_ERROR
    return status


def _check_stdout() -> None:
    if sys.stdout is None:  # closed by the caller: `>&-` in a shell
        msg = "stdout is closed"
        raise ValueError(msg)


class _Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_USER_ERROR, _error_line(message) + "\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="paged-kv",
        description="Run language models through a paged KV cache.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paged-kv {paged_kv.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_chat(commands)
    info = commands.add_parser(
        "info", help="show versions, CPU features and ops", allow_abbrev=False
    )
    info.set_defaults(run=_run_info)
    return parser


def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("generate", help="generate text", allow_abbrev=False)
    parser.set_defaults(run=_run_generate)
    add_model_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", action="append", metavar="P", help="a prompt; repeat for a batch"
    )
    source.add_argument(
        "--prompts-file", metavar="F", help="UTF-8 file with one prompt a line; - is stdin"
    )
    parser.add_argument("--chat", action="store_true", help="prompts are user messages of a chat")

    sampling = add_sampling_arguments(parser, max_tokens=64, temperature=0.0, top_p=1.0)
    sampling.add_argument(
        "--n", type=int, default=1, metavar="N", help="completions of each prompt"
    )
    cache = add_cache_arguments(parser)
    cache.add_argument(
        "--calibrate-kv-scales",
        metavar="FILE",
        help="find scales for the prompts, write them to FILE and use them",
    )
    cache.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="most that run at once"
    )
    cache.add_argument(
        "--preemption-mode",
        default="recompute",
        choices=("recompute", "swap"),
        help="what becomes of a request that has to make room",
    )

    output = parser.add_argument_group("output")
    output.add_argument("--format", default="text", choices=("text", "json"))
    output.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --format json: log probabilities of each token and of the N most likely ones",
    )
    output.add_argument(
        "--show-blocks", action="store_true", help="draw the pool and the block tables on stderr"
    )


def _add_chat(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model; /help lists commands. From a pipe: one message a line.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_chat)
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="tell the model how to behave")
    add_sampling_arguments(parser, max_tokens=512, temperature=0.7, top_p=0.95)
    add_cache_arguments(parser)


# The commands are imported when they run: --version and --help need no torch.
def _run_generate(arguments: argparse.Namespace) -> int:
    from paged_kv.cli.generate import generate

    return generate(arguments)


def _run_chat(arguments: argparse.Namespace) -> int:
    from paged_kv.cli.chat import chat

    return chat(arguments)


def _run_info(arguments: argparse.Namespace) -> int:  # noqa: ARG001
    from paged_kv.cli.info import info

    return info()


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _error_line(message: str) -> str:
    return "paged-kv: error: " + " ".join(message.split())
