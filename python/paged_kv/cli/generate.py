# SPDX-License-Identifier: Apache-2.0
"""``paged-kv generate``: text on stdout, everything else on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paged_kv.cli.options import check_is_quantised, engine_options, sampling_params
from paged_kv.cli.stdout import can_carry_unicode, write
from paged_kv.engine import LLM, EngineConfig, SamplingParams
from paged_kv.engine.inputs import encode_chat, encode_prompt
from paged_kv.engine.kv_scales import calibrate_kv_scales, save_kv_scales
from paged_kv.models import load_model
from paged_kv.models.optional import import_optional

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from paged_kv.engine import CompletionOutput, LLMEngine, RequestOutput
    from paged_kv.engine.inputs import EncodedPrompt
    from paged_kv.engine.logprobs import LogprobsAtPosition
    from paged_kv.engine.stats import BlockMap

__all__ = ["generate"]


def generate(arguments: argparse.Namespace) -> int:
    """Run the command with parsed arguments; return the exit status.

    Raises:
        ValueError: A mistake of the user.
        OSError: A file that cannot be read.
        ImportError: A library that is not installed.
    """
    # What can be wrong without a model is found before one is loaded.
    params = _sampling_params(arguments)
    texts = _read_prompts(arguments)
    if arguments.calibrate_kv_scales is not None:
        check_is_quantised(arguments, "--calibrate-kv-scales")
        if arguments.kv_scales is not None:
            msg = "--kv-scales and --calibrate-kv-scales exclude each other"
            raise ValueError(msg)
    options = engine_options(arguments)
    import_optional("rich", "to show progress")
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    options |= {
        "max_num_seqs": arguments.max_num_seqs,
        "preemption_mode": arguments.preemption_mode,
    }
    if arguments.calibrate_kv_scales is None:
        llm = LLM(arguments.model, **options)
    else:
        llm = _calibrated_llm(arguments, texts, options)
    prompts = [_encode(llm, text, arguments.chat) for text in texts]
    recorder = _BlockMapRecorder() if arguments.show_blocks else None
    if arguments.format == "text" and len(prompts) == params.n == 1:
        results = [_stream_one(llm, prompts[0], params, recorder)]
    else:
        results = _run_batch(llm, prompts, params, recorder, console)
        _print_results(results, arguments.format)
    sys.stdout.flush()
    if recorder is not None and recorder.block_map is not None:
        from paged_kv.cli.block_map import draw_block_map

        # The blocks of further completions are those of requests with a number at the end.
        prompt_of = {
            f"{result.request_id}/{i}" if i else result.request_id: text
            for result, text in zip(results, texts, strict=True)
            for i in range(params.n)
        }
        draw_block_map(recorder.block_map, prompt_of, console)
    _print_summary(llm, console)
    return 0


class _BlockMapRecorder:
    """Keeps the block map of the step that used most blocks, the last of those."""

    def __init__(self) -> None:
        self.block_map: BlockMap | None = None
        self._num_used = 0

    def __call__(self, engine: LLMEngine) -> None:
        block_map = engine.block_map()
        num_used = len(block_map.owners())
        if num_used >= self._num_used:
            self.block_map, self._num_used = block_map, num_used


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    if arguments.logprobs is not None and arguments.format != "json":
        msg = "--logprobs needs --format json"
        raise ValueError(msg)
    params = sampling_params(arguments)
    return dataclasses.replace(params, n=arguments.n, logprobs=arguments.logprobs)


def _read_prompts(arguments: argparse.Namespace) -> list[str]:
    if arguments.prompts_file is None:
        prompts: list[str] = arguments.prompt
    else:
        name = arguments.prompts_file
        text = _read_stdin() if name == "-" else _read_text(Path(name))
        # Not splitlines(): a prompt may hold U+2028 or a form feed. Reading made \r\n a \n.
        lines = text.removeprefix("\ufeff").split("\n")
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            msg = f"{name}: holds no prompt"
            raise ValueError(msg)
    for position, prompt in enumerate(prompts):
        if not prompt:
            msg = f"prompt {position + 1} is empty"
            raise ValueError(msg)
    return prompts


def _read_stdin() -> str:
    if sys.stdin is None:  # closed by the caller: `<&-` in a shell
        msg = "--prompts-file -: stdin is closed"
        raise ValueError(msg)
    return sys.stdin.read()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        msg = f"{path}: not UTF-8 text (byte {error.start})"
        raise ValueError(msg) from None


def _calibrated_llm(
    arguments: argparse.Namespace, texts: list[str], options: dict[str, Any]
) -> LLM:
    """An ``LLM`` with scales for these prompts; writes them to the file of the argument."""
    sizes = {name: value for name, value in options.items() if name not in ("dtype", "kv_scales")}
    config = EngineConfig(**sizes)  # refuses wrong ones before a model is loaded
    loaded = load_model(arguments.model, dtype=getattr(torch, arguments.dtype))
    tokenizer, vocab_size = loaded.tokenizer, loaded.config.vocab_size
    prompts = [
        encode_chat([{"role": "user", "content": text}], tokenizer, vocab_size)
        if arguments.chat
        else encode_prompt(text, tokenizer, vocab_size)
        for text in texts
    ]
    scales = calibrate_kv_scales(
        loaded,
        config.kv_cache_dtype,
        [prompt.token_ids for prompt in prompts],
        block_size=config.block_size,
        device=config.device,
    )
    save_kv_scales(arguments.calibrate_kv_scales, scales)
    return LLM(loaded, **options | {"kv_scales": scales})


def _encode(llm: LLM, text: str, chat: bool) -> str | EncodedPrompt:
    return llm.encode_chat([{"role": "user", "content": text}]) if chat else text


def _stream_one(
    llm: LLM,
    prompt: str | EncodedPrompt,
    params: SamplingParams,
    on_step: Callable[[LLMEngine], None] | None,
) -> RequestOutput:
    result = None
    for update in llm.stream(prompt, params, on_step=on_step):
        write(update.text)
        result = update.result
    write("\n")
    if result is None:
        msg = "the stream ended without a result"
        raise RuntimeError(msg)
    return result


def _run_batch(
    llm: LLM,
    prompts: list[str | EncodedPrompt],
    params: SamplingParams,
    recorder: _BlockMapRecorder | None,
    console: Console,
) -> list[RequestOutput]:
    with _progress_bar(console, len(prompts)) as show_progress:

        def on_step(engine: LLMEngine) -> None:
            show_progress(engine)
            if recorder is not None:
                recorder(engine)

        return llm.generate(prompts, params, on_step=on_step)


@contextmanager
def _progress_bar(console: Console, num_prompts: int) -> Iterator[Callable[[LLMEngine], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts, {task.fields[num_tokens]} tokens"),
    )
    # Without a terminal there is nothing to redraw.
    disabled = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disabled) as progress:
        task = progress.add_task("", total=num_prompts, num_tokens=0)

        def show(engine: LLMEngine) -> None:
            stats = engine.stats
            progress.update(
                task,
                completed=stats.num_finished_requests,
                num_tokens=stats.num_generated_tokens,
            )

        yield show


def _print_results(results: list[RequestOutput], output_format: str) -> None:
    for number, result in enumerate(results, start=1):
        if output_format == "json":
            write(_to_json(result) + "\n")
            continue
        for completion in result.outputs:
            # The number of the prompt, of the completion, or both.
            label = [str(number)] if len(results) > 1 else []
            label += [str(completion.index + 1)] if len(result.outputs) > 1 else []
            write(f"[{'.'.join(label)}] {completion.text}\n")


def _to_json(result: RequestOutput) -> str:
    record: dict[str, object] = {
        "prompt": result.prompt,
        "prompt_token_ids": list(result.prompt_token_ids),
    }
    if len(result.outputs) == 1:
        record |= _completion_record(result.outputs[0])
    else:
        record["outputs"] = [_completion_record(completion) for completion in result.outputs]
    record["num_cached_tokens"] = result.num_cached_tokens
    # Escapes keep the line valid where stdout cannot carry every character.
    return json.dumps(record, ensure_ascii=not can_carry_unicode())


def _completion_record(completion: CompletionOutput) -> dict[str, object]:
    record: dict[str, object] = {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        record["cumulative_logprob"] = completion.cumulative_logprob
        record["logprobs"] = [_logprobs_to_json(position) for position in completion.logprobs]
    return record


def _logprobs_to_json(position: LogprobsAtPosition) -> list[dict[str, object]]:
    return [
        {
            "token_id": token_id,
            "token": entry.decoded_token,
            "logprob": entry.logprob,
            "rank": entry.rank,
        }
        for token_id, entry in position.items()
    ]


def _print_summary(llm: LLM, console: Console) -> None:
    stats = llm.engine.stats
    cache = llm.engine.cache_engine
    rows = {
        "generated": f"{stats.num_generated_tokens} tokens in {stats.step_seconds:.2f} s, "
        f"{stats.generated_tokens_per_second:.1f} tokens/s",
        "prompts": f"{stats.num_prompt_tokens} tokens, "
        f"{stats.num_cached_prompt_tokens} of them from the prefix cache",
        "blocks": f"{stats.peak_num_used_blocks} of {cache.num_blocks - 1} used at most, "
        f"fragmentation {100 * stats.peak_fragmentation:.1f} %",
        "KV cache": f"{cache.num_bytes / 2**20:.1f} MiB, "
        f"{llm.engine.config.block_size} tokens per block",
    }
    if stats.num_preemptions:
        rows["preemptions"] = str(stats.num_preemptions)
    console.print()
    for name, value in rows.items():
        console.print(f"{name + ':':<12} {value}", markup=False, soft_wrap=True)
