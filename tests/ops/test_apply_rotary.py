# SPDX-License-Identifier: Apache-2.0
"""Rotation of heads in place on the CPU: torch's bits, of any strides, whatever the batch."""

from __future__ import annotations

import pytest
import torch

from paged_kv import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rotated_by_torch(x, cos, signed_sin):
    """Each product and the sum is a tensor of the dtype: rounded."""
    partner = x.roll(x.shape[-1] // 2, dims=-1).mul_(signed_sin)
    return (x * cos).add_(partner)


def arguments(tokens=5, heads=3, head_size=64, dtype=torch.float32):
    angles = torch.rand(tokens, 1, head_size // 2) * 6.3
    cos, sin = angles.cos(), angles.sin()
    x = 3 * torch.randn(tokens, heads, head_size)
    factors = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tuple(tensor.to(dtype) for tensor in (x, *factors))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [0, 2, 6, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("tokens", "heads"), [(0, 4), (1, 12), (7, 1), (300, 12), (3, 0)])
def test_has_the_bits_of_torchs_formula(tokens, heads, head_size, dtype):
    x, cos, signed_sin = arguments(tokens, heads, head_size, dtype)
    expected = rotated_by_torch(x, cos, signed_sin)
    ops.apply_rotary(x, cos, signed_sin)
    assert torch.equal(x, expected)


def test_products_are_rounded_before_the_sum():
    """A fused multiply-add would give 2^-24 and not 0."""
    wide = 1 + 2**-12
    x = torch.tensor([[[wide, 1.0]]])
    cos, signed_sin = torch.tensor([[[wide, 1.0]]]), torch.tensor([[[-(1 + 2**-11), 1.0]]])
    ops.apply_rotary(x, cos, signed_sin)
    assert x[0, 0, 0] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity_and_nan_go_where_torch_lets_them(dtype):
    x, cos, signed_sin = arguments(4, 2, 20, dtype)
    x[0, 0, 3], x[1, 1, 15], x[2, 0, 0] = torch.inf, -torch.inf, torch.nan
    x[3, 1] = torch.finfo(dtype).max
    cos[0, 0, 3], signed_sin[3, 0, 7] = 0, torch.nan
    expected = rotated_by_torch(x, cos, signed_sin)
    ops.apply_rotary(x, cos, signed_sin)
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [20, 64])
def test_views_are_rotated_and_their_surroundings_left(head_size, dtype):
    """Heads of a product with more, tokens of every second row, heads before tokens."""
    x, cos, signed_sin = arguments(6, 9, head_size + 4, dtype)
    cos, signed_sin = cos[..., :head_size], signed_sin[..., 1 : head_size + 1]
    for view in (
        lambda t: t[:, 2:5, 3 : head_size + 3],
        lambda t: t[::2, ::3, :head_size],
        lambda t: t.transpose(0, 1)[:6, :, 4:],
    ):
        whole = x.clone()
        part = view(whole)
        tokens = part.shape[0]
        expected = x.clone()
        view(expected)[:] = rotated_by_torch(part, cos[:tokens], signed_sin[:tokens])
        ops.apply_rotary(part, cos[:tokens], signed_sin[:tokens])
        assert torch.equal(whole, expected)


def test_a_token_has_the_same_bits_with_any_others_and_any_threads():
    x, cos, signed_sin = arguments(300, 12, 64)
    whole, num_threads = x.clone(), torch.get_num_threads()
    ops.apply_rotary(whole, cos, signed_sin)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for part in (slice(0, 1), slice(7, 9), slice(100, 300), slice(0, 300)):
                some = x[part].clone()
                ops.apply_rotary(some, cos[part], signed_sin[part])
                assert torch.equal(some, whole[part])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(2, 8)}, r"x: expected shape \[num_tokens, num_heads, head_size\], got"),
        ({"x": torch.ones(2, 3, 8).double()}, "x: expected dtype Float or Half or BFloat16, got"),
        ({"x": torch.ones(2, 8, 3).mT}, "x: expected stride 1 in dimension 2, got 3"),
        ({"x": torch.ones(2, 1, 8).expand(2, 3, 8)}, "x: is written"),
        ({"cos": torch.ones(3, 1, 8)}, r"cos: expected num_tokens = 2 \(from x\), got 3"),
        ({"cos": torch.ones(2, 1, 4)}, r"cos: expected head_size = 8 \(from x\), got 4"),
        ({"cos": torch.ones(2, 3, 8)}, r"cos: expected shape \[num_tokens, 1, head_size\], got"),
        ({"cos": torch.ones(2, 8)}, r"cos: expected shape \[num_tokens, 1, head_size\], got"),
        ({"cos": torch.ones(2, 1, 8).half()}, "cos: expected dtype Float, got Half"),
        ({"signed_sin": torch.ones(2, 2, 8)}, r"signed_sin: expected shape .*, got \[2, 2, 8\]"),
        ({"signed_sin": torch.ones(2, 1, 8).bfloat16()}, "signed_sin: expected dtype Float"),
        ({"signed_sin": torch.ones(2, 1, 16)[..., ::2]}, "signed_sin: expected stride 1"),
        (
            {
                "x": torch.ones(2, 3, 7),
                "cos": torch.ones(2, 1, 7),
                "signed_sin": torch.ones(2, 1, 7),
            },
            "x: expected an even head_size, got 7",
        ),
    ],
)
def test_names_the_bad_argument_and_changes_nothing(changes, message):
    good = {
        "x": torch.ones(2, 3, 8),
        "cos": torch.ones(2, 1, 8),
        "signed_sin": torch.ones(2, 1, 8),
    }
    given = good | changes
    with pytest.raises(RuntimeError, match=message):
        ops.apply_rotary(**given)
    assert (given["x"] == 1).all()


def test_opcheck_and_compile():
    torch.library.opcheck(torch.ops.paged_kv.apply_rotary.default, arguments())

    def rotate(x, cos, signed_sin):
        x = x * 1
        ops.apply_rotary(x, cos, signed_sin)
        return x

    given = arguments()
    torch._dynamo.reset()
    compiled = torch.compile(rotate, fullgraph=True)
    assert torch.equal(compiled(*given), rotate(*given))
