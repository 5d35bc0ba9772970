# SPDX-License-Identifier: Apache-2.0
"""Request: tokens, incremental block hashes, and what else goes into them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paged_kv import (
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    RequestStatus,
    get_request_block_hasher,
    hash_blocks,
    sha256_cbor,
)

VECTORS = Path(__file__).parents[1] / "data/hash_vectors.json.gz"
HASHER = get_request_block_hasher(4)


def vllm_requests():
    with gzip.open(VECTORS, "rt", encoding="ascii") as file:
        return json.load(file)["requests"]


@pytest.mark.parametrize("record", vllm_requests(), ids=lambda record: record["req"]["id"])
def test_block_hashes_are_those_of_vllm(record):
    """Prompt and outputs, with adapter, salt and media."""
    given = record["req"]
    lora = given.get("lora")
    request = Request(
        given["id"],
        given["prompt"],
        lora_request=lora and LoRARequest(lora["name"], lora["id"], lora["path"]),
        cache_salt=given.get("cache_salt"),
        mm_features=[
            MultiModalFeatureSpec(
                None, "image", f["id"], PlaceholderRange(f["offset"], f["length"])
            )
            for f in given.get("mm") or ()
        ],
        block_hasher=get_request_block_hasher(record["hash_block_size"]),
    )
    for token_ids in given.get("outputs", []):
        request.append_output_token_ids(token_ids)
    assert [block_hash.hex() for block_hash in request.block_hashes] == record["hashes"]


def test_blocks_are_hashed_as_they_fill():
    request = Request("r", [1, 2, 3], block_hasher=HASHER)
    assert request.num_block_hashes == 0
    request.append_output_token_ids(4)
    assert list(request.block_hashes) == list(hash_blocks([1, 2, 3, 4], 4))
    request.append_output_token_ids([5, 6, 7, 8, 9])
    assert list(request.block_hashes) == list(hash_blocks([1, 2, 3, 4, 5, 6, 7, 8, 9], 4))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tokens_may_be_a_list_or_an_array(dtype):
    from_array = Request("r", np.arange(9, dtype=dtype), block_hasher=HASHER)
    from_list = Request("r", list(range(9)), block_hasher=HASHER)
    assert from_array.all_token_ids.tolist() == from_list.all_token_ids.tolist()
    assert list(from_array.block_hashes) == list(from_list.block_hashes)


def test_counts_of_tokens():
    request = Request("r", [1, 2, 3])
    request.append_output_token_ids([7, 8])
    request.spec_token_ids = [9]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 2)
    assert (request.num_tokens, request.num_tokens_with_spec) == (5, 6)
    assert request.output_token_ids.tolist() == [7, 8]


def test_results_are_copies():
    request = Request("r", [1, 2, 3, 4], block_hasher=HASHER)
    request.all_token_ids[0] = 9
    request.block_hashes.truncate(0)
    assert request.all_token_ids.tolist() == [1, 2, 3, 4]
    assert request.num_block_hashes == 1


def test_any_function_can_hash():
    """It is asked for the blocks that have no hash, with the Python object itself."""
    seen = []

    def hasher(request):
        seen.append(request)
        first = request.num_block_hashes
        return [bytes([i]) * 32 for i in range(first, request.num_tokens // 2)]

    request = Request("r", [1, 2, 3], block_hasher=hasher)
    request.append_output_token_ids(4)
    assert [block_hash[0] for block_hash in request.block_hashes] == [0, 1]
    assert all(one is request for one in seen)


def test_another_hash_function_sees_parent_tokens_and_keys():
    calls = []

    def hash_function(value):
        calls.append(value)
        return sha256_cbor(value)

    hasher = get_request_block_hasher(2, hash_function)
    request = Request("r", [1, 2, 3, 4], cache_salt="s", block_hasher=hasher)
    native = Request("r", [1, 2, 3, 4], cache_salt="s", block_hasher=get_request_block_hasher(2))
    assert list(request.block_hashes) == list(native.block_hashes)
    assert calls[0][1:] == ((1, 2), (("cache_salt", "s"),))


def test_a_hasher_that_fails_leaves_the_request_as_it_was():
    def hasher(request):
        if request.num_tokens > 2:
            raise RuntimeError
        return []

    request = Request("r", [1, 2], block_hasher=hasher)
    with pytest.raises(RuntimeError):
        request.append_output_token_ids([3, 4])
    assert request.all_token_ids.tolist() == [1, 2]


def test_prompt_embeds_stand_for_tokens():
    embeds = np.arange(12, dtype=np.float32).reshape(6, 2)
    request = Request("r", None, prompt_embeds=embeds, block_hasher=HASHER)
    other = Request("r", None, prompt_embeds=embeds + 1, block_hasher=HASHER)
    assert request.all_token_ids.tolist() == [0] * 6
    assert list(request.block_hashes) != list(other.block_hashes)


def test_what_sampling_parameters_say():
    params = SimpleNamespace(
        max_tokens=5,
        skip_reading_prefix_cache=True,
        extra_args={"kv_cache_report_mode": "full"},
    )
    request = Request("r", [1], params)
    assert request.skip_reading_prefix_cache
    assert request.kv_cache_report_mode == "full"
    assert request.max_tokens == 5
    plain = Request("r", [1])
    assert not plain.skip_reading_prefix_cache
    assert plain.kv_cache_report_mode == "incremental"
    assert plain.max_tokens is None
    assert Request("r", [1], None, SimpleNamespace(skip_reading_prefix_cache=True)).max_tokens == 1


def test_statuses_after_preempted_are_finished():
    request = Request("r", [1], priority=3, arrival_time=2.5, session_id="s")
    assert (request.priority, request.arrival_time, request.session_id) == (3, 2.5, "s")
    assert request.status == RequestStatus.WAITING
    for status in RequestStatus.__members__.values():
        request.status = status
        assert request.is_finished() == (status > RequestStatus.PREEMPTED)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"prompt_token_ids": None}, ValueError),
        ({"prompt_token_ids": [2**31]}, ValueError),
        ({"prompt_token_ids": [1.5]}, TypeError),
        ({"prompt_token_ids": ["a"]}, TypeError),
        ({"prompt_token_ids": [1], "prompt_embeds": np.zeros(3)}, TypeError),
        ({"prompt_token_ids": [1], "cache_salt": 3}, (TypeError, RuntimeError)),
    ],
)
def test_bad_arguments_are_refused(arguments, error):
    with pytest.raises(error):
        Request("r", **arguments)


def test_a_medium_out_of_range_is_refused():
    feature = MultiModalFeatureSpec(None, "image", "id", PlaceholderRange(-1, 2))
    with pytest.raises(ValueError, match="mm_features"):
        Request("r", [1], mm_features=[feature])


def test_a_bad_token_changes_nothing():
    request = Request("r", [1, 2, 3], block_hasher=HASHER)
    for tokens in ([4, 2**31], [4, "x"], 2**40):
        with pytest.raises((ValueError, TypeError)):
            request.append_output_token_ids(tokens)
    assert request.all_token_ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="hash_block_size must be positive"):
        request.set_block_hasher(0, bytes(32))
    request.append_output_token_ids(4)
    assert request.num_block_hashes == 1
