# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face model folder: configuration, tokenizer; the weights are another module."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paged_kv.models.hf_config import config_from_hf, token_ids
from paged_kv.models.optional import import_optional
from paged_kv.models.safetensors_source import read_json
from paged_kv.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from paged_kv.models.config import ModelConfig

__all__ = ["read_hf_config", "read_hf_tokenizer"]

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_hf_config(folder: Path) -> ModelConfig:
    """Read ``config.json``, and ``generation_config.json`` for the ids that end a generation.

    Raises:
        ValueError: a file is missing or corrupt, or something in it isn't supported. The message
            names the file and the key.
    """
    path = folder / "config.json"
    raw = read_json(path)
    try:
        config = config_from_hf(raw)
    except ValueError as error:
        msg = f"{path}: {error}"
        raise ValueError(msg) from None
    generation_path = folder / "generation_config.json"
    if not generation_path.is_file():
        return config
    try:
        eos = token_ids(read_json(generation_path).get("eos_token_id"), "eos_token_id")
    except ValueError as error:
        msg = f"{generation_path}: {error}"
        raise ValueError(msg) from None
    return replace(config, eos_token_ids=eos) if eos else config


def read_hf_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """Read ``tokenizer.json``, and ``tokenizer_config.json`` for the special tokens' names.

    The BOS rule is the one in ``tokenizer.json``; ``add_bos_token`` in ``tokenizer_config.json`` is
    for tokenizers without that file and decides nothing. The chat template comes from
    ``chat_template.jinja``, else from ``tokenizer_config.json`` (the one named ``default`` if there
    are several).

    Args:
        folder: the model's folder.
        config: the model's configuration, whose EOS ids the tokenizer's is added to.

    Returns:
        None if the folder has no ``tokenizer.json``.

    Raises:
        ImportError: the library tokenizers is not installed.
        ValueError: a file is corrupt; the message names it.

    Source:
        transformers 5 tokenization_utils_base.py (which rule wins).
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizers = import_optional("tokenizers", "to read tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  (the library raises plain Exception)
        msg = f"{path}: not a readable tokenizer: {error}"
        raise ValueError(msg) from None

    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    special_tokens = {
        key: text for key in _SPECIAL_TOKEN_KEYS if (text := _token_text(settings.get(key)))
    }
    ids = {key: backend.token_to_id(text) for key, text in special_tokens.items()}
    eos_token_id = ids.get("eos_token")
    return Tokenizer(
        backend,
        bos_token_id=ids.get("bos_token", config.bos_token_id),
        eos_token_ids=config.eos_token_ids
        | ({eos_token_id} if eos_token_id is not None else set()),
        chat_template=_chat_template(folder, settings, settings_path),
        special_tokens=special_tokens,
    )


def _token_text(value: object) -> str | None:
    """A special token is written as a string or as an object with its text."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, settings: dict[str, Any], settings_path: Path) -> str | None:
    jinja_path = folder / "chat_template.jinja"
    if jinja_path.is_file():
        try:
            return jinja_path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            msg = f"{jinja_path}: not a readable text file: {error}"
            raise ValueError(msg) from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        msg = f"{settings_path}: chat_template must be a string or a list of named templates"
        raise ValueError(msg)
    return template
