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
_MAX_LOGIT_BIAS = 100.0
_NUMBER_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
# Integers up to here convert to float.
_MAX_INTEGER = 2**1023
# What torch.Generator.manual_seed accepts.
_SEED_RANGE = range(-(2**63), 2**64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    r"""Sampling and stopping rules of one request; checked when constructed.

    They apply in this order: bans and ``logit_bias``, the three penalties, temperature, ``min_p``,
    ``top_k``, ``top_p``. Log probabilities are those of the model, before all of these.

    Attributes:
        n: Completions of each prompt, at least 1. Greedy ones are all the same, which is allowed
            (vLLM refuses it).
        temperature: Divides the logits. 0 means greedy: the most likely token, the lowest id
            among equals.
        top_k: Keep the ``top_k`` most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches ``top_p``,
            in (0, 1].
        min_p: Keep tokens at least ``min_p`` times as likely as the most likely one, in [0, 1].
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens that
            the prompt or the output holds; above 0, 1 for none.
        presence_penalty: Taken off the logits of tokens that the output holds, in [-2, 2].
        frequency_penalty: Taken off for each time that the output holds the token, in [-2, 2].
        logit_bias: Added to the logits of these token ids, clamped to [-100, 100].
        bad_words: Words that do not come out: the last token of one is banned whenever the output
            ends with its others. Spelled with other tokens, a word may still come out.
        logprobs: How many of the most likely tokens to give the log probabilities of, beside the
            chosen one; -1 for the whole vocabulary, ``None`` for no log probabilities.
        prompt_logprobs: The same for the tokens of the prompt.
        seed: The same seed gives the same text, whatever else is in the batch. ``None`` takes a
            seed from the engine's generator.
        stop: Strings that end the text; they are not part of it. A single string is accepted.
        stop_token_ids: Token ids that end the text. The id is in ``token_ids``, not in the text.
        max_tokens: Most tokens to generate, at least 1. ``None``: up to the model's length.
        min_tokens: No end before this many tokens: end tokens cannot be sampled and stop strings
            are not looked for.
        ignore_eos: Go on after the model's end-of-sequence token.
        skip_reading_prefix_cache: Compute the whole prompt, whatever the prefix cache holds; its
            blocks are cached all the same. ``None``: if ``prompt_logprobs`` are asked for, as those
            of cached tokens would be missing; then ``False`` is refused.
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

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: Sequence[str] | None = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_args: Mapping[str, object] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_distribution()
        self._check_penalties()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if isinstance(self.bad_words, str):
            msg = f"bad_words must be a list of strings, got {self.bad_words!r}"
            raise TypeError(msg)
        object.__setattr__(self, "bad_words", tuple(dict.fromkeys(self.bad_words or ())))
        object.__setattr__(self, "logit_bias", _clamp_logit_bias(self.logit_bias))
        self._check_strings()
        self._check_end()
        self._check_logprobs()
        self._check_cache_use()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop or ())

    def _check_numbers(self) -> None:
        for name in _NUMBER_FIELDS:
            _check_number(name, getattr(self, name))

    def _check_distribution(self) -> None:
        if _as_int("n", self.n) < 1:
            msg = f"n must be at least 1, got {self.n}"
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

    def _check_penalties(self) -> None:
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            msg = f"repetition_penalty must be finite and above 0, got {self.repetition_penalty}"
            raise ValueError(msg)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -2.0 <= value <= 2.0:
                msg = f"{name} must be in [-2, 2], got {value}"
                raise ValueError(msg)

    def _check_strings(self) -> None:
        for name, texts in (("stop", self.stop_strings), ("bad_words", self.bad_words or ())):
            for text in texts:
                if not isinstance(text, str):
                    msg = f"{name} must hold strings, got {text!r}"
                    raise TypeError(msg)
                if not text:
                    msg = f"{name} must not hold an empty string"
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
        for token_id in self.stop_token_ids or ():
            if _as_int("stop_token_ids", token_id) < 0:
                msg = f"stop_token_ids must be at least 0, got {token_id}"
                raise ValueError(msg)

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and _as_int(name, value) < -1:
                msg = f"{name} must be at least 0, or -1 for the whole vocabulary, got {value}"
                raise ValueError(msg)

    def _check_cache_use(self) -> None:
        skip = self.skip_reading_prefix_cache
        if skip is not None and not isinstance(skip, bool):
            msg = f"skip_reading_prefix_cache must be a bool or None, got {skip!r}"
            raise TypeError(msg)
        if skip is False and self.prompt_logprobs is not None:
            msg = (
                "skip_reading_prefix_cache must not be False with prompt_logprobs: tokens from the "
                "cache have no logits"
            )
            raise ValueError(msg)
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            msg = f"extra_args must be a mapping or None, got {self.extra_args!r}"
            raise TypeError(msg)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"{name} must be a number, got {value!r}"
        raise TypeError(msg)
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        msg = f"{name} is an integer of {value.bit_length()} bits: no float can hold it"
        raise ValueError(msg)


def _clamp_logit_bias(logit_bias: object) -> dict[int, float] | None:
    """A copy with ids as int; a string of digits, as JSON has it, is an id too."""
    if logit_bias is None:
        return None
    if not isinstance(logit_bias, Mapping):
        msg = f"logit_bias must be a mapping of token ids to numbers, got {logit_bias!r}"
        raise TypeError(msg)
    clamped = {}
    for key, bias in logit_bias.items():
        is_digits = isinstance(key, str) and key.isdecimal()
        token_id = int(key) if is_digits else _as_int("logit_bias", key)
        _check_number(f"logit_bias[{token_id}]", bias)
        if token_id < 0 or math.isnan(bias):
            msg = f"logit_bias must map ids of at least 0 to numbers, got {token_id}: {bias}"
            raise ValueError(msg)
        clamped[token_id] = min(max(float(bias), -_MAX_LOGIT_BIAS), _MAX_LOGIT_BIAS)
    return clamped


def _as_int(name: str, value: object) -> int:
    if isinstance(value, bool):
        msg = f"{name} must be an integer, got {value!r}"
        raise TypeError(msg)
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        msg = f"{name} must be an integer, got {value!r}"
        raise TypeError(msg) from None
