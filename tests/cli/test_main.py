# SPDX-License-Identifier: Apache-2.0
"""The command's results, and that every mistake is told in one line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import paged_kv
from paged_kv._core import sha256_backends
from paged_kv.cli import main

JSON_KEYS = [
    "prompt",
    "prompt_token_ids",
    "token_ids",
    "text",
    "finish_reason",
    "num_cached_tokens",
]


def command(*arguments):
    return [sys.executable, "-m", "paged_kv.cli", *map(str, arguments)]


def assert_one_line_error(status, stdout, stderr, message):
    assert status == 2
    assert stdout == ""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("paged-kv: error: ")
    assert message in lines[0]


def test_json_has_one_object_a_prompt_in_order(generate):
    status, stdout, stderr = generate("--format", "json", prompts=("first", "né 你", "third one"))
    assert status == 0
    records = [json.loads(line) for line in stdout.splitlines()]
    assert [list(record) for record in records] == 3 * [JSON_KEYS]
    assert [record["prompt"] for record in records] == ["first", "né 你", "third one"]
    assert [len(record["prompt_token_ids"]) for record in records] == [5, 7, 9]
    assert all(len(record["token_ids"]) == 8 for record in records)
    assert all(record["finish_reason"] == "length" for record in records)
    assert "24 tokens in" in stderr


def test_streamed_text_equals_the_text_of_the_json(generate):
    _, streamed, summary = generate()
    _, record, _ = generate("--format", "json")
    assert streamed == json.loads(record)["text"] + "\n"
    for part in ("tokens/s", "from the prefix cache", "blocks:", "fragmentation"):
        assert part in summary


def test_a_shared_prefix_is_reported_as_cached(generate):
    prefix = "the same beginning of both prompts, "
    _, stdout, _ = generate("--format", "json", prompts=(prefix + "one", prefix + "two"))
    assert [json.loads(line)["num_cached_tokens"] for line in stdout.splitlines()] == [0, 32]
    _, stdout, _ = generate(
        "--format", "json", "--no-prefix-caching", prompts=(prefix + "one", prefix + "two")
    )
    assert [json.loads(line)["num_cached_tokens"] for line in stdout.splitlines()] == [0, 0]


def test_show_blocks_draws_on_stderr_and_keeps_stdout_clean(generate):
    prefix = "the same beginning of both prompts, "
    status, stdout, stderr = generate(
        "--show-blocks", "--format", "json", prompts=(prefix + "one", prefix + "two")
    )
    assert status == 0
    assert len(stdout.splitlines()) == 2
    assert "KV pool: 63 blocks of 16 tokens" in stderr
    assert "1* 2* " in stderr


def test_prompts_come_from_a_file_one_a_line(generate, tmp_path):
    file = tmp_path / "prompts.txt"
    # Lines end with \n or \r\n alone: what else Python takes for a line end is part of a prompt.
    file.write_bytes("\ufeffone\r\n\ntwo é\u2028still\x0ctwo\n".encode())
    status, stdout, _ = generate("--prompts-file", file, "--format", "json", prompts=())
    assert status == 0
    assert [json.loads(line)["prompt"] for line in stdout.rstrip("\n").split("\n")] == [
        "one",
        "two é\u2028still\x0ctwo",
    ]


def test_several_prompts_as_text_are_numbered(generate):
    _, stdout, _ = generate("--stop", "\n", prompts=("a", "b"))
    assert stdout.startswith("[1] ")
    assert "\n[2] " in stdout


def test_chat_uses_the_template(generate):
    _, stdout, _ = generate("--chat", "--format", "json")
    assert json.loads(stdout)["prompt"] == "<user>hello<assistant>"


def test_the_same_seed_gives_the_same_text(generate):
    sampling = ("--temperature", "2", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.001")
    texts = [generate(*sampling, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_bfloat16_and_block_size_are_honoured(generate):
    status, _, stderr = generate("--dtype", "bfloat16", "--block-size", "32")
    assert status == 0
    # 64 blocks * 32 tokens * 2 layers * 2 (key, value) * 32 elements * 2 bytes
    assert "KV cache:    0.5 MiB, 32 tokens per block" in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-blocks", "1"), "num_blocks must be at least 2"),
        (("--num-blocks", "0"), "num_blocks must be at least 2"),
        (("--block-size", "0"), "block_size must be in [1, "),
        (("--max-tokens", "-5"), "max_tokens must be at least 1, got -5"),
        (("--max-tokens", "0"), "max_tokens must be at least 1, got 0"),
        (("--max-tokens", "many"), "--max-tokens"),
        (("--temperature", "-1"), "temperature must be finite"),
        (("--temperature", "nan"), "temperature must be finite"),
        (("--top-p", "0"), "top_p must be in (0, 1]"),
        (("--top-k", "-2"), "top_k must be at least"),
        (("--min-p", "2"), "min_p must be in [0, 1]"),
        (("--repetition-penalty", "0"), "repetition_penalty must be finite and above 0"),
        (("--presence-penalty", "3"), "presence_penalty must be in [-2, 2]"),
        (("--frequency-penalty", "3"), "frequency_penalty must be in [-2, 2]"),
        (("--logprobs", "1"), "--logprobs needs --format json"),
        (("--seed", str(2**64)), "seed must be in"),
        (("--stop", ""), "stop must not hold an empty string"),
        (("--dtype", "int8"), "--dtype"),
        (("--format", "xml"), "--format"),
        (("--prompt", ""), "prompt 2 is empty"),
        (("--prompts-file", "x"), "not allowed with argument"),
        (("--unknown",), "--unknown"),
        (("--num-blocks", "2", "--prompt", "x" * 40), "prompt has 40 tokens, at most 15 fit"),
        (("--num-blocks", str(2**40)), "and below 2**31"),
        (("--num-blocks", str(2**31 - 1)), "2147483647 KV blocks take 16384.00 GiB"),
    ],
)
def test_a_wrong_argument_is_one_line(generate, arguments, message):
    assert_one_line_error(*generate(*arguments), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"\xff\xfe", "not UTF-8 text"), (b"\n \n", "holds no prompt")],
)
def test_an_unusable_prompts_file_is_one_line(generate, tmp_path, content, message):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    assert_one_line_error(*generate("--prompts-file", file, prompts=()), message)


def copy_with(model, folder, name, content):
    for source in model.iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    (folder / name).write_bytes(content)


def broken_models(model):
    weights = (model / "model.safetensors").read_bytes()
    return {
        "truncated safetensors": ("model.safetensors", weights[: len(weights) // 2]),
        "empty safetensors": ("model.safetensors", b""),
        "huge safetensors header": ("model.safetensors", struct.pack("<Q", 2**62) + weights[8:]),
        "broken config": ("config.json", b"{"),
        "other architecture": ("config.json", b'{"architectures": ["GPT2LMHeadModel"]}'),
        "broken tokenizer": ("tokenizer.json", b"[]"),
    }


@pytest.mark.parametrize(
    "case",
    [
        "truncated safetensors",
        "empty safetensors",
        "huge safetensors header",
        "broken config",
        "other architecture",
        "broken tokenizer",
    ],
)
def test_a_broken_model_folder_is_one_line(model, tmp_path, capsys, case):
    copy_with(model, tmp_path, *broken_models(model)[case])
    status = main(["generate", "--model", str(tmp_path), "--prompt", "a"])
    captured = capsys.readouterr()
    assert_one_line_error(status, captured.out, captured.err, "")


def test_an_id_outside_the_vocabulary_is_one_line(model, tmp_path, capsys):
    """A tokenizer with more ids than the model has embeddings."""
    copy_with(model, tmp_path, "unused", b"")
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    config["vocab_size"] = 40
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][:40].clone()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    status = main(["generate", "--model", str(tmp_path), "--prompt", "zzz", "--num-blocks", "8"])
    captured = capsys.readouterr()
    assert_one_line_error(status, captured.out, captured.err, "the vocabulary has 40 ids")


@pytest.mark.parametrize("name", ["/nowhere/model", "/nowhere/model.gguf", "no-such-model"])
def test_a_missing_model_is_one_line(name, capsys):
    status = main(["generate", "--model", name, "--prompt", "a"])
    captured = capsys.readouterr()
    assert_one_line_error(status, captured.out, captured.err, name)


def test_a_truncated_gguf_is_one_line(tmp_path, capsys):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 100, 5) + b"\x08")
    status = main(["generate", "--model", str(file), "--prompt", "a"])
    captured = capsys.readouterr()
    assert_one_line_error(status, captured.out, captured.err, "")


def test_a_missing_library_names_what_to_install(generate, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    status, stdout, stderr = generate()
    assert_one_line_error(status, stdout, stderr, "pip install 'paged_kv[model]'")


def test_a_command_is_needed(capsys):
    status = main([])
    captured = capsys.readouterr()
    assert_one_line_error(status, captured.out, captured.err, "COMMAND")


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"paged-kv {paged_kv.__version__}\n"
    for argv in (["--help"], ["generate", "--help"]):
        assert main(argv) == 0
        assert "usage: paged-kv" in capsys.readouterr().out


def test_info_names_versions_features_and_backends(capsys):
    assert main(["info"]) == 0
    report = capsys.readouterr().out
    rows = {line[:28].strip(): line[28:].strip() for line in report.splitlines()}
    assert rows["paged_kv"] == paged_kv.__version__
    assert rows["build type"] in ("Release", "Debug", "RelWithDebInfo", "MinSizeRel")
    assert rows["compiler"].split()[0] in ("GNU", "Clang")
    assert rows["torch"] == torch.__version__
    assert rows["op"] == "has kernels for"
    assert "CPU" in rows["reshape_and_cache_flash"]
    assert "CPU" in rows["paged_attention_varlen"]
    assert rows["CUDA kernels"].startswith(("yes", "no"))
    assert rows["SHA-256"] == sha256_backends()[0]


def test_an_error_of_the_real_command(model):
    result = subprocess.run(
        command("generate", "--model", model, "--prompt", "a", "--num-blocks", "1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert_one_line_error(result.returncode, result.stdout, result.stderr, "at least 2")


def interrupt(process):
    """SIGINT until the process ends; its outputs.

    Once is not always enough: Python drops an exception that is raised in a callback, and an
    interrupt may fall into one.
    """
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=30)
    process.kill()
    process.communicate()
    pytest.fail("the process did not end")


def test_interrupt_ends_quietly(model, tmp_path):
    fifo = tmp_path / "prompts"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        command("generate", "--model", model, "--prompts-file", fifo),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Opening returns once the command opens the file too: from then on it waits for prompts.
    with fifo.open("w"):
        stdout, stderr = interrupt(process)
    assert (process.returncode, stdout, stderr) == (130, "", "")


def test_interrupt_between_steps_ends_quietly(generate, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("paged_kv.engine.model_runner.ModelRunner.execute_model", interrupt)
    status, stdout, stderr = generate()
    assert (status, stdout, stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("redirection", "message"),
    [("<&-", "--prompts-file -: stdin is closed"), (">&-", "stdout is closed")],
)
def test_a_stream_that_the_shell_closed_is_told_in_one_line(model, redirection, message):
    argv = command("generate", "--model", model, "--num-blocks", 9, "--prompts-file", "-")
    ended = subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", *argv],
        check=False,
        input="a",
        capture_output=True,
        text=True,
    )
    assert_one_line_error(ended.returncode, ended.stdout, ended.stderr, message)


def test_weights_of_nan_are_told_in_one_line(generate, model, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, broken / "model.safetensors")
    assert_one_line_error(*generate("--model", broken), "logits must be finite")


def test_a_closed_pipe_ends_quietly(model):
    process = subprocess.Popen(
        command("generate", "--model", model, "--prompt", "a", "--num-blocks", "64"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert stderr == ""
