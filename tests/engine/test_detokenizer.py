# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.engine.detokenizer import Detokenizer, StopStringFinder

MOST_TOKENS_PER_DECODE = 8


class ByteTokenizer:
    """Each id is a piece of UTF-8; an empty piece stands for a special token that is skipped."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.longest_decode = 0

    def decode(self, ids, *, skip_special_tokens=True):
        assert skip_special_tokens
        self.longest_decode = max(self.longest_decode, len(ids))
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


class SpaceStrippingTokenizer:
    """Like SentencePiece: words carry their leading space, the first one of a text is stripped."""

    WORDS = (" ", " a", "b", " the", "", ".")

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(self.WORDS[i] for i in ids).removeprefix(" ")


def stream(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.append(i) for i in ids), detokenizer.flush()]


TEXT = "né 你😀\u200dA"
PIECES_OF_TEXT = st.tuples(st.integers(0, 15), st.integers(1, 4)).map(
    lambda cut: (2 * TEXT).encode()[cut[0] : cut[0] + cut[1]]
)
ANY_BYTES = st.binary(min_size=1, max_size=4)


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(st.one_of(PIECES_OF_TEXT, ANY_BYTES, st.just(b"")), min_size=1, max_size=8),
    data=st.data(),
)
def test_pieces_joined_equal_the_text_decoded_at_once(pieces, data):
    ids = data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=40))
    tokenizer = ByteTokenizer(pieces)
    expected = ByteTokenizer(pieces).decode(ids)
    assert "".join(stream(tokenizer, ids)) == expected
    assert tokenizer.longest_decode <= MOST_TOKENS_PER_DECODE + 1


@given(st.lists(st.integers(0, 5), max_size=30))
def test_stripped_spaces_are_as_in_the_text_decoded_at_once(ids):
    tokenizer = SpaceStrippingTokenizer()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_comes_out_once_it_is_complete():
    emoji = "😀".encode()
    tokenizer = ByteTokenizer([bytes([b]) for b in emoji] + [b"x"])
    assert stream(tokenizer, [4, 0, 1, 2, 3, 4]) == ["x", "", "", "", "😀", "x", ""]


def test_a_cut_character_is_replaced_at_the_end():
    tokenizer = ByteTokenizer(["é".encode()[:1], b"x"])
    assert stream(tokenizer, [1, 0]) == ["x", "", "\ufffd"]


def test_a_long_run_of_invalid_bytes_is_given_out_as_it_comes():
    tokenizer = ByteTokenizer([b"\x80"])
    pieces = stream(tokenizer, [0] * 1000)
    assert "".join(pieces) == "\ufffd" * 1000
    assert max(len(piece) for piece in pieces) <= 3
    assert tokenizer.longest_decode <= MOST_TOKENS_PER_DECODE + 1


def find(stop, pieces):
    finder, text = StopStringFinder(stop), ""
    for piece in pieces:
        shown, hit = finder.append(piece)
        text += shown
        if hit is not None:
            return text, hit
    return text + finder.flush(), None


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["END"], ["abc", "E", "N", "D", "x"], ("abc", "END")),
        (["END"], ["abEND and more"], ("ab", "END")),
        (["END"], ["E", "N", "x"], ("ENx", None)),
        (["END"], ["EN"], ("EN", None)),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["bc", "b"], ["abc"], ("a", "bc")),
        (["x", "bcx"], ["abcx"], ("a", "bcx")),
        (["\n"], ["one", "\ntwo"], ("one", "\n")),
        ([], ["a", "b"], ("ab", None)),
    ],
)
def test_stop_string_is_found_across_pieces_and_left_out(stop, pieces, expected):
    assert find(stop, pieces) == expected


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=8),
)
def test_what_was_shown_never_reaches_into_the_stop_string(stop, pieces):
    text, hit = find(stop, pieces)
    whole = "".join(pieces)
    if hit is None:
        assert text == whole
        assert not any(s in whole for s in stop)
    else:
        assert whole.startswith(text + hit)
        assert not any(s in text for s in stop)
