# SPDX-License-Identifier: Apache-2.0
"""Which class computes which architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.models.gemma3 import Gemma3ForCausalLM
from paged_kv.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from paged_kv.models.decoder import DecoderForCausalLM

__all__ = ["MODEL_CLASSES", "model_class"]

MODEL_CLASSES: dict[str, type[DecoderForCausalLM]] = {
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
}
"""By Hugging Face's name of the architecture."""


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """Returns the class that computes `architecture`.

    Raises:
        ValueError: there is none.

    Example:
        >>> model_class("Qwen3ForCausalLM").__name__
        'LlamaForCausalLM'
    """
    if architecture not in MODEL_CLASSES:
        msg = f"architecture {architecture!r} is not supported: {', '.join(MODEL_CLASSES)} are"
        raise ValueError(msg)
    return MODEL_CLASSES[architecture]
