# SPDX-License-Identifier: Apache-2.0
"""The decoder gives transformers' logits, through paged ops alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from model._paged_runner import PagedRunner
from model._tiny_models import VARIANTS, hf_logits, make_tiny, random_ids
from torch.utils._python_dispatch import TorchDispatchMode

from paged_kv.models import load_model

# float32 over two layers, sums in another order: of logits up to 14, those of transformers are
# within 1e-4 of float64.
TOLERANCE = {"rtol": 1e-4, "atol": 3e-4}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """Transformers' model and ours, loaded from the folder transformers saved."""
    hf_model = make_tiny(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    hf_model.save_pretrained(folder)
    return hf_model, load_model(folder).model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_tiny("llama_untied").save_pretrained(folder)
    return load_model(folder).model


def test_prefill_logits(pair):
    hf_model, model = pair
    for length in (1, 7, 8, 9, 40):
        ids = random_ids(length)
        runner = PagedRunner(model, num_seqs=1, max_len=length)
        torch.testing.assert_close(runner.step({0: ids})[0], hf_logits(hf_model, ids), **TOLERANCE)


def test_decode_logits(pair):
    """Token by token after a prefill, over two block boundaries."""
    hf_model, model = pair
    ids = random_ids(26)
    runner = PagedRunner(model, num_seqs=1, max_len=26)
    logits = [runner.step({0: ids[:6]})[0]]
    logits += [runner.step({0: [token]})[0] for token in ids[6:]]
    torch.testing.assert_close(torch.cat(logits), hf_logits(hf_model, ids), **TOLERANCE)


def test_a_pass_for_the_last_tokens_alone(pair):
    """It gives their logits, and later ones find the keys and values of all."""
    hf_model, model = pair
    sequences = [random_ids(length, seed=2) for length in (30, 17)]
    runner = PagedRunner(model, num_seqs=2, max_len=30)
    logits = runner.step({0: sequences[0][:11], 1: sequences[1][:1]}, last_tokens_only=True)
    rest = runner.step({0: sequences[0][11:], 1: sequences[1][1:]})
    for seq, num_before in ((0, 10), (1, 0)):
        expected = hf_logits(hf_model, sequences[seq])[num_before:]
        torch.testing.assert_close(torch.cat([logits[seq], rest[seq]]), expected, **TOLERANCE)


def test_ragged_batch_logits(pair):
    """Prefill, chunked prefill and decode of several sequences in one batch."""
    hf_model, model = pair
    sequences = [random_ids(length, seed=1) for length in (30, 17, 9)]
    steps = [{0: 11, 1: 16}, {2: 8, 0: 1, 1: 1}, {0: 18, 2: 1}]
    runner = PagedRunner(model, num_seqs=3, max_len=30)
    logits: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for step in steps:
        feed = {
            seq: sequences[seq][runner.lens[seq] : runner.lens[seq] + count]
            for seq, count in step.items()
        }
        for seq, got in runner.step(feed).items():
            logits[seq].append(got)
    for seq, ids in enumerate(sequences):
        torch.testing.assert_close(torch.cat(logits[seq]), hf_logits(hf_model, ids), **TOLERANCE)


def test_greedy_tokens(pair):
    hf_model, model = pair
    prompt = random_ids(12, seed=2)
    with torch.inference_mode():
        expected = hf_model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
    runner = PagedRunner(model, num_seqs=1, max_len=32)
    assert runner.greedy(prompt, 20) == expected


def test_block_placement_gives_identical_bits(llama):
    ids = random_ids(33)
    first, second = (
        PagedRunner(llama, num_seqs=1, max_len=40, seed=seed).step({0: ids})[0] for seed in (1, 2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["llama_llama3_rope", "gemma3"])
def test_half_precision_follows_transformers(variant, dtype, tmp_path):
    """The same roundings as transformers in that dtype: as near to it as to its own eager path."""
    hf_model = make_tiny(variant)
    hf_model.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype).model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.rotary_emb.inv_freq.dtype == torch.float32
    ids = random_ids(40)
    got = PagedRunner(model, num_seqs=1, max_len=40).step({0: ids})[0]
    expected = hf_logits(hf_model.to(dtype), ids)
    assert got.dtype == torch.float32
    relative = (got - expected).norm() / expected.norm()
    assert relative < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gemma_s_embeddings_are_scaled_by_what_the_dtype_has_of_the_root(dtype, tmp_path):
    hf_model = make_tiny("gemma3")
    hf_model.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype).model
    ids = torch.tensor(random_ids(40))
    with torch.inference_mode():
        expected = hf_model.to(dtype).model.embed_tokens(ids)
        assert torch.equal(model.embed(ids), expected)


def test_only_paged_ops_touch_the_cache(llama):
    """No gather, index or copy of a cache, in prefill or decode."""
    runner = PagedRunner(llama, num_seqs=1, max_len=16)
    storages = {
        side.untyped_storage().data_ptr()
        for cache in runner.kv_caches
        for side in (cache.key, cache.value)
    }
    seen = set()

    class RecordCacheOps(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for arg in (*args, *(kwargs or {}).values()):
                if isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() in storages:
                    seen.add(str(func))
            return func(*args, **(kwargs or {}))

    with RecordCacheOps():
        runner.step({0: random_ids(9)})
        runner.step({0: [5]})
    assert seen == {
        "paged_kv.reshape_and_cache_flash.default",
        "paged_kv.paged_attention_varlen.default",
    }


@pytest.mark.parametrize("bad_id", [-1, 160, 2**40])
def test_token_id_outside_the_vocabulary_is_refused(llama, bad_id):
    runner = PagedRunner(llama, num_seqs=1, max_len=8)
    with pytest.raises(ValueError, match=f"token id {bad_id} is outside the vocabulary: 0 to 159"):
        runner.step({0: [3, bad_id, 4]})
    for cache in runner.kv_caches:
        assert cache.key.isnan().all()
        assert cache.value.isnan().all()


def test_number_of_caches_is_checked(llama):
    runner = PagedRunner(llama, num_seqs=1, max_len=8)
    runner.kv_caches.pop()
    with pytest.raises(ValueError, match="kv_caches: expected 2, one a layer, got 1"):
        runner.step({0: [3]})


def test_number_of_metadata_is_checked(llama):
    runner = PagedRunner(llama, num_seqs=1, max_len=8)
    runner.windows.pop()
    with pytest.raises(ValueError, match="metadata: expected 2, one a layer, got 1"):
        runner.step({0: [3]})


def test_parameters_take_no_gradient(pair):
    assert not any(parameter.requires_grad for parameter in pair[1].parameters())
    assert not pair[1].training


def test_weight_slots_cover_every_parameter_once(pair):
    model = pair[1]
    slots = model.weight_slots()
    spans = sorted((slot.data_ptr(), slot.numel()) for slot in slots.values())
    assert sum(count for _, count in spans) == sum(p.numel() for p in model.parameters())
    for (start, count), (next_start, _) in itertools.pairwise(spans):
        assert start + 4 * count <= next_start
