# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of a real model as transformers computes them, and what equals them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged_kv import SamplingParams

# Logits that differ by less may come in either order: float32 sums in another order round
# differently.
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class GreedyReference:
    """What transformers chooses after a prompt.

    Attributes:
        token_ids: The new tokens.
        logits: ``[new tokens, vocabulary]``, which each was chosen from.
    """

    token_ids: tuple[int, ...]
    logits: torch.Tensor


def greedy_by_transformers(model, prompt_token_ids, num_tokens) -> GreedyReference:
    """Generate ``num_tokens`` tokens, whatever would end the text."""
    ids = torch.tensor([prompt_token_ids])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    token_ids = tuple(output.sequences[0, ids.shape[1] :].tolist())
    return GreedyReference(token_ids, torch.cat(output.logits))


def assert_same_tokens(llm, output, reference: GreedyReference):
    """Each completion is the reference's up to a near tie; there the logits must be equal."""
    for completion in output.outputs:
        _assert_same_completion(llm, output, completion.token_ids, reference)


def _assert_same_completion(llm, output, token_ids, reference):
    for i, (a, b) in enumerate(zip(token_ids, reference.token_ids, strict=True)):
        if a == b:
            continue
        best, second = reference.logits[i].topk(2).values
        assert best - second < NEAR_TIE, f"{output.prompt!r}: token {i} is {a}, expected {b}"
        mine = _logits_after(llm, (*output.prompt_token_ids, *reference.token_ids[:i]))
        torch.testing.assert_close(mine, reference.logits[i], atol=NEAR_TIE, rtol=1e-3)
        return


def _logits_after(llm, prompt_token_ids):
    """The engine's own logits for the token after a prompt."""
    model, recorded = llm.engine.model_runner._model, []
    compute_logits = model.compute_logits
    model.compute_logits = lambda hidden: recorded.append(compute_logits(hidden)) or recorded[-1]
    try:
        llm.generate(list(prompt_token_ids), SamplingParams(temperature=0.0, max_tokens=1))
    finally:
        del model.compute_logits
    return recorded[-1][0]
