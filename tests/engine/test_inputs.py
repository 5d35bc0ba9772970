# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from paged_kv.engine.inputs import EncodedPrompt, check_token_ids, encode_prompt, split_prompts


class CharTokenizer:
    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) for c in text]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", ["ab"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [(1, 2)]),
        ({"prompt": "ab"}, [{"prompt": "ab"}]),
        (["a", [1], {"prompt": "b"}], ["a", [1], {"prompt": "b"}]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], []),
    ],
)
def test_one_prompt_and_a_list_of_prompts_are_told_apart(prompts, expected):
    assert split_prompts(prompts) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        "ab",
        [97, 98],
        (97, 98),
        {"prompt": "ab"},
        {"prompt_token_ids": [97, 98]},
        np.array([97, 98]).tolist(),
    ],
)
def test_every_form_of_a_prompt_gives_its_ids(prompt):
    encoded = encode_prompt(prompt, CharTokenizer(), 128)
    assert encoded.token_ids == (97, 98)
    assert encoded.text == ("ab" if prompt == "ab" or prompt == {"prompt": "ab"} else None)


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt is empty"):
        encode_prompt(prompt, CharTokenizer(), 128)


@pytest.mark.parametrize("token_id", [-1, 128, 2**40])
def test_an_id_outside_the_vocabulary_is_refused_with_its_place(token_id):
    with pytest.raises(ValueError, match=f"token id {token_id} at position 1"):
        encode_prompt([5, token_id], None, 128)
    with pytest.raises(ValueError, match=f"token id {token_id} at position 0"):
        encode_prompt(EncodedPrompt("text", (token_id,)), None, 128)


def test_numpy_integers_are_ids_and_bools_are_not():
    assert check_token_ids([np.int64(3)], 8, "prompt") == (3,)
    with pytest.raises(TypeError, match="must hold integers, got True"):
        check_token_ids([True], 8, "prompt")


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ({"text": "a"}, ValueError, "one key"),
        ({"prompt": "a", "prompt_token_ids": [1]}, ValueError, "one key"),
        ({"prompt": [1]}, TypeError, "prompt must be a string"),
        ({"prompt_token_ids": "a"}, TypeError, "must be a list of token ids"),
        ([1.5], TypeError, "must hold integers"),
        (b"ab", TypeError, "must be a list of token ids"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt, error, message):
    with pytest.raises(error, match=message):
        encode_prompt(prompt, CharTokenizer(), 128)


@pytest.mark.parametrize("prompts", [3, None, b"ab", {1, 2}])
def test_what_is_no_list_of_prompts_is_refused(prompts):
    with pytest.raises(TypeError, match="prompts must be"):
        split_prompts(prompts)


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="no tokenizer"):
        encode_prompt("ab", None, 128)
