# SPDX-License-Identifier: Apache-2.0
"""gather_cache reads the tokens that the block table names, and nothing else."""

from __future__ import annotations

import pytest
import torch
from cache_cases import (
    BLOCK_SIZES,
    DTYPES,
    ONE,
    huge_tensor,
    int32,
    make_caches,
    make_tokens,
    random_bits,
    same_bits,
)
from ops.backends import each_layout

from paged_kv import ops, reference
from paged_kv.testing import ABSURD_BLOCK_ID, poison_cache


def make_batch(seq_lens, seq_starts, block_size):
    """A table of distinct random blocks; entries that are not needed are absurd."""
    ends = [start + length for start, length in zip(seq_starts, seq_lens, strict=True)]
    width = max(-(-end // block_size) for end in ends) + 2
    tables = torch.full((len(seq_lens), width), ABSURD_BLOCK_ID, dtype=torch.int32)
    needed = []
    for seq, (start, end) in enumerate(zip(seq_starts, ends, strict=True)):
        if start < end:
            needed += [(seq, i) for i in range(start // block_size, (end - 1) // block_size + 1)]
    ids = torch.randperm(len(needed) + 3)
    for (seq, i), block in zip(needed, ids, strict=False):
        tables[seq, i] = block
    cu_seq_lens = torch.tensor([0, *seq_lens]).cumsum(0).int()
    return tables, cu_seq_lens, len(ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_layout(["nhd", "hnd", "slices", "panels"], block_size=BLOCK_SIZES)
def test_equals_reference(backend, layout, block_size, dtype):
    seq_lens = [5, 0, block_size, block_size + 1, 3 * block_size - 1, 1]
    for seq_starts in ([0] * 6, [3, 7, block_size - 1, block_size, 5, 2 * block_size - 1]):
        tables, cu_seq_lens, num_blocks = make_batch(seq_lens, seq_starts, block_size)
        caches = make_caches(
            layout,
            block_size=block_size,
            num_kv_heads=2,
            head_size=32,
            dtype=dtype,
            num_blocks=num_blocks,
        )
        starts = int32(*seq_starts) if any(seq_starts) else None
        for cache in caches:
            out = random_bits(sum(seq_lens) + 2, 2, 32, dtype=dtype)  # two rows of padding
            expected = out.clone()
            reference.gather_cache(cache, expected, tables, cu_seq_lens, starts)
            backend.gather_cache(cache, out, tables, cu_seq_lens, starts)
            assert same_bits(out, expected)


@each_layout(["hnd", "panels"])
def test_reads_back_what_the_writer_wrote(backend, layout):
    key, value = make_tokens(40, 2, 64, torch.bfloat16)
    caches = make_caches(layout, block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    tables = int32(4, 1, 2).view(1, 3)
    slots = torch.tensor([(4, 1, 2)[i // 16] * 16 + i % 16 for i in range(40)])
    backend.reshape_and_cache_flash(key, value, *caches, slots, "auto", ONE, ONE)
    for cache, tokens in zip(caches, (key, value), strict=True):
        poison_cache(cache, slots)
        out = torch.empty(40, 2, 64, dtype=torch.bfloat16)
        backend.gather_cache(cache, out, tables, int32(0, 40), None, "auto", ONE)
        assert same_bits(out, tokens)


def test_placement_does_not_matter(backend):
    tokens = random_bits(64, 1, 32, dtype=torch.float32)
    for _ in range(5):
        ids = torch.randperm(6)[:4]
        cache = random_bits(6, 16, 1, 32, dtype=torch.float32)
        cache[ids] = tokens.view(4, 16, 1, 32)
        out = torch.empty_like(tokens)
        backend.gather_cache(cache, out, ids.int().view(1, 4), int32(0, 64))
        assert same_bits(out, tokens)


def test_strided_output_and_indices(backend):
    cache = random_bits(4, 8, 2, 32, dtype=torch.float32)
    tables = torch.full((2, 6), ABSURD_BLOCK_ID, dtype=torch.int32)
    tables[:, ::2] = int32(3, 0, 1, 2, 1, 0).view(2, 3)
    cu_seq_lens = torch.stack([int32(0, 20, 40), int32(99, 99, 99)], dim=1)[:, 0]
    wide = random_bits(40, 2, 64, dtype=torch.float32)
    beside = wide[..., 1::2].clone()
    expected = torch.empty(40, 2, 32)
    reference.gather_cache(cache, expected, tables[:, ::2], cu_seq_lens)
    backend.gather_cache(cache, wide[..., ::2], tables[:, ::2], cu_seq_lens)
    assert same_bits(wide[..., ::2], expected)
    assert same_bits(wide[..., 1::2], beside)


def test_offsets_are_64_bit(host_backend):
    num_blocks = 2**31 // (16 * 2 * 64) + 3
    cache = huge_tensor(num_blocks, 16, 2, 64, dtype=torch.bfloat16)
    cache[num_blocks - 1, 3] = 1.5
    out = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    host_backend.gather_cache(cache, out, int32(num_blocks - 1).view(1, 1), int32(0, 1), int32(3))
    assert (out == 1.5).all()


def test_no_sequences_and_no_tokens(backend):
    cache = random_bits(4, 8, 2, 32, dtype=torch.float32)
    out = torch.full((3, 2, 32), 7.0)
    backend.gather_cache(cache, out, torch.empty(0, 3, dtype=torch.int32), int32(0))
    backend.gather_cache(cache, out, int32(-1, 99).view(1, 2), int32(0, 0))
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": int32(0, 4).view(1, 2)}, r"block_tables\[0, 1\].*got 4"),
        ({"block_tables": int32(0, -1).view(1, 2)}, r"block_tables\[0, 1\].*got -1"),
        ({"block_tables": int32(0).view(1, 1)}, r"block_tables\[0\]: expected blocks for 12"),
        ({"seq_starts": int32(5)}, r"block_tables\[0\]: expected blocks for 17"),
        ({"seq_starts": int32(2**31 - 1)}, "expected blocks for 2147483659"),
        ({"seq_starts": int32(-1)}, "seq_starts"),
        ({"seq_starts": int32(0, 0)}, "seq_starts: expected num_seqs"),
        ({"cu_seq_lens": int32(1, 12)}, "cu_seq_lens: expected to start at 0"),
        ({"cu_seq_lens": int32(0, -1)}, "cu_seq_lens: expected not to decrease"),
        ({"cu_seq_lens": int32(0, 13)}, "out: expected at least"),
        ({"cu_seq_lens": int32(0, 1, 2)}, "cu_seq_lens: expected 2 entries"),
        ({"cu_seq_lens": int32()}, "cu_seq_lens: expected 2 entries"),
        ({"cu_seq_lens": torch.tensor([0, 12])}, "cu_seq_lens: expected dtype"),
        ({"out": torch.zeros(12, 2, 16)}, "out: expected head_size"),
        ({"out": torch.zeros(12, 2, 32).half()}, "out: expected dtype"),
        ({"out": torch.zeros(1, 2, 32).expand(12, 2, 32)}, "out: is written"),
        ({"cache": torch.zeros(4, 8, 2, 8, 4)}, "cache: expected shape"),
        ({"cache": torch.zeros(4, 0, 2, 32)}, "expected block_size of at least 1"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype"),
        ({"scale": torch.ones(5)}, "scale: expected one element"),
    ],
)
def test_bad_arguments_write_nothing(changes, message):
    arguments = {
        "cache": random_bits(4, 8, 2, 32, dtype=torch.float32),
        "out": torch.full((12, 2, 32), 7.0),
        "block_tables": int32(0, 3).view(1, 2),
        "cu_seq_lens": int32(0, 12),
    } | changes
    before = arguments["out"].clone()
    with pytest.raises(RuntimeError, match=message):
        ops.gather_cache(**arguments)
    assert same_bits(arguments["out"], before)


BAD_SHAPES = [
    ({"seq_starts": int32(0, 0)}, "seq_starts: expected num_seqs"),
    ({"cu_seq_lens": int32(0, 1, 2)}, "cu_seq_lens: expected 2 entries"),
    ({"cu_seq_lens": torch.tensor([0, 12])}, "cu_seq_lens: expected dtype"),
    ({"block_tables": torch.zeros(1, 2)}, "block_tables: expected dtype"),
    ({"out": torch.zeros(12, 2, 16)}, "out: expected head_size"),
    ({"out": torch.zeros(1, 2, 32).expand(12, 2, 32)}, "out: is written"),
    ({"cache": torch.zeros(4, 0, 2, 32)}, "expected block_size of at least 1"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SHAPES)
def test_bad_shapes_are_refused_on_the_device(device_backend, changes, message):
    arguments = {
        "cache": random_bits(4, 8, 2, 32, dtype=torch.float32),
        "out": torch.full((12, 2, 32), 7.0),
        "block_tables": int32(0, 3).view(1, 2),
        "cu_seq_lens": int32(0, 12),
    } | changes
    with pytest.raises(RuntimeError, match=message):
        device_backend.gather_cache(**arguments)
    assert (arguments["out"] == 7.0).all() or "out" in changes


BAD_VALUES = {
    "block past the end": ({"block_tables": int32(0, 4).view(1, 2)}, range(8)),
    "negative block": ({"block_tables": int32(-1, 3).view(1, 2)}, range(8, 12)),
    "table too short": ({"block_tables": int32(0).view(1, 1)}, range(8)),
    "negative start": ({"seq_starts": int32(-1)}, range(0)),
    "start past the table": ({"seq_starts": int32(2**31 - 1)}, range(0)),
    "first row past 0": ({"cu_seq_lens": int32(3, 12)}, range(3, 12)),
    "first row before 0": (
        {"cu_seq_lens": int32(-(2**31), 12), "seq_starts": int32(2**31 - 1)},
        range(0),
    ),
    "lengths that fall": ({"cu_seq_lens": int32(0, -1)}, range(0)),
    "more rows than out has": ({"cu_seq_lens": int32(0, 2**31 - 1)}, range(12)),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_rows_without_a_token_are_left_alone_on_the_device(device_backend, case):
    """The host cannot see bad values there. What is written comes from the right place."""
    changes, written = BAD_VALUES[case]
    cache = random_bits(4, 8, 2, 32, dtype=torch.float32)
    out = torch.full((12, 2, 32), 7.0)
    arguments = {"block_tables": int32(0, 3).view(1, 2), "cu_seq_lens": int32(0, 12)} | changes
    device_backend.gather_cache(cache, out, **arguments)
    first = int(arguments["cu_seq_lens"][0])
    for row in range(12):
        if row in written:
            block_idx, offset = divmod(row - first, 8)
            assert same_bits(out[row], cache[arguments["block_tables"][0, block_idx], offset])
        else:
            assert (out[row] == 7.0).all()


@pytest.mark.parametrize("num_seqs", [1, 31, 32, 33, 1024, 1025])
def test_any_number_of_sequences(backend, num_seqs):
    """Every third is empty; around the powers of a search that goes 32 ways."""
    lens = [0 if seq % 3 == 1 else 1 + seq % 2 for seq in range(num_seqs)]
    cache = random_bits(9, 2, 1, 8, dtype=torch.float16)
    tables = torch.randint(0, 9, (num_seqs, 1)).int()
    cu_seq_lens = torch.tensor([0, *lens]).cumsum(0).int()
    out = random_bits(sum(lens) + 3, 1, 8, dtype=torch.float16)
    expected = out.clone()
    reference.gather_cache(cache, expected, tables, cu_seq_lens)
    backend.gather_cache(cache, out, tables, cu_seq_lens)
    assert same_bits(out, expected)


@pytest.mark.parametrize("head_size", [3, 8, 120, 256])
def test_head_sizes_and_addresses_that_allow_no_vectors(backend, head_size):
    cache = random_bits(4, 8, 3, head_size + 1, dtype=torch.bfloat16)[..., 1:]
    out = random_bits(30, 3, head_size, dtype=torch.bfloat16)
    expected = out.clone()
    arguments = (int32(2, 0, 3, 1).view(1, 4), int32(0, 29), int32(2))
    reference.gather_cache(cache, expected, *arguments)
    backend.gather_cache(cache, out, *arguments)
    assert same_bits(out, expected)
