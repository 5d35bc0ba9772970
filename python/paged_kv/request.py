# SPDX-License-Identifier: Apache-2.0
"""A request as the cache manager sees it: tokens, block hashes, and what else names its blocks.

Source:
    vLLM 0.32 v1/request.py, multimodal/inputs.py, lora/request.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_kv import _core, hashing
from paged_kv._core import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from paged_kv._core import BlockHashList

__all__ = [
    "LoRARequest",
    "MultiModalFeatureSpec",
    "PlaceholderRange",
    "Request",
    "RequestStatus",
]


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a request.

    Attributes:
        lora_name: Part of the key of each block.
        lora_int_id: For events.
        lora_path: Part of the key too: a name may be pointed at another adapter.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """The tokens in whose place a medium's embeddings stand.

    Attributes:
        offset: First token.
        length: Number of tokens.
    """

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class MultiModalFeatureSpec:
    """A picture, sound, ... in a prompt.

    Attributes:
        data: Its processed data; not read here.
        modality: For example ``"image"``; not read here.
        identifier: Names its content: part of the key of each block that it reaches into.
        mm_position: Where it stands.
    """

    data: object
    modality: str
    identifier: str
    mm_position: PlaceholderRange


class Request(_core.Request):
    """A sequence of tokens to be computed.

    Tokens, hashes and counters live in C++ (`paged_kv._core.Request`); this class adds vLLM's
    constructor and the fields that only Python reads.

    Args:
        request_id: Names the request; no two live requests of a manager share one.
        prompt_token_ids: ``[num_prompt_tokens]``: a list, or an int32 or int64 array. None if the
            prompt is `prompt_embeds` alone; each token id is then 0.
        sampling_params: Read where present: ``skip_reading_prefix_cache`` (None: whether
            ``prompt_logprobs`` is set), ``max_tokens`` and ``extra_args["kv_cache_report_mode"]``.
        pooling_params: ``skip_reading_prefix_cache`` is read where present.
        arrival_time: Seconds; None: now.
        prompt_embeds: ``[num_prompt_tokens, hidden_size]``, C-contiguous. Not copied.
        mm_features: Media in the prompt, ordered by offset. They may overlap.
        lora_request: The adapter.
        cache_salt: Only requests with the same salt share blocks.
        priority: Lower is served sooner.
        block_hasher: From `get_request_block_hasher`, or any function of the request that returns
            the hashes of its full blocks without one. None: its blocks cannot be cached.
        session_id: For events.

    Raises:
        ValueError: No prompt, a token id or media position out of range, or media out of order.
        TypeError: A value of the wrong type.

    Source:
        vLLM 0.32 v1/request.py::Request.

    Example:
        >>> from paged_kv import get_request_block_hasher
        >>> hasher = get_request_block_hasher(hash_block_size=4)
        >>> request = Request("r0", [1, 2, 3, 4, 5], block_hasher=hasher)
        >>> request.append_output_token_ids([6, 7, 8])
        >>> request.num_tokens, request.num_block_hashes
        (8, 2)
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray | None,
        sampling_params: object = None,
        pooling_params: object = None,
        *,
        arrival_time: float | None = None,
        prompt_embeds: np.ndarray | None = None,
        mm_features: Sequence[MultiModalFeatureSpec] | None = None,
        lora_request: LoRARequest | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        block_hasher: Callable[[Request], BlockHashList | Sequence[bytes]] | None = None,
        session_id: str | None = None,
    ) -> None:
        super().__init__(
            request_id,
            prompt_token_ids,
            lora_request=lora_request,
            mm_features=mm_features,
            cache_salt=cache_salt,
            prompt_embeds=prompt_embeds,
            session_id=session_id,
            priority=priority,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            skip_reading_prefix_cache=_skips_reading(sampling_params, pooling_params),
            reports_reused_blocks=_report_mode(sampling_params) == "full",
        )
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.lora_request = lora_request
        self.mm_features = list(mm_features or ())
        self.prompt_embeds = prompt_embeds
        algorithm = getattr(block_hasher, "algorithm", None)
        if isinstance(block_hasher, hashing.RequestBlockHasher) and algorithm is not None:
            self.set_block_hasher(block_hasher.hash_block_size, hashing.NONE_HASH, algorithm)
        elif block_hasher is not None:
            self.set_block_hasher(block_hasher)

    @property
    def max_tokens(self) -> int | None:
        """Most output tokens; None: no limit of its own. 1 with `pooling_params`."""
        if self.pooling_params is not None:
            return 1
        return getattr(self.sampling_params, "max_tokens", None)

    @property
    def kv_cache_report_mode(self) -> str:
        """``"full"``: blocks reused from the prefix cache are reported by events too."""
        return _report_mode(self.sampling_params)


def _skips_reading(sampling_params: object, pooling_params: object) -> bool:
    for params in (sampling_params, pooling_params):
        skip = getattr(params, "skip_reading_prefix_cache", None)
        if skip is not None:
            return bool(skip)
    # Tokens that are found in the cache have no logits.
    return getattr(sampling_params, "prompt_logprobs", None) is not None


def _report_mode(sampling_params: object) -> str:
    extra_args = getattr(sampling_params, "extra_args", None) or {}
    return str(extra_args.get("kv_cache_report_mode", "incremental"))
