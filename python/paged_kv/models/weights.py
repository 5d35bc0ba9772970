# SPDX-License-Identifier: Apache-2.0
"""Checks a checkpoint's tensors against a model and fills the model from them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

import torch

from paged_kv.models.registry import model_class

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paged_kv.models.config import ModelConfig
    from paged_kv.models.decoder import DecoderForCausalLM

__all__ = ["WeightSource", "build_model"]

# Kept by old checkpoints, and computed from the configuration by us.
_AUXILIARY = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_MIN_TENSORS_PER_LAYER = 7


class WeightSource(Protocol):
    """A checkpoint on disk, whatever its format; names are Hugging Face's."""

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, known without reading one."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Read tensor `name` into `out`, converting to its dtype. `out` is mutated.

        Raises:
            ValueError: the data can't be read; the message names file and tensor.
        """


def build_model(
    config: ModelConfig, source: WeightSource, *, dtype: torch.dtype
) -> DecoderForCausalLM:
    """Make the model that `config` describes and fill it from `source`.

    Nothing is allocated before every tensor is known to be there with the right shape, so a corrupt
    file can't ask for more memory than its own tensors account for.

    Tensors that the model doesn't know: one *inside* a part the model runs (a layer, the embedding,
    the final norm) would change the result, so it is refused. All else (further layers, heads for
    other tasks, a stored copy of tied weights, rotary tables) is skipped.

    Args:
        config: the model's shape.
        source: the checkpoint.
        dtype: dtype of the parameters; float32, float16 or bfloat16.

    Returns:
        The model on the CPU, in eval mode.

    Raises:
        ValueError: a tensor is missing, has another shape, is unknown as above or can't be read.
            The message names the file and the tensor.

    Notes:
        Cost: one read of the file; peak memory is the model plus one tensor.
    """
    _check_num_layers(config, source)
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    expected = {name: tuple(slot.shape) for name, slot in model.weight_slots().items()}
    _check_tensors(expected, source)

    model = model.to(dtype).to_empty(device="cpu")
    for name, slot in model.weight_slots().items():
        source.read_into(name, slot)
    model.reset_buffers()
    return model.eval()


def _check_num_layers(config: ModelConfig, source: WeightSource) -> None:
    # Before the model is made: each layer costs memory even on the meta device.
    if config.num_layers * _MIN_TENSORS_PER_LAYER > len(source.shapes):
        msg = (
            f"{source.path}: {config.num_layers} layers are announced, but there are only "
            f"{len(source.shapes)} tensors"
        )
        raise ValueError(msg)


def _check_tensors(expected: Mapping[str, tuple[int, ...]], source: WeightSource) -> None:
    missing = [name for name in expected if name not in source.shapes]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        msg = f"{source.path}: tensor {missing[0]!r}{more} is missing"
        raise ValueError(msg)
    for name, shape in expected.items():
        if source.shapes[name] != shape:
            msg = (
                f"{source.path}: tensor {name!r} has shape {list(source.shapes[name])}, "
                f"expected {list(shape)}"
            )
            raise ValueError(msg)
    num_layers = len({_layer_index(name) for name in expected} - {None})
    for name in source.shapes:
        if name not in expected and _changes_result(name, num_layers):
            msg = f"{source.path}: tensor {name!r} is not part of the supported architectures"
            raise ValueError(msg)


def _changes_result(name: str, num_layers: int) -> bool:
    if _AUXILIARY.search(name):
        return False
    index = _layer_index(name)
    if index is not None:
        return index < num_layers
    return name.startswith(("model.embed_tokens.", "model.norm.")) or name == "lm_head.bias"


def _layer_index(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None
