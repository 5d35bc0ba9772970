# SPDX-License-Identifier: Apache-2.0
"""Scales of quantised caches: found by a calibration pass, kept in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from paged_kv._cache_panels import as_nhd
from paged_kv.engine.config import EngineConfig
from paged_kv.engine.inputs import EncodedPrompt
from paged_kv.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from paged_kv.engine.llm_engine import LLMEngine
    from paged_kv.models import LoadedModel

__all__ = [
    "KVScales",
    "calibrate_kv_scales",
    "choose_kv_scales",
    "load_kv_scales",
    "save_kv_scales",
]

KVScales: TypeAlias = "Mapping[str, tuple[Tensor, Tensor]]"
"""For each layer by name ``(k_scale, v_scale)``, float32 ``[1]`` or ``[num_kv_heads]``."""

# The largest number of each type: what a scale of 1 can store.
_LARGEST = {"fp8": 448.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
# Others than the calibration's tokens may have larger keys and values.
_MARGIN = 1.1
_NUM_RANDOM_TOKENS = 512
_REQUEST_ID = "calibration"


def calibrate_kv_scales(
    loaded: LoadedModel,
    kv_cache_dtype: str,
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    block_size: int = 16,
    device: str = "cpu",
) -> dict[str, tuple[Tensor, Tensor]]:
    """Find scales with which a quantised cache holds a model's keys and values.

    The model runs over the prompts with a cache in its own type; the largest key and value of each
    layer and head, and a tenth more, become the largest number that the type has.

    Args:
        loaded: The model.
        kv_cache_dtype: ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"`` or ``"int8"``.
        prompts: Token ids, of texts like those to come. ``None``: random ids, which is enough for
            fp8, whose precision does not depend on the scale.
        block_size: Tokens per block while calibrating.
        device: Where the model runs; it is moved there.

    Returns:
        ``(k_scale, v_scale)`` of each layer by name, float32 ``[num_kv_heads]``.

    Raises:
        ValueError: Another ``kv_cache_dtype``, or no prompts.

    Notes:
        Packs the model's weights, as an engine does. Cost: one prefill of each prompt.

    Example:
        >>> from paged_kv import LLM
        >>> from paged_kv.engine.kv_scales import calibrate_kv_scales
        >>> from paged_kv.models import load_model
        >>> loaded = load_model("smollm2-135m")
        >>> texts = ["The quick brown fox jumps over the lazy dog."]
        >>> ids = [loaded.tokenizer.encode(text) for text in texts]
        >>> scales = calibrate_kv_scales(loaded, "int8", ids)
        >>> llm = LLM(loaded, num_blocks=64, kv_cache_dtype="int8", kv_scales=scales)
    """
    if kv_cache_dtype not in _LARGEST:
        msg = f"kv_cache_dtype must be one of {', '.join(_LARGEST)}, got {kv_cache_dtype!r}"
        raise ValueError(msg)
    if prompts is None:
        prompts = [_random_prompt(loaded)]
    if not prompts or not all(prompts):
        msg = "prompts must be lists of at least one token id each, and at least one list"
        raise ValueError(msg)
    largest: dict[str, tuple[Tensor, Tensor]] = {}
    engine = _make_engine(loaded, max(map(len, prompts)), block_size, device)
    for prompt in prompts:
        for name, found in _run(engine, prompt).items():
            before = largest.get(name, found)
            largest[name] = (
                torch.maximum(before[0], found[0]),
                torch.maximum(before[1], found[1]),
            )
    divisor = _LARGEST[kv_cache_dtype] / _MARGIN
    return {name: (_scale(k, divisor), _scale(v, divisor)) for name, (k, v) in largest.items()}


def choose_kv_scales(
    loaded: LoadedModel, config: EngineConfig, kv_scales: KVScales | None
) -> KVScales | None:
    """The scales that were given; for a quantised cache without any, those of random tokens."""
    if config.kv_cache_dtype == "auto" or kv_scales is not None:
        return kv_scales
    return calibrate_kv_scales(
        loaded, config.kv_cache_dtype, block_size=config.block_size, device=config.device
    )


def save_kv_scales(path: str | Path, scales: KVScales) -> None:
    """Write scales to a JSON file: ``{layer: {"k_scale": [...], "v_scale": [...]}}``."""
    record = {
        name: {"k_scale": k_scale.tolist(), "v_scale": v_scale.tolist()}
        for name, (k_scale, v_scale) in scales.items()
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def load_kv_scales(path: str | Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Read what :func:`save_kv_scales` has written.

    Raises:
        ValueError: Not such a file, or a scale that is not positive and finite.
        OSError: A file that cannot be read.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        scales = {
            str(name): (_as_scale(entry["k_scale"]), _as_scale(entry["v_scale"]))
            for name, entry in record.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"{path}: not a file of scales: {error}"
        raise ValueError(msg) from None
    return scales


def _make_engine(
    loaded: LoadedModel, max_prompt_tokens: int, block_size: int, device: str
) -> LLMEngine:
    # Here since the engine itself calibrates where it is given no scales.
    from paged_kv.engine.llm_engine import LLMEngine

    num_tokens = min(max_prompt_tokens, loaded.config.max_position_embeddings - 1)
    config = EngineConfig(
        device=device,
        block_size=block_size,
        kv_cache_memory_bytes=_bytes_for(loaded, num_tokens + 1, block_size),
        max_model_len=num_tokens + 1,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    return LLMEngine(loaded, config)


def _run(engine: LLMEngine, prompt: Sequence[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """The largest key and value of each layer and head, over the tokens of a prompt."""
    largest: dict[str, tuple[Tensor, Tensor]] = {}

    def look(engine: LLMEngine) -> None:
        # Layers of other groups use the same memory, in other blocks.
        tables = engine.kv_cache_manager.get_block_ids(_REQUEST_ID)
        groups = engine.kv_cache_manager.kv_cache_config.kv_cache_groups
        for block_ids, group in zip(tables, groups, strict=True):
            for name in group.layer_names:
                cache = engine.cache_engine.kv_caches[name]
                largest[name] = (
                    _largest_of_heads(cache.key, block_ids, len(token_ids)),
                    _largest_of_heads(cache.value, block_ids, len(token_ids)),
                )

    token_ids = tuple(prompt[: engine.max_model_len - 1])
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.add_request(_REQUEST_ID, EncodedPrompt(None, token_ids), params)
    engine.step(look)
    return largest


def _bytes_for(loaded: LoadedModel, num_tokens: int, block_size: int) -> int:
    """Enough for a request of this length, whatever the groups: every layer keeps all tokens."""
    dtype = loaded.model.dtype
    specs = loaded.model.kv_cache_specs(block_size, dtype).values()
    blocks_of_a_layer = -(-num_tokens // block_size) + 2
    return 2 * blocks_of_a_layer * sum(spec.page_size_bytes for spec in specs)


def _random_prompt(loaded: LoadedModel) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(_NUM_RANDOM_TOKENS, loaded.config.max_position_embeddings - 1)
    ids = torch.randint(loaded.config.vocab_size, (num_tokens,), generator=generator).tolist()
    # The first token, which all attend to, often has the largest keys.
    bos = loaded.config.bos_token_id
    return ids if bos is None else [bos, *ids[1:]]


def _largest_of_heads(tensor: Tensor, block_ids: list[int], num_tokens: int) -> Tensor:
    """``[num_kv_heads]`` float32, over the tokens that lie in these blocks."""
    return as_nhd(tensor[block_ids]).flatten(0, 1)[:num_tokens].abs().amax(dim=(0, 2)).float()


def _scale(largest: Tensor, divisor: float) -> Tensor:
    # A head of zeros needs no scale.
    return torch.where(largest > 0, largest / divisor, torch.ones_like(largest))


def _as_scale(values: object) -> Tensor:
    scale = torch.tensor(values, dtype=torch.float32)
    if scale.dim() != 1 or not bool((scale.isfinite() & (scale > 0)).all()):
        msg = f"scales must be lists of positive numbers, got {values!r:.60}"
        raise ValueError(msg)
    return scale
