# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of any architecture, loaded twice, and what transformers makes of prompts."""

from __future__ import annotations

from model._tiny_models import hf_logits, make_tiny, random_ids

from paged_kv import SamplingParams
from paged_kv.models import load_model

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Shorter than the window of 7 tokens that some have, and much longer.
PROMPTS = [random_ids(length) for length in (3, 8, 30, 61)]


class TinyReference:
    """One set of random weights, loaded twice.

    Attributes:
        loaded: For the engine.
        expected: The new tokens of each of PROMPTS.
    """

    def __init__(self, folder, variant, seed=3):
        self._model = make_tiny(variant, seed)
        self._model.save_pretrained(folder)
        self.loaded = load_model(folder)
        self.expected = [self._greedy(prompt) for prompt in PROMPTS]

    def _greedy(self, prompt):
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            logits = hf_logits(self._model, ids)[-1]
            best, second = logits.topk(2).values
            assert best - second > 1e-3, "near tie: choose another seed"
            ids.append(int(logits.argmax()))
        return tuple(ids[len(prompt) :])
