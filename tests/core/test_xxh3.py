# SPDX-License-Identifier: Apache-2.0
"""XXH3 of the core, against digests that the reference implementation gave (xxhash 4.1)."""

from __future__ import annotations

import hashlib
import random

import pytest

from paged_kv._core import xxh3_128

# One length on each side of each limit between the algorithm's branches, and some long ones.
DIGESTS = {
    0: "99aa06d3014798d86001c324468d497f",
    1: "748c656f86fdad7e277b1946ac9655b6",
    3: "e211af7c47a446dc0631e1d45c25bbe6",
    4: "4e45634080bd6ee78749919e68e5944c",
    8: "744376926faf0a37b7850ab15aed2620",
    9: "f9673a778e6dd05f060b8777555d88b3",
    16: "fd96e5daffe1db8f9aacd2c4ef86ada0",
    17: "2a3586ed2685bd0742eea67dc950b39d",
    128: "e63099df06b0c5f0c665dd869485302d",
    129: "2718f6e5cb6788008c3f4fe244bdcfc8",
    240: "baf014ee4fef354efe670aba1aa950a0",
    241: "a51b862412f4f417052f0fbd2a5b668a",
    1024: "e6a8b2c795e07844d2c49278c1781d34",
    1025: "f5bb5ffbfa6f063eda65bfee826507d8",
    1_048_576: "a409f07efd726530cf5f8eb7e958e25c",
    3_146_505: "9b34a7b9fdb4921b3898596ec08d6890",
}


def message(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


@pytest.mark.parametrize("num_bytes", DIGESTS)
def test_digests_are_those_of_the_reference(num_bytes):
    assert xxh3_128(message(num_bytes)).hex() == DIGESTS[num_bytes]


def test_every_length_up_to_a_block_of_stripes_and_more():
    """SHA-256 of the reference's digests of all lengths from 0 to 1100."""
    all_digests = hashlib.sha256()
    for num_bytes in range(1101):
        all_digests.update(xxh3_128(message(num_bytes)))
    expected = "36d2cbe20a5712a8b9f05a02e5117310f9db103b2372a80dcfe676e4c77780d0"
    assert all_digests.hexdigest() == expected
