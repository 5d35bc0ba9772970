# SPDX-License-Identifier: Apache-2.0
"""Names for the content of full blocks, as the prefix cache uses them.

The hash of a block covers its tokens, the hash of the block before it, and whatever else decides
the block's KV (adapter, pictures, salt). Equal hashes mean equal prefixes.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from paged_kv import _core
from paged_kv._core import (
    BlockHashList,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    sha256_cbor,
    xxhash_cbor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

__all__ = [
    "DEFAULT_NONE_HASH_SEED",
    "NONE_HASH",
    "BlockHashList",
    "HashedRequest",
    "RequestBlockHasher",
    "generate_block_hash_extra_keys",
    "get_block_hash",
    "get_group_id",
    "get_hash_fn_by_name",
    "get_request_block_hasher",
    "hash_block_tokens",
    "hash_blocks",
    "init_none_hash",
    "make_block_hash_with_group_id",
    "sha256_cbor",
    "xxhash_cbor",
]


class HashedRequest(Protocol):
    """What a request must have for its blocks to be hashed."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens: a list or an integer array."""

    @property
    def block_hashes(self) -> BlockHashList | Sequence[bytes]:
        """Hashes of its first full blocks."""


DEFAULT_NONE_HASH_SEED = "vllm-none-hash"

_FUNCTIONS: dict[str, Callable[[Any], bytes]] = {
    "sha256_cbor": sha256_cbor,
    "xxhash_cbor": xxhash_cbor,
}


def get_hash_fn_by_name(hash_fn_name: str) -> Callable[[Any], bytes]:
    """The hash function of vLLM's ``prefix_caching_hash_algo``.

    Args:
        hash_fn_name: ``"sha256_cbor"`` or ``"xxhash_cbor"``. The second is faster to compute, but
            not collision resistant: the tokens of blocks are then kept too, and compared.

    Raises:
        ValueError: Another name. vLLM's ``"sha256"`` and ``"xxhash"`` hash a pickle, whose bytes
            depend on which objects are identical.

    Source:
        vLLM 0.32 utils/hashing.py::get_hash_fn_by_name.

    Example:
        >>> get_hash_fn_by_name("xxhash_cbor") is xxhash_cbor
        True
    """
    if hash_fn_name not in _FUNCTIONS:
        msg = f"hash_fn_name must be one of {', '.join(_FUNCTIONS)}, got {hash_fn_name!r}"
        raise ValueError(msg)
    return _FUNCTIONS[hash_fn_name]


NONE_HASH: bytes
"""Stands for the parent of a first block. Read it as `hashing.NONE_HASH`: it can change."""


def init_none_hash(hash_fn: Callable[[Any], bytes] = sha256_cbor) -> None:
    """Set `NONE_HASH` to the hash of ``$PYTHONHASHSEED``, or of a default seed if that is unset.

    The default is "vllm-none-hash", and random with `xxhash_cbor`, as in vLLM. Done once at import,
    for `sha256_cbor`. Processes that share cached blocks need the same seed; after a change,
    blocks that are cached under the old one are no longer found.

    Args:
        hash_fn: Maps a str to 32 bytes, or to 16 (`xxhash_cbor`).

    Example:
        >>> init_none_hash()
        >>> len(NONE_HASH)
        32
    """
    global NONE_HASH
    default = os.urandom(32).hex() if hash_fn is xxhash_cbor else DEFAULT_NONE_HASH_SEED
    NONE_HASH = hash_fn(os.environ.get("PYTHONHASHSEED", default))


init_none_hash()


def hash_block_tokens(
    hash_function: Callable[[Any], bytes],
    parent_block_hash: bytes | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> bytes:
    """Hash one full block.

    Args:
        hash_function: `sha256_cbor`, `xxhash_cbor`, or any function of (parent, tokens, extra keys)
            that returns bytes.
        parent_block_hash: Hash of the block before it; None for a first block.
        curr_block_token_ids: All tokens of the block.
        extra_keys: See `generate_block_hash_extra_keys`.

    Returns:
        32 bytes; 16 with `xxhash_cbor`.

    Example:
        >>> hash_block_tokens(sha256_cbor, None, [1, 2, 3, 4]).hex()[:8]  # without PYTHONHASHSEED
        '58d0879d'
    """
    parent = parent_block_hash or NONE_HASH
    if hash_function is sha256_cbor:
        return _core.hash_block_tokens(parent, curr_block_token_ids, extra_keys)
    tokens = tuple(int(token) for token in curr_block_token_ids)
    return hash_function((parent, tokens, extra_keys))


def hash_blocks(
    token_ids: Sequence[int] | np.ndarray,
    block_size: int,
    parent_block_hash: bytes | None = None,
) -> BlockHashList:
    """Hash all full blocks of a sequence of tokens, in one call.

    Args:
        token_ids: ``[num_tokens]``: a list, or an int32 or int64 array.
        block_size: Tokens per block. Tokens past the last full block are not hashed.
        parent_block_hash: Hash of the block before the first one; None if there is none.

    Returns:
        ``num_tokens // block_size`` hashes, for example for `BlockPool.cache_full_blocks`.

    Example:
        >>> hashes = hash_blocks([1, 2, 3, 4, 5, 6, 7, 300, 9], block_size=4)
        >>> [block_hash.hex()[:8] for block_hash in hashes]  # without PYTHONHASHSEED
        ['58d0879d', '310a6c1c']
    """
    parent = parent_block_hash or NONE_HASH
    return _core.hash_full_blocks(None, token_ids, block_size, 0, parent)


class RequestBlockHasher:
    """Hashes the blocks of a request that became full since it last did.

    Made by `get_request_block_hasher`.

    Attributes:
        hash_block_size: Tokens per block.
        algorithm: The hash function's name if a `paged_kv.Request` computes it by itself.
    """

    __slots__ = ("_hash_function", "hash_block_size")

    def __init__(self, hash_block_size: int, hash_function: Callable[[Any], bytes]) -> None:
        if hash_block_size <= 0:
            msg = f"hash_block_size must be positive, got {hash_block_size}"
            raise ValueError(msg)
        self.hash_block_size = hash_block_size
        self._hash_function = hash_function

    @property
    def algorithm(self) -> str | None:
        """``"sha256_cbor"`` or ``"xxhash_cbor"``; None: another function."""
        for name, function in _FUNCTIONS.items():
            if function is self._hash_function:
                return name
        return None

    def __call__(self, request: HashedRequest) -> BlockHashList:
        """The hashes of the full blocks that are not in ``request.block_hashes`` yet."""
        block_size = self.hash_block_size
        hashes = request.block_hashes
        num_hashed = len(hashes)
        num_full = len(request.all_token_ids) // block_size
        if num_hashed >= num_full:
            return BlockHashList()
        parent = hashes[-1] if num_hashed else NONE_HASH
        token_ids = request.all_token_ids[num_hashed * block_size : num_full * block_size]
        if self._hash_function is sha256_cbor:
            return _core.hash_full_blocks(request, token_ids, block_size, num_hashed, parent)
        return _hash_with(self._hash_function, request, token_ids, block_size, num_hashed, parent)


def get_request_block_hasher(
    hash_block_size: int, caching_hash_fn: Callable[[Any], bytes] = sha256_cbor
) -> RequestBlockHasher:
    """Make a function that hashes the blocks of a request that became full since it last did.

    The caller adds what the function returns to the request's `block_hashes`; a `paged_kv.Request`
    does so by itself. `lora_request`, `mm_features`, `cache_salt` and `prompt_embeds` of the
    request are read where present. With `xxhash_cbor`, only blocks of a `paged_kv.Request` can be
    cached: it keeps the tokens that a hash stands for. The cost is one hash per new full block;
    tokens of hashed blocks are not looked at.

    Args:
        hash_block_size: Tokens per block.
        caching_hash_fn: As in `hash_block_tokens`.

    Raises:
        ValueError: `hash_block_size` is not positive.

    Example:
        >>> from types import SimpleNamespace
        >>> hasher = get_request_block_hasher(4)
        >>> request = SimpleNamespace(all_token_ids=list(range(10)), block_hashes=BlockHashList())
        >>> request.block_hashes.extend(hasher(request))
        >>> len(request.block_hashes), len(hasher(request))
        (2, 0)
    """
    return RequestBlockHasher(hash_block_size, caching_hash_fn)


def _hash_with(
    hash_function: Callable[[Any], bytes],
    request: HashedRequest,
    token_ids: Sequence[int],
    block_size: int,
    first_block: int,
    parent: bytes,
) -> BlockHashList:
    """Do what `_core.hash_full_blocks` does, with another hash function."""
    hashes = BlockHashList()
    mm_idx = 0
    for begin in range(0, len(token_ids), block_size):
        start = first_block * block_size + begin
        extra_keys, mm_idx = generate_block_hash_extra_keys(
            request, start, start + block_size, mm_idx
        )
        tokens = token_ids[begin : begin + block_size]
        parent = hash_block_tokens(hash_function, parent, tokens, extra_keys)
        hashes.append(parent)
    return hashes
