# SPDX-License-Identifier: Apache-2.0
"""How the next token of a request is chosen and when the request ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SamplingParams"]

# Below this temperature the softmax is a one-hot vector in float32: treat it as greedy.
_GREEDY_TEMPERATURE = 1e-5
# Integers up to here convert to float.
_MAX_INTEGER = 2**1023
# What torch.Generator.manual_seed accepts.
_SEED_RANGE = range(-(2**63), 2**64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    r"""Sampling and stopping rules of one request; checked when constructed.

    Filters apply in this order: temperature, ``min_p``, ``top_k``, ``top_p``.

    Attributes:
        temperature: Divides the logits. 0 means greedy: the most likely token, the lowest id
            among equals.
        top_k: Keep the ``top_k`` most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches ``top_p``,
            in (0, 1].
        min_p: Keep tokens at least ``min_p`` times as likely as the most likely one, in [0, 1].
        seed: Seeds the request's own generator: the same seed gives the same text, whatever else
            is in the batch. ``None`` takes a seed from the engine's generator.
        stop: Strings that end the text; they are not part of it. A single string is accepted.
        stop_token_ids: Token ids that end the text. The id is in ``token_ids``, not in the text.
        max_tokens: Most tokens to generate, at least 1. ``None``: up to the model's length.
        min_tokens: No end before this many tokens: end tokens cannot be sampled and stop strings
            are not looked for.
        ignore_eos: Go on after the model's end-of-sequence token.
        skip_reading_prefix_cache: Compute the whole prompt, whatever the prefix cache holds; its
            blocks are cached all the same. ``None`` becomes ``False``.
        extra_args: For others: :class:`paged_kv.Request` reads ``"kv_cache_report_mode"``, the
            engine reads nothing. Not copied.

    Raises:
        ValueError: A value out of range; the message names the field and the value.
        TypeError: A value of the wrong type.

    Source:
        Names and meaning follow vLLM 0.32 ``vllm/sampling_params.py``.

    Example:
        >>> SamplingParams(temperature=0.0, max_tokens=8, stop="\n").stop
        ('\n',)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_args: Mapping[str, object] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        self._check_distribution()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check_end()
        self._check_cache_use()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop or ())

    def _check_distribution(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                msg = f"{name} must be a number, got {value!r}"
                raise TypeError(msg)
            if isinstance(value, int) and abs(value) > _MAX_INTEGER:
                msg = f"{name} is an integer of {value.bit_length()} bits: no float can hold it"
                raise ValueError(msg)
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            msg = f"temperature must be finite and at least 0, got {self.temperature}"
            raise ValueError(msg)
        if not 0.0 < self.top_p <= 1.0:
            msg = f"top_p must be in (0, 1], got {self.top_p}"
            raise ValueError(msg)
        if not 0.0 <= self.min_p <= 1.0:
            msg = f"min_p must be in [0, 1], got {self.min_p}"
            raise ValueError(msg)
        if _as_int("top_k", self.top_k) < -1:
            msg = f"top_k must be at least 1, or 0 or -1 for no limit, got {self.top_k}"
            raise ValueError(msg)
        if self.seed is not None and _as_int("seed", self.seed) not in _SEED_RANGE:
            msg = f"seed must be in [-2**63, 2**64), got {self.seed}"
            raise ValueError(msg)

    def _check_end(self) -> None:
        if self.max_tokens is not None and _as_int("max_tokens", self.max_tokens) < 1:
            msg = f"max_tokens must be at least 1, got {self.max_tokens}"
            raise ValueError(msg)
        if _as_int("min_tokens", self.min_tokens) < 0:
            msg = f"min_tokens must be at least 0, got {self.min_tokens}"
            raise ValueError(msg)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            msg = (
                f"min_tokens must be at most max_tokens, got {self.min_tokens} > {self.max_tokens}"
            )
            raise ValueError(msg)
        for text in self.stop_strings:
            if not isinstance(text, str):
                msg = f"stop must hold strings, got {text!r}"
                raise TypeError(msg)
            if not text:
                msg = "stop must not hold an empty string"
                raise ValueError(msg)
        for token_id in self.stop_token_ids or ():
            if _as_int("stop_token_ids", token_id) < 0:
                msg = f"stop_token_ids must be at least 0, got {token_id}"
                raise ValueError(msg)

    def _check_cache_use(self) -> None:
        skip = self.skip_reading_prefix_cache
        if skip is not None and not isinstance(skip, bool):
            msg = f"skip_reading_prefix_cache must be a bool or None, got {skip!r}"
            raise TypeError(msg)
        object.__setattr__(self, "skip_reading_prefix_cache", bool(skip))
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            msg = f"extra_args must be a mapping or None, got {self.extra_args!r}"
            raise TypeError(msg)


def _as_int(name: str, value: object) -> int:
    if isinstance(value, bool):
        msg = f"{name} must be an integer, got {value!r}"
        raise TypeError(msg)
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        msg = f"{name} must be an integer, got {value!r}"
        raise TypeError(msg) from None
