# SPDX-License-Identifier: Apache-2.0
"""Finds a model by path or name and loads it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paged_kv.models.gguf import GgufSource
from paged_kv.models.gguf_config import config_from_gguf
from paged_kv.models.gguf_file import GgufFile
from paged_kv.models.gguf_tokenizer import tokenizer_from_gguf
from paged_kv.models.hf_folder import read_hf_config, read_hf_tokenizer
from paged_kv.models.known_models import KNOWN_MODELS, find_package_files
from paged_kv.models.safetensors_source import SafetensorsSource
from paged_kv.models.weights import build_model

if TYPE_CHECKING:
    from paged_kv.models.config import ModelConfig
    from paged_kv.models.decoder import DecoderForCausalLM
    from paged_kv.models.tokenizer import Tokenizer

__all__ = ["LoadedModel", "load_model"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# No pickles: they are never read, so never fetched.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: the decoder, in eval mode.
        config: its shape. Ids to feed are ``0 .. config.vocab_size - 1``.
        tokenizer: None if the files have none: prompts are token ids then.
        eos_token_ids: ids that end a generation.
        name: what it was loaded by.
    """

    model: DecoderForCausalLM
    config: ModelConfig
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    name: str


def load_model(model: str | Path, *, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load a decoder with its tokenizer.

    Pickled weights (``.bin``) are never read.

    Args:
        model: a Hugging Face folder, a ``.gguf`` file, the name ``smollm2-135m`` or
            ``gemma3-270m``, or a hub id ``org/name`` (needs huggingface_hub). A path that exists is
            taken for a path first.
        dtype: dtype of the parameters: float32, float16 or bfloat16. Don't convert the model
            afterwards: rotary frequencies must stay float32.

    Returns:
        The model on the CPU, its tokenizer and the ids that end a generation.

    Raises:
        ValueError: no such model, a file that is corrupt or truncated, a missing or misshapen
            tensor, something that isn't supported. One line, naming file and tensor or key.
        ImportError: a library that this kind of model needs is missing; names what to install.

    Notes:
        Cost: reads every weight once. Peak memory is the model plus one tensor.

    Example:
        >>> from paged_kv.models import load_model
        >>> loaded = load_model("smollm2-135m")
        >>> loaded.config.num_kv_heads, loaded.eos_token_ids >= {2}
        (3, True)
    """
    if dtype not in _DTYPES:
        msg = f"dtype must be torch.float32, float16 or bfloat16, got {dtype!r}"
        raise ValueError(msg)
    name = str(model)
    path, *more_parts = _locate(name)
    if path.is_dir():
        return _load_folder(path, name, dtype)
    return _load_gguf(GgufFile(path, *more_parts), name, dtype)


def _load_folder(folder: Path, name: str, dtype: torch.dtype) -> LoadedModel:
    config = read_hf_config(folder)
    with SafetensorsSource(folder) as source:
        tokenizer = read_hf_tokenizer(folder, config)
        decoder = build_model(config, source, dtype=dtype)
    eos_token_ids = config.eos_token_ids | (tokenizer.eos_token_ids if tokenizer else frozenset())
    return LoadedModel(decoder, config, tokenizer, eos_token_ids, name)


def _load_gguf(file: GgufFile, name: str, dtype: torch.dtype) -> LoadedModel:
    config = config_from_gguf(file)
    tokenizer = tokenizer_from_gguf(file)
    decoder = build_model(config, GgufSource(file, config), dtype=dtype)
    return LoadedModel(decoder, config, tokenizer, config.eos_token_ids, name)


def _locate(name: str) -> list[Path]:
    """Find a model's folder, its file, or the parts of its file."""
    if not name:  # which Path would take for the current folder
        msg = "model is an empty string"
        raise ValueError(msg)
    path = Path(name)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return [path]
    if path.exists():
        msg = f"{path}: neither a model folder nor a .gguf file"
        raise ValueError(msg)
    if name in KNOWN_MODELS:
        return _locate_known(name)
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return [_download(name)]
    msg = f"{name}: no such folder or .gguf file, and not a model name"
    raise ValueError(msg)


def _locate_known(name: str) -> list[Path]:
    model = KNOWN_MODELS[name]
    files = find_package_files(model)
    if files is not None:
        return files
    if model.hub_id is None:
        msg = f"{name} is not installed: {model.install}"
        raise ValueError(msg)
    if importlib.util.find_spec("huggingface_hub") is None:
        msg = f"{name} is not installed: {model.install}, or pip install huggingface_hub"
        raise ValueError(msg)
    try:
        return [_download(model.hub_id)]
    except ValueError as error:
        msg = f"{name} is not installed ({model.install}) and the hub can't be used: {error}"
        raise ValueError(msg) from None


def _download(hub_id: str) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        msg = f"{hub_id}: no such folder; to load it from the hub: pip install huggingface_hub"
        raise ValueError(msg)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # noqa: BLE001  (the errors of whatever HTTP library it is built on)
        reason = str(error).strip().partition("\n")[0]
        msg = f"{hub_id}: can't be downloaded: {reason}"
        raise ValueError(msg) from None
