# SPDX-License-Identifier: Apache-2.0
"""Keys of media: a block is named by each medium in it, and by where in the block it stands."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from paged_kv import (
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    generate_block_hash_extra_keys,
    get_request_block_hasher,
)

BLOCK = 4
NUM_TOKENS = 24


def features(*media):
    return [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
        for name, offset, length in media
    ]


def keys(*media):
    """Of each block, as a chain of calls gives them."""
    request = SimpleNamespace(mm_features=features(*media))
    result, mm_idx = [], 0
    for start in range(0, NUM_TOKENS, BLOCK):
        block_keys, mm_idx = generate_block_hash_extra_keys(request, start, start + BLOCK, mm_idx)
        result.append(block_keys)
    return result


def hashes(*media, num_tokens=NUM_TOKENS):
    request = Request(
        "r",
        [7] * num_tokens,
        mm_features=features(*media),
        block_hasher=get_request_block_hasher(4),
    )
    return list(request.block_hashes)


def by_definition(*media):
    """Without any index: each medium that has a token in the block."""
    result = []
    for start in range(0, NUM_TOKENS, BLOCK):
        block = range(start, start + BLOCK)
        inside = [
            ("mm", name, offset - start)
            for name, offset, length in media
            if any(offset <= token < offset + length for token in block)
        ]
        result.append(tuple(inside) or None)
    return result


PLACES = [
    (0, 1),
    (0, 4),
    (0, 9),
    (2, 1),
    (2, 2),
    (3, 1),
    (3, 12),
    (4, 4),
    (5, 2),
    (11, 13),
    (23, 1),
]


@pytest.mark.parametrize("first", PLACES)
def test_keys_are_those_of_the_definition(first):
    """One medium, and two in order: apart, in one block, one behind or inside the other."""
    assert keys(("A", *first)) == by_definition(("A", *first))
    for second in PLACES:
        if second[0] >= first[0]:
            media = ("A", *first), ("B", *second)
            assert keys(*media) == by_definition(*media)


def test_three_media_that_overlap():
    """The sound of a film, with two pictures in it."""
    media = ("sound", 1, 20), ("one", 2, 3), ("two", 9, 1)
    assert keys(*media) == by_definition(*media)


def test_a_medium_inside_another_is_part_of_the_hash():
    film = ("sound", 0, 24)
    assert hashes(film, ("one", 2, 1))[0] != hashes(film, ("two", 2, 1))[0]
    assert hashes(film, ("one", 9, 1))[:2] == hashes(film, ("two", 9, 1))[:2]
    assert hashes(film, ("one", 9, 1))[2] != hashes(film, ("two", 9, 1))[2]


def test_media_that_could_be_confused_are_told_apart():
    """Ids that differ late or in length, equal ids at other places, order, one medium or two."""
    variants = [
        (),
        (("a", 0, 2),),
        (("a", 1, 2),),
        (("a", 0, 2), ("a", 2, 2)),
        (("aa", 0, 4),),
        (("a" * 64, 0, 4),),
        (("a" * 63 + "b", 0, 4),),
        (("a" * 65, 0, 4),),
        (("a", 0, 2), ("b", 2, 2)),
        (("b", 0, 2), ("a", 2, 2)),
        (("ab", 0, 2), ("", 2, 2)),
        (("", 0, 2), ("ab", 2, 2)),
        (("a\x00b", 0, 4),),
        (("a", 0, 4),),
        (("a|0", 0, 4),),
        (("1", 0, 4),),
        (("mm", 0, 4),),
    ]
    # ("a", 0, 2) and ("a", 0, 4) reach into one block at one place: the same picture.
    firsts = {}
    for variant in variants:
        firsts.setdefault(hashes(*variant)[0], []).append(variant)
    assert [group for group in firsts.values() if len(group) > 1] == [
        [(("a", 0, 2),), (("a", 0, 4),)]
    ]


def test_a_medium_is_not_mistaken_for_a_salt_or_an_adapter():
    tokens = [7] * BLOCK
    hasher = get_request_block_hasher(BLOCK)
    salted = Request("r", tokens, cache_salt="x", block_hasher=hasher)
    pictured = Request("r", tokens, mm_features=features(("x", 0, 4)), block_hasher=hasher)
    assert salted.block_hashes[0] != pictured.block_hashes[0]


def test_keys_do_not_depend_on_when_a_block_became_full():
    media = ("A", 3, 9), ("B", 12, 1), ("C", 14, 8)
    whole = hashes(*media)
    for num_prompt in (1, 13, 20):
        hasher = get_request_block_hasher(BLOCK)
        request = Request("r", [7] * num_prompt, mm_features=features(*media), block_hasher=hasher)
        for _ in range(NUM_TOKENS - num_prompt):
            request.append_output_token_ids(7)
        assert list(request.block_hashes) == whole


@pytest.mark.parametrize(
    "media",
    [
        [("A", 5, 1), ("B", 4, 1)],
        [("A", -1, 1)],
        [("A", 0, -1)],
        [("A", 2**40 + 1, 1)],
        [("A", 0, 2**62)],
    ],
)
def test_media_out_of_order_or_range_are_refused(media):
    """Otherwise one could be left out of a key, and its blocks be shared with another's."""
    with pytest.raises(ValueError, match="mm_features"):
        hashes(*media)
    with pytest.raises(ValueError, match="mm_features"):
        keys(*media)


def test_the_first_index_of_the_next_block_never_skips_a_medium():
    """Any index up to the returned one gives the same keys for the next block."""
    media = ("A", 0, 9), ("B", 1, 2), ("C", 6, 1), ("D", 9, 3)
    request = SimpleNamespace(mm_features=features(*media))
    for start, first in itertools.product(range(0, NUM_TOKENS, BLOCK), range(4)):
        _, next_idx = generate_block_hash_extra_keys(request, start, start + BLOCK, 0)
        if first <= next_idx:
            after = start + BLOCK, start + 2 * BLOCK
            assert generate_block_hash_extra_keys(request, *after, first) == (
                generate_block_hash_extra_keys(request, *after, next_idx)
            )
