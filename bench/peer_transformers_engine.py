# SPDX-License-Identifier: Apache-2.0
"""transformers' generate() on the work of the engine suite: one batch, padded on the left.

It has no prefix cache: prompts that repeat or share a prefix are computed whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import LlamaForCausalLM

import engine_work
from engine_worker import serve

if TYPE_CHECKING:
    from collections.abc import Sequence


class Transformers(engine_work.Engine):
    """A Llama and its `generate`."""

    def __init__(self, model: str, dtype: str) -> None:
        self.model = LlamaForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(self, prompts: Sequence[list[int]], num_new_tokens: int) -> int:
        """All prompts in one batch."""
        longest = max(map(len, prompts))
        inputs = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(inputs)
        for row, prompt in enumerate(prompts):
            inputs[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            tokens = self.model.generate(
                inputs,
                attention_mask=mask,
                max_new_tokens=num_new_tokens,
                min_new_tokens=num_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return tokens[:, longest:].numel()


if __name__ == "__main__":
    serve(Transformers)
