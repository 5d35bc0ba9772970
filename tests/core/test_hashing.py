# SPDX-License-Identifier: Apache-2.0
"""Block hashes: golden vectors, what enters a key, chains (docs/invariants.md, V15 to V20)."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paged_kv import _core, hashing
from paged_kv.hashing import (
    BlockHashList,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    hash_block_tokens,
    hash_blocks,
    init_none_hash,
    make_block_hash_with_group_id,
    sha256_cbor,
)

DATA = Path(__file__).resolve().parent.parent / "data"
VECTORS = json.loads(gzip.decompress((DATA / "hash_vectors.json.gz").read_bytes()))


@pytest.fixture(autouse=True)
def _default_seed(monkeypatch):
    """Tests run with the default NONE_HASH, whatever the environment of pytest says."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    init_none_hash()
    yield
    monkeypatch.undo()
    init_none_hash()


def set_seed(monkeypatch, seed: str | None) -> None:
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    init_none_hash()


def extra_keys_from_json(value):
    if isinstance(value, dict):
        return bytes.fromhex(value["b"])
    if isinstance(value, list):
        return tuple(extra_keys_from_json(item) for item in value)
    return value


def make_request(tokens, *, lora=None, mm=None, salt=None, embeds=None) -> SimpleNamespace:
    return SimpleNamespace(
        all_token_ids=tokens,
        block_hashes=BlockHashList(),
        lora_request=lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1]),
        mm_features=[
            SimpleNamespace(
                identifier=name, mm_position=SimpleNamespace(offset=offset, length=length)
            )
            for name, offset, length in mm or []
        ],
        cache_salt=salt,
        prompt_embeds=embeds,
    )


def chain_of(request, block_size: int = 4) -> list[bytes]:
    return list(get_request_block_hasher(block_size)(request))


# --- golden vectors ---------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["none_hash"], ids=lambda v: repr(v["seed"]))
def test_none_hash_is_that_of_vllm(vector, monkeypatch):
    set_seed(monkeypatch, vector["seed"])
    assert hashing.NONE_HASH.hex() == vector["hash"]


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: v["name"])
def test_hash_chain_is_that_of_vllm(vector, monkeypatch):
    set_seed(monkeypatch, vector["seed"])
    parent = None
    for block in vector["chain"]:
        keys = extra_keys_from_json(block["extra_keys"])
        by_list = hash_block_tokens(sha256_cbor, parent, block["tokens"], keys)
        by_array = hash_block_tokens(sha256_cbor, parent, np.array(block["tokens"]), keys)
        by_value = sha256_cbor((parent or hashing.NONE_HASH, tuple(block["tokens"]), keys))
        assert by_list.hex() == by_array.hex() == by_value.hex() == block["hash"]
        if "preimage" in block:
            assert hashlib.sha256(bytes.fromhex(block["preimage"])).digest() == by_list
        parent = by_list


@pytest.mark.parametrize("vector", VECTORS["requests"], ids=lambda v: v["req"]["id"])
@pytest.mark.parametrize("hash_fn", [sha256_cbor, lambda value: sha256_cbor(value)])
def test_request_hashes_are_those_of_vllm(vector, hash_fn):
    """Prompt first, then token by token, through the native and the generic path."""
    req = vector["req"]
    lora = req.get("lora")
    request = make_request(
        list(req["prompt"]),
        lora=lora and (lora["name"], lora["path"]),
        mm=[(f["id"], f["offset"], f["length"]) for f in req.get("mm") or []],
        salt=req.get("cache_salt"),
    )
    hasher = get_request_block_hasher(vector["hash_block_size"], hash_fn)
    request.block_hashes.extend(hasher(request))
    for token in req["outputs"]:
        request.all_token_ids.append(token)
        request.block_hashes.extend(hasher(request))
    assert [h.hex() for h in request.block_hashes] == vector["hashes"]


# --- chain ------------------------------------------------------------------------------------


def test_equal_tokens_at_another_place_have_another_hash():
    first, second = chain_of(make_request([1, 2, 3, 4] * 2))
    assert first != second


def test_an_absent_parent_is_the_none_hash():
    tokens = [1, 2, 3, 4]
    expected = hash_block_tokens(sha256_cbor, hashing.NONE_HASH, tokens)
    assert hash_block_tokens(sha256_cbor, None, tokens) == expected
    assert hash_block_tokens(sha256_cbor, b"", tokens) == expected


@pytest.mark.parametrize("num_tokens", range(13))
def test_only_full_blocks_are_hashed(num_tokens):
    assert len(chain_of(make_request(list(range(num_tokens))))) == num_tokens // 4


def test_every_token_counts():
    """Dropping, changing, swapping or compensating a token anywhere changes the hash."""
    tokens = list(range(100, 116))
    seen = {bytes(hash_block_tokens(sha256_cbor, None, tokens))}
    variants = [tokens[1:], tokens[:-1], [0, *tokens], [*tokens, 0]]
    for i in range(16):
        variants.append([*tokens[:i], tokens[i] + 1, *tokens[i + 1 :]])
    for i, j in itertools.combinations(range(16), 2):
        swapped = tokens.copy()
        swapped[i], swapped[j] = swapped[j], swapped[i]
        compensated = tokens.copy()
        compensated[i] += 31
        compensated[j] -= 1
        variants += [swapped, compensated]
    for variant in variants:
        seen.add(hash_block_tokens(sha256_cbor, None, variant))
    assert len(seen) == len(variants) + 1


def test_full_width_media_ids_are_told_apart():
    for num_bits in (16, 32, 64, 248):
        high, low = 1 << num_bits, 0
        one = make_request([0] * 4, mm=[(f"{high:064x}", 0, 4)])
        two = make_request([0] * 4, mm=[(f"{low:064x}", 0, 4)])
        assert chain_of(one) != chain_of(two)


def test_edited_tokens_give_the_hashes_of_a_fresh_request():
    request = make_request(list(range(20)))
    hasher = get_request_block_hasher(4)
    request.block_hashes.extend(hasher(request))
    request.all_token_ids[9] = 77
    request.block_hashes.truncate(9 // 4)
    request.block_hashes.extend(hasher(request))
    assert list(request.block_hashes) == chain_of(make_request(list(request.all_token_ids)))


def test_a_seed_other_than_the_default_changes_all_hashes(monkeypatch):
    before = chain_of(make_request(list(range(8))))
    set_seed(monkeypatch, "another")
    after = chain_of(make_request(list(range(8))))
    assert not set(before) & set(after)


# --- extra keys -------------------------------------------------------------------------------


def test_kinds_of_extra_keys_cannot_be_confused():
    requests = [
        make_request([1] * 4),
        make_request([1] * 4, salt="X"),
        make_request([1] * 4, lora=("X", "")),
        make_request([1] * 4, lora=("", "X")),
        make_request([1] * 4, lora=("X", "X")),
        make_request([1] * 4, mm=[("X", 0, 4)]),
        make_request([1] * 4, mm=[("X", 1, 4)]),
        make_request([1] * 4, lora=("ab", "c")),
        make_request([1] * 4, lora=("a", "bc")),
        make_request([1] * 4, lora=("X", "X"), salt="X"),
        make_request([1] * 4, lora=("X", "X"), mm=[("X", 0, 4)]),
    ]
    hashes = [chain_of(request)[0] for request in requests]
    assert len(set(hashes)) == len(hashes)


def test_without_adapter_salt_and_media_the_key_is_that_of_the_tokens():
    assert chain_of(make_request([1, 2, 3, 4], salt="", mm=[])) == [
        hash_block_tokens(sha256_cbor, None, [1, 2, 3, 4])
    ]


def test_salt_enters_the_first_block_and_changes_all():
    request = make_request(list(range(12)), salt="s")
    keys = [generate_block_hash_extra_keys(request, start, start + 4, 0)[0] for start in (0, 4, 8)]
    assert keys == [(("cache_salt", "s"),), None, None]
    assert not set(chain_of(request)) & set(chain_of(make_request(list(range(12)))))


def test_adapter_name_and_path_enter_every_block():
    request = make_request(list(range(8)), lora=("name", "/path"))
    for start in (0, 4):
        keys, _ = generate_block_hash_extra_keys(request, start, start + 4, 0)
        assert keys == (("lora", "name", "/path"),)
    chains = [chain_of(request)]
    chains.append(chain_of(make_request(list(range(8)), lora=("name", "/other"))))
    chains.append(chain_of(make_request(list(range(8)), lora=("other", "/path"))))
    assert len({h for chain in chains for h in chain}) == 6


def test_media_enter_each_block_they_reach_with_their_offset():
    request = make_request([0] * 16, mm=[("A", 2, 5), ("B", 7, 1), ("C", 12, 2)])
    mm_idx, keys = 0, []
    for start in range(0, 16, 4):
        block_keys, mm_idx = generate_block_hash_extra_keys(request, start, start + 4, mm_idx)
        keys.append(block_keys)
    assert keys == [
        (("mm", "A", 2),),
        (("mm", "A", -2), ("mm", "B", 3)),
        None,
        (("mm", "C", 0),),
    ]
    assert mm_idx == 3
    assert generate_block_hash_extra_keys(request, 12, 16, -1) == ((("mm", "C", 0),), 3)


def test_media_that_end_where_a_block_ends_are_not_part_of_the_next():
    request = make_request([0] * 16, mm=[("A", 4, 4), ("B", 9, 1)])
    assert generate_block_hash_extra_keys(request, 4, 8, 0) == ((("mm", "A", 0),), 1)
    assert generate_block_hash_extra_keys(request, 8, 12, 0) == ((("mm", "B", 1),), 2)


def test_extra_keys_come_in_a_fixed_order():
    embeds = np.ones((4, 2), dtype=np.float32)
    request = make_request([0] * 4, lora=("L", "/p"), mm=[("x", 1, 2)], salt="s", embeds=embeds)
    keys, _ = generate_block_hash_extra_keys(request, 0, 4, 0)
    digest = hashlib.sha256(embeds.tobytes()).digest()
    assert keys == (
        ("lora", "L", "/p"),
        ("mm", "x", 1),
        ("cache_salt", "s"),
        ("prompt_embeds", digest),
    )


def test_prompt_embeds_are_hashed_by_block_and_stay_in_the_key_past_the_prompt():
    embeds = np.arange(12, dtype=np.float32).reshape(6, 2)
    request = make_request([0] * 12, embeds=embeds)
    digests = [
        generate_block_hash_extra_keys(request, start, start + 4, 0)[0][0][1] for start in (0, 4, 8)
    ]
    assert digests == [
        hashlib.sha256(embeds[start : start + 4].tobytes()).digest() for start in (0, 4, 8)
    ]
    assert digests[2] == hashlib.sha256(b"").digest()
    changed = embeds.copy()
    changed[5, 1] += 1
    before, after = chain_of(request), chain_of(make_request([0] * 12, embeds=changed))
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False]


@pytest.mark.parametrize("embeds", [np.ones(4), np.ones((4, 4))[:, ::2], "embeds"])
def test_prompt_embeds_of_another_form_are_refused(embeds):
    with pytest.raises(TypeError, match="prompt_embeds"):
        chain_of(make_request([0] * 4, embeds=embeds))


def test_equal_strings_hash_equally_whatever_object_they_are():
    """Pickle-based keys depend on object identity; ours must not."""
    one, two = (b"adapter".decode() for _ in range(2))
    assert one is not two
    assert sha256_cbor(("lora", one, one)) == sha256_cbor(("lora", one, two))
    tokens = [1, 2, 3, 4]
    assert hash_block_tokens(sha256_cbor, None, tokens) == hash_block_tokens(
        sha256_cbor, None, [np.int64(token) for token in tokens]
    )


# --- types ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_token_arrays_give_the_hashes_of_lists(dtype):
    tokens = list(range(1000, 1050))
    assert chain_of(make_request(np.array(tokens, dtype=dtype))) == chain_of(make_request(tokens))
    strided = np.repeat(np.array(tokens, dtype=dtype), 2)[::2]
    assert chain_of(make_request(strided)) == chain_of(make_request(tokens))


@pytest.mark.parametrize("tokens", [[1.0, 2.0], ["a"], [None], [2**63], np.array([1.5])])
def test_other_token_types_are_refused(tokens):
    with pytest.raises(TypeError):
        hash_block_tokens(sha256_cbor, None, tokens)


@pytest.mark.parametrize(
    ("parent", "error"), [(b"short", ValueError), ("x" * 32, TypeError), (1, TypeError)]
)
def test_a_parent_that_is_no_hash_is_refused(parent, error):
    with pytest.raises(error):
        hash_block_tokens(sha256_cbor, parent, [1])


@pytest.mark.parametrize("value", [1.5, {"a": 1}, True, object(), [set()]])
def test_sha256_cbor_refuses_other_types(value):
    with pytest.raises(TypeError, match="only None, int, str, bytes, tuple and list are hashed"):
        sha256_cbor(value)


@pytest.mark.parametrize("keys", [("lora", "a"), (("lora", 1.5),), (("lora", None),)])
def test_untyped_extra_keys_are_refused(keys):
    with pytest.raises(TypeError):
        hash_block_tokens(sha256_cbor, None, [1], keys)


@pytest.mark.parametrize("block_size", [0, -1])
def test_hasher_refuses_bad_block_sizes(block_size):
    with pytest.raises(ValueError, match="hash_block_size must be positive"):
        get_request_block_hasher(block_size)
    with pytest.raises(ValueError, match="block_size must be positive"):
        _core.hash_full_blocks(None, [1], block_size, 0, hashing.NONE_HASH)


def test_key_packing_round_trips():
    key = make_block_hash_with_group_id(bytes(range(32)), 258)
    assert key == bytes(range(32)) + b"\x00\x00\x01\x02"
    assert get_block_hash(key) == bytes(range(32))
    assert get_group_id(key) == 258
    with pytest.raises(ValueError, match="36 or 20 bytes"):
        get_group_id(key[:-1])
    with pytest.raises(ValueError, match="must not be negative"):
        make_block_hash_with_group_id(bytes(32), -1)


def test_block_hash_list_behaves_like_a_list():
    items = [bytes([i]) * 32 for i in range(5)]
    hashes = BlockHashList(items)
    assert len(hashes) == 5
    assert list(hashes) == items
    assert hashes[-1] == items[-1]
    for part in (slice(1, 3), slice(None, None, 2), slice(3, 0, -1), slice(9, 12)):
        assert list(hashes[part]) == items[part]
    hashes.extend(hashes)
    assert list(hashes) == items * 2
    hashes.truncate(3)
    assert hashes == BlockHashList(items[:3])
    assert hashes != items[:3]
    with pytest.raises(IndexError):
        hashes[3]
    with pytest.raises(IndexError):
        hashes[-4]
    with pytest.raises(ValueError, match=r"must be in \[0, 3\]"):
        hashes.truncate(4)
    with pytest.raises(ValueError, match="32 or 16 bytes"):
        hashes.append(b"short")
    with pytest.raises(TypeError):
        hashes.extend([b"x" * 32, 1])
    assert len(hashes) == 3


@pytest.mark.parametrize("as_array", [list, np.int32, np.int64])
def test_hash_blocks_is_the_chain_of_hash_block_tokens(as_array):
    tokens = [7, 300, 70_000, 1, 2, 3, 4, 5, 6]
    first = hash_block_tokens(sha256_cbor, None, tokens[:4])
    second = hash_block_tokens(sha256_cbor, first, tokens[4:8])
    given = tokens if as_array is list else np.array(tokens, dtype=as_array)
    assert list(hash_blocks(given, 4)) == [first, second]
    assert list(hash_blocks(given[4:], 4, first)) == [second]
    assert list(hash_blocks(given[:3], 4)) == []
