# SPDX-License-Identifier: Apache-2.0
"""Flags of ``paged-kv generate`` for the cache, the scheduler and several completions."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch

from paged_kv.cli import main
from paged_kv.engine.kv_scales import calibrate_kv_scales, load_kv_scales, save_kv_scales
from paged_kv.engine.memory import total_memory_bytes, used_memory_bytes
from paged_kv.models import load_model

INT8 = ("--kv-cache-dtype", "int8")


def test_n_completions_are_in_the_json_and_numbered_in_the_text(generate):
    flags = ("--n", 3, "--temperature", 1, "--seed", 1)
    status, stdout, _ = generate(*flags, "--format", "json", prompts=("hello", "you"))
    assert status == 0
    records = [json.loads(line) for line in stdout.splitlines()]
    assert [list(r) for r in records] == 2 * [
        ["prompt", "prompt_token_ids", "outputs", "num_cached_tokens"]
    ]
    completions = [completion for record in records for completion in record["outputs"]]
    for record in records:
        assert len({tuple(completion["token_ids"]) for completion in record["outputs"]}) == 3
    assert list(completions[0]) == ["token_ids", "text", "finish_reason"]
    _, stdout, _ = generate(*flags, prompts=("hello", "you"))
    for label, completion in zip(
        ("1.1", "1.2", "1.3", "2.1", "2.2", "2.3"), completions, strict=True
    ):
        assert f"[{label}] {completion['text']}\n" in stdout
    _, stdout, _ = generate(*flags)
    assert stdout.startswith("[1] ")


def test_completions_share_the_blocks_of_their_prompt(generate):
    flags = ("--n", 2, "--temperature", 1, "--show-blocks")
    _, _, stderr = generate(*flags, prompts=("a prompt of more than one block",))
    assert "1* " in stderr


def test_sizes_of_the_cache(generate):
    quantised, memory = ("--kv-cache-dtype", "int8"), ("--dtype", "bfloat16")
    _, _, plain = generate()
    _, _, eight_bits = generate(*quantised)
    # 64 blocks * 16 tokens * 2 layers * 2 (key, value) * 32 elements * 4 bytes or 1
    assert "KV cache:    0.5 MiB" in plain
    assert "KV cache:    0.1 MiB" in eight_bits
    assert generate(*memory)[0] == 0


def test_scales_are_calibrated_on_the_prompts_kept_in_a_file_and_used(model, generate, tmp_path):
    path = tmp_path / "scales.json"
    int8 = ("--kv-cache-dtype", "int8", "--format", "json", "--logprobs", 1)
    prompts = ("hello", "a longer prompt")
    status, calibrated, _ = generate(*int8, "--calibrate-kv-scales", path, prompts=prompts)
    assert status == 0
    loaded = load_model(model)
    encoded = [loaded.tokenizer.encode(prompt) for prompt in prompts]
    expected = calibrate_kv_scales(loaded, "int8", encoded)
    for name, pair in load_kv_scales(path).items():
        assert all(map(torch.equal, pair, expected[name]))
    assert generate(*int8, "--kv-scales", path, prompts=prompts)[:2] == (0, calibrated)
    assert generate(*int8, prompts=prompts)[1] != calibrated, "those of random tokens are others"


def test_scales_of_chat_prompts_are_those_of_the_templated_text(model, generate, tmp_path):
    paths = [tmp_path / "plain.json", tmp_path / "chat.json"]
    for path, flags in zip(paths, ((), ("--chat",)), strict=True):
        calibrate = ("--kv-cache-dtype", "int8", "--calibrate-kv-scales", path)
        prompt = "<user>hello<assistant>" if not flags else "hello"
        assert generate(*calibrate, *flags, prompts=(prompt,))[0] == 0
    assert paths[0].read_text() == paths[1].read_text()


@pytest.mark.parametrize("command", [["generate", "--prompt", "hello"], ["chat"]])
def test_cuda_graphs_need_a_gpu(command, model, capsys):
    assert main([*command, "--model", str(model), "--cuda-graphs"]) == 2
    assert "cuda_graphs needs device cuda, got 'cpu'" in capsys.readouterr().err


def test_chat_takes_scales_from_a_file(model, tmp_path, capsys, monkeypatch):
    path = tmp_path / "scales.json"
    names = [f"model.layers.{i}.self_attn" for i in range(2)]
    save_kv_scales(path, {name: (torch.tensor([0.05]), torch.tensor([0.05])) for name in names})
    argv = ["chat", "--model", str(model), "--num-blocks", "64", "--max-tokens", "4"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main([*argv, "--kv-cache-dtype", "int8", "--kv-scales", str(path)]) == 0
    save_kv_scales(path, {"other": (torch.ones(1), torch.ones(1))})
    assert main([*argv, "--kv-cache-dtype", "int8", "--kv-scales", str(path)]) == 2
    assert "no layer 'other'" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["256K", "0.25MiB", "262144"])
def test_memory_of_the_cache(model, capsys, size):
    argv = ["generate", "--model", str(model), "--prompt", "a", "--max-tokens", "2"]
    assert main([*argv, "--kv-cache-memory", size]) == 0
    # 32 blocks of 8 KiB
    assert "of 31 used at most" in capsys.readouterr().err


def test_a_share_of_the_memory(model, capsys):
    """What this process has already, and 512 MiB for a step and the cache."""
    share = (used_memory_bytes() + 2**29) / total_memory_bytes()
    argv = ["generate", "--model", str(model), "--prompt", "a", "--max-tokens", "2"]
    assert main([*argv, "--memory-utilization", str(share)]) == 0
    (num_blocks,) = re.findall(r"of (\d+) used at most", capsys.readouterr().err)
    # Blocks of 8 KiB: no more than there is room for, and not as few as the least.
    assert 1000 < int(num_blocks) <= 2**29 // 2**13


def test_a_share_of_the_memory_that_is_none_is_refused(model, capsys):
    argv = ["generate", "--model", str(model), "--prompt", "a"]
    assert main([*argv, "--memory-utilization", "1.5"]) == 2
    assert "memory_utilization must be in (0, 1], got 1.5" in capsys.readouterr().err


def test_max_model_len_cuts_the_answer(generate):
    _, stdout, _ = generate("--max-model-len", 8, "--format", "json")
    assert len(json.loads(stdout)["token_ids"]) == 3


def test_max_num_seqs_and_preemption_mode_change_no_text(generate):
    prompts = [f"prompt number {i}" for i in range(6)]
    flags = ("--format", "json", "--max-tokens", 24)
    _, expected, _ = generate(*flags, prompts=prompts)
    tight = ("--num-blocks", 8, "--no-prefix-caching")
    for more in (("--max-num-seqs", 1), ("--preemption-mode", "swap", *tight), tight):
        status, stdout, stderr = generate(*flags, *more, prompts=prompts)
        assert status == 0
        assert [json.loads(r)["token_ids"] for r in stdout.splitlines()] == [
            json.loads(r)["token_ids"] for r in expected.splitlines()
        ]
        assert ("preemptions" in stderr) == (tight[0] in more)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--n", "0"), "n must be"),
        (("--max-num-seqs", "0"), "max_num_seqs must be at least 1"),
        (("--kv-cache-memory", "lots"), "expected a size such as 512M"),
        (("--memory-utilization", "0.5"), "not allowed with argument"),
        (("--kv-cache-memory", "1G"), "not allowed with argument"),
        (("--preemption-mode", "wait"), "--preemption-mode"),
        (("--kv-scales", "x"), "--kv-scales needs --kv-cache-dtype fp8"),
        (("--calibrate-kv-scales", "x"), "--calibrate-kv-scales needs --kv-cache-dtype fp8"),
        ((*INT8, "--kv-scales", "x", "--calibrate-kv-scales", "x"), "exclude each other"),
        ((*INT8, "--kv-scales", "/no/such/file"), "/no/such/file: No such file"),
        ((*INT8, "--kv-scales", __file__), "not a file of scales"),
        ((*INT8, "--calibrate-kv-scales", "/no/such/folder/x"), "/no/such/folder/x: No such file"),
    ],
)
def test_a_wrong_argument_is_one_line(generate, arguments, message):
    status, stdout, stderr = generate(*arguments)
    assert (status, stdout) == (2, "")
    assert len(stderr.splitlines()) == 1
    assert message in stderr
