# SPDX-License-Identifier: Apache-2.0
"""Decoder models over a paged KV cache: loading, tokenizers, the forward pass."""

from __future__ import annotations

from paged_kv.models.config import ModelConfig, RopeScaling
from paged_kv.models.decoder import DecoderForCausalLM
from paged_kv.models.gemma3 import Gemma3ForCausalLM
from paged_kv.models.llama import LlamaForCausalLM
from paged_kv.models.loader import LoadedModel, load_model
from paged_kv.models.tokenizer import Tokenizer

__all__ = [
    "DecoderForCausalLM",
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "LoadedModel",
    "ModelConfig",
    "RopeScaling",
    "Tokenizer",
    "load_model",
]
