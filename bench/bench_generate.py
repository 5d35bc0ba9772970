# SPDX-License-Identifier: Apache-2.0
"""Text generation on SmolLM2-135M in float32: tokens a second of LLM, against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged_kv import LLM, SamplingParams
from paged_kv.models import load_model
from timing import Row, time_interleaved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paged_kv.models import ModelConfig

MODEL = "smollm2-135m"
PROMPT = list(range(1000, 1064))
NEW_TOKENS = 32
MAX_SAMPLES = 5  # a sample takes seconds


def rows(num_samples: int) -> Iterator[Row]:
    """One sequence alone, and a batch of eight."""
    loaded = load_model(MODEL)
    llm = LLM(loaded, num_blocks=128, enable_prefix_caching=False)
    peer = _load_peer(loaded.config)
    for num_seqs in (1, 8):
        yield _row(llm, peer, num_seqs, min(num_samples, MAX_SAMPLES))


def _load_peer(config: ModelConfig):  # noqa: ANN202  (transformers is no dependency of the package)
    """A model of the same shape; its weights are random, which costs the same time."""
    import transformers

    peer_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        tie_word_embeddings=config.tie_word_embeddings,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(peer_config).eval()


def _row(llm: LLM, peer, num_seqs: int, num_samples: int) -> Row:  # noqa: ANN001
    # Different first tokens, so that the sequences differ.
    prompts = [[500 + i, *PROMPT] for i in range(num_seqs)]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    inputs = torch.tensor(prompts)

    def ours() -> None:
        llm.generate(prompts, params)

    def transformers() -> None:
        with torch.inference_mode():
            peer.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
            )

    timings = time_interleaved({"ours": ours, "peer": transformers}, num_samples)
    return Row(
        case=f"{num_seqs} x ({len(prompts[0])} prompt + {NEW_TOKENS} new) tokens",
        ours=timings["ours"],
        references={"transformers generate()": timings["peer"]},
        rate=num_seqs * NEW_TOKENS / timings["ours"].median_s,
        rate_unit="new tok/s",
    )
