# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama with its transformers twin, and requests without a model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from scheduler_managers import make_core_manager
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.engine import (
    LLM,
    InputBatch,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    decode_recordings,
)
from paged_kv.hashing import get_request_block_hasher
from paged_kv.models import LoadedModel, load_model

TINY = LlamaConfig(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


@dataclass(frozen=True)
class TinyLlama:
    """One set of random weights, loaded twice."""

    loaded: LoadedModel
    reference: LlamaForCausalLM

    def llm(self, **kwargs) -> LLM:
        kwargs.setdefault("num_blocks", 256)
        return LLM(self.loaded, **kwargs)

    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
        """What transformers generates; refuses near ties, which rounding may decide either way."""
        ids = list(prompt)
        for _ in range(num_tokens):
            with torch.inference_mode():
                logits = self.reference(torch.tensor([ids]), use_cache=False).logits[0, -1]
            best, second = logits.topk(2).values
            assert best - second > 1e-3, "near tie: choose another seed"
            ids.append(int(logits.argmax()))
        return tuple(ids[len(prompt) :])


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> TinyLlama:
    folder = tmp_path_factory.mktemp("tiny_llama")
    torch.manual_seed(0)
    reference = LlamaForCausalLM(TINY).eval()
    with torch.no_grad():
        # Spread the logits: random weights of the usual size give near ties everywhere.
        for parameter in reference.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    reference.save_pretrained(folder)
    return TinyLlama(load_model(folder), reference)


@pytest.fixture(scope="module", autouse=True)
def _decode_steps_are_recorded_at_once():
    """So that steps of a test are recordings, also where they are few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_recordings, "NUM_STEPS_BEFORE_RECORDING", 0)
        yield


@pytest.fixture
def make_request():
    count = iter(range(10**6))

    def make(token_ids, *, block_size=16, max_tokens=8, request_id=None, params=None, **kwargs):
        token_ids = range(token_ids) if isinstance(token_ids, int) else token_ids
        return Request(
            request_id or f"r{next(count)}",
            list(token_ids),
            params or SamplingParams(temperature=0.0, max_tokens=max_tokens),
            max_num_tokens=len(token_ids) + max_tokens,
            block_hasher=get_request_block_hasher(block_size),
            **kwargs,
        )

    return make


@pytest.fixture
def make_scheduler():
    def make(
        *,
        num_blocks=11,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        window=None,
        **options,
    ):
        manager = make_core_manager(num_blocks, block_size, window, max_model_len=max_model_len)
        batch = InputBatch(
            manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        config = SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len, **options
        )
        return Scheduler(manager, batch, config)

    return make
