# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M as transformers computes it from the weights of the GGUF file in the packages."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from model._gguf_writing import gguf_name
from transformers.initialization import no_init_weights

from paged_kv.models.gguf_file import GgufFile
from paged_kv.models.known_models import KNOWN_MODELS, find_package_files

# 614 tokens: more than the window of 512.
LONG_PROMPT = " ".join(f"Line {i}: the value of x{i} is {i * i % 97}." for i in range(40))


def gguf_file() -> GgufFile:
    """The file; the packages are test dependencies."""
    known = KNOWN_MODELS["gemma3-270m"]
    parts = find_package_files(known)
    if parts is None:
        msg = f"these tests need: {known.install}"
        raise RuntimeError(msg)
    return GgufFile(*parts)


def hf_model(embed_tokens: torch.Tensor) -> transformers.Gemma3ForCausalLM:
    """Transformers' model in float32 with the file's weights.

    Its own reader gives the same numbers and takes half a minute for this file, so names, sizes and
    the norms' offset are written out here.

    Args:
        embed_tokens: The embedding, which is most of the file, shared with another model.
    """
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        query_pre_attn_scalar=256,
        max_position_embeddings=32768,
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(config)
    file = gguf_file()
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    weights = {embedding: embed_tokens}
    for name in model.state_dict().keys() - {embedding, head}:
        pieces = np.concatenate(list(file.read_rows(gguf_name(name, "gemma3"))))
        tensor = torch.from_numpy(pieces)
        weights[name] = tensor[0] - 1 if name.endswith("norm.weight") else tensor
    with no_init_weights():
        model = transformers.Gemma3ForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if missing != [head] or unexpected:
        msg = f"other tensors than expected: {missing}, {unexpected}"
        raise RuntimeError(msg)
    model.tie_weights()
    return model.eval()
