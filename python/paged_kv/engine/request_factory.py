# SPDX-License-Identifier: Apache-2.0
"""Makes sequences from a prompt and its parameters."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from paged_kv.engine.bad_words import encode_bad_words
from paged_kv.engine.completion import CompletionBuilder, RequestState
from paged_kv.engine.inputs import check_token_ids
from paged_kv.engine.logprobs import PromptLogprobs
from paged_kv.engine.request import Request
from paged_kv.engine.sampling_checks import check_bans, check_sampling_params
from paged_kv.engine.sampling_row import SamplingRow
from paged_kv.engine.token_texts import TokenTexts
from paged_kv.hashing import get_request_block_hasher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paged_kv.engine.inputs import EncodedPrompt
    from paged_kv.engine.sampling_params import SamplingParams
    from paged_kv.models import LoadedModel

__all__ = ["RequestFactory"]

# Lists of bad words whose token ids are kept: an application has a few.
_NUM_BAD_WORD_LISTS = 64


class RequestFactory:
    """What the requests of an engine have in common: vocabulary, lengths, hashing, seeds.

    Args:
        loaded: The model.
        max_model_len: Most tokens of a request.
        hash_block_size: Tokens per block hash; None: requests have no hashes.
        seed: Seeds of requests that give none are drawn from this one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_model_len: int,
        hash_block_size: int | None,
        seed: int,
    ) -> None:
        self._vocab_size = loaded.config.vocab_size
        self._tokenizer = loaded.tokenizer
        self._token_texts = TokenTexts(loaded.tokenizer) if loaded.tokenizer is not None else None
        # A configuration may name an id that the embedding does not have; it never comes out.
        self._eos_token_ids = frozenset(i for i in loaded.eos_token_ids if i < self._vocab_size)
        self._max_model_len = max_model_len
        self._block_hasher = (
            get_request_block_hasher(hash_block_size) if hash_block_size is not None else None
        )
        self._seeds = torch.Generator().manual_seed(seed)
        # A request is checked, often twice, before it is made, and one list serves many requests.
        self._encode_bad_words = lru_cache(_NUM_BAD_WORD_LISTS)(self._encode_bad_words_anew)

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ``ValueError`` if the model cannot serve this prompt or these parameters."""
        # The model does not look at ids. Mostly this is the second time: the quick way to see it.
        if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= self._vocab_size:
            check_token_ids(token_ids, self._vocab_size, "prompt")
        check_sampling_params(params, self._vocab_size, has_tokenizer=self._tokenizer is not None)
        bad_words = self._bad_words(params)
        check_bans(params, self._vocab_size, bad_words, self._eos_token_ids)

    def make(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        priority: int,
        arrival_time: float | None,
    ) -> RequestState:
        """Make the ``n`` completions of a prompt; the first has the id ``request_id``."""
        arrival_time = time.time() if arrival_time is None else arrival_time
        max_num_tokens = self._max_model_len
        if params.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, len(prompt.token_ids) + params.max_tokens)
        seed = self._choose_seed(params)
        bad_words = self._bad_words(params)
        builders = []
        for index in range(params.n):
            request = Request(
                request_id if index == 0 else f"{request_id}/{index}",
                prompt.token_ids,
                params,
                max_num_tokens=max_num_tokens,
                eos_token_ids=self._eos_token_ids,
                prompt=prompt.text,
                index=index,
                priority=priority,
                arrival_time=arrival_time,
                block_hasher=self._block_hasher,
            )
            row = SamplingRow(
                params,
                list(prompt.token_ids),
                len(prompt.token_ids),
                seed=seed,
                index=index,
                end_token_ids=sorted(request.end_token_ids),
                bad_words=bad_words,
            )
            builders.append(CompletionBuilder(request, row, self._tokenizer, self._token_texts))
        return RequestState(request_id, builders, self._make_prompt_logprobs(prompt, params))

    def _bad_words(self, params: SamplingParams) -> Sequence[Sequence[int]]:
        return self._encode_bad_words(tuple(params.bad_words)) if params.bad_words else ()

    def _encode_bad_words_anew(self, words: tuple[str, ...]) -> Sequence[Sequence[int]]:
        if self._tokenizer is None:  # which `check` refuses
            return ()
        return encode_bad_words(words, self._tokenizer, self._vocab_size)

    def _make_prompt_logprobs(
        self, prompt: EncodedPrompt, params: SamplingParams
    ) -> PromptLogprobs | None:
        if params.prompt_logprobs is None:
            return None
        return PromptLogprobs(prompt.token_ids, params.prompt_logprobs, self._token_texts)

    def _choose_seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        return 0 if params.is_greedy else int(torch.randint(2**63 - 1, (), generator=self._seeds))
