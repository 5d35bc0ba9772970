# SPDX-License-Identifier: Apache-2.0
"""Two salts that differ, and under which the same prompt has the same XXH3 hashes.

A long message goes through XXH3 in stripes of 64 bytes, each as eight lanes of 8. A lane adds
``low * high`` of its bytes xor a secret that everybody knows, and its bytes to a neighbour. So if
two lanes at one place of two stripes have the same ``low``, one may be raised by 2**32 and the
other lowered by it: both sums stay as they are, whatever stands elsewhere in the message.
"""

from __future__ import annotations

from paged_kv.hashing import NONE_HASH, xxhash_cbor

__all__ = ["TOKENS", "colliding_salts"]

TOKENS = [1, 2, 3, 4]
"""Of the first block, with block size 4: each is one byte of CBOR."""

# Bytes 32 to 47 of the secret: what lane 0 of stripes 4 and 5 is mixed with.
_SECRET = bytes.fromhex("cb79e64eccc0e578825ad07dccff7221")
_FIRST_LANE = 4 * 64
_SECOND_LANE = 5 * 64
# In the message before the salt: the parent, the tokens, the name of the key, lengths.
_NUM_BYTES_BEFORE = 1 + 1 + 16 + 1 + len(TOKENS) + 1 + 1 + 11 + 3
_NUM_SALT_BYTES = 600


def _salt(first_high: str, second_high: str) -> str:
    low = b"aaaa"
    same_low = bytes(a ^ b ^ c for a, b, c in zip(low, _SECRET[:4], _SECRET[8:12], strict=True))
    salt = bytearray(b"a" * _NUM_SALT_BYTES)
    for lane, text in ((_FIRST_LANE, low + first_high.encode()),
                       (_SECOND_LANE, same_low + second_high.encode())):  # fmt: skip
        begin = lane - _NUM_BYTES_BEFORE
        salt[begin : begin + len(text)] = text
    return salt.decode("ascii")


def colliding_salts() -> tuple[str, str]:
    """Two of 600 characters, for a first block of `TOKENS`. The parent's 16 bytes do not matter."""
    one, other = _salt("`", "a"), _salt("a", "`")
    hashes = [
        xxhash_cbor((NONE_HASH[:16], tuple(TOKENS), (("cache_salt", salt),)))
        for salt in (one, other)
    ]
    if one == other or hashes[0] != hashes[1]:
        msg = "the salts do not collide"
        raise AssertionError(msg)
    return one, other
