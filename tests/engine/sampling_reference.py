# SPDX-License-Identifier: Apache-2.0
"""The sampler's rules one token and one row at a time, in plain Python floats."""

from __future__ import annotations

import math
from collections import Counter

import torch

from paged_kv.engine.sampling_row import SamplingRow


def make_row(params, output=(), prompt=(0,), **kwargs):
    return SamplingRow(params, [*prompt, *output], len(prompt), **kwargs)


def random_logits(num_rows, vocab_size=50, seed=0):
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def reference_logits(logits, row, *, end_token_ids=(), bad_words=()):
    """Bans, biases and penalties."""
    params, changed = row.params, list(logits)
    prompt = row.token_ids[: row.num_prompt_tokens]
    output = row.token_ids[row.num_prompt_tokens :]
    for ids in bad_words:
        if [*output, ids[-1]][-len(ids) :] == list(ids):
            changed[ids[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token_id in end_token_ids:
            changed[token_id] = -math.inf
    for token_id, bias in (params.logit_bias or {}).items():
        changed[token_id] += bias
    for token_id in {*prompt, *output}:
        value, factor = changed[token_id], params.repetition_penalty
        changed[token_id] = value / factor if value > 0 else value * factor
    for token_id, count in Counter(output).items():
        changed[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return changed


def reference_probs(logits, params):
    """Temperature and filters on logits without ties."""
    best = max(logits)
    weights = {i: math.exp((value - best) / params.temperature) for i, value in enumerate(logits)}
    kept = sorted((i for i, w in weights.items() if w >= params.min_p), key=lambda i: -weights[i])
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total = sum(weights[i] for i in kept)
    nucleus, mass = [], 0.0
    for token_id in kept:
        if mass >= params.top_p * total and params.top_p < 1:
            break
        nucleus.append(token_id)
        mass += weights[token_id]
    return [weights[i] / mass if i in nucleus else 0.0 for i in range(len(logits))]
