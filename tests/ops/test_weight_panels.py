# SPDX-License-Identifier: Apache-2.0
"""Weights in panels: where each element lies, and the way back."""

from __future__ import annotations

import pytest
import torch

from paged_kv.weight_panels import (
    PANEL_FEATURES,
    features_of_panels,
    is_in_panels,
    pack_weight,
    unpack_weight,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def numbers(out_features, in_features, dtype):
    """Each element another number, as far as the dtype has them."""
    count = torch.arange(out_features * in_features, dtype=torch.int32)
    count = count.view(out_features, in_features)
    return count.float() if dtype == torch.float32 else count.to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_features", [1, 16, 37])
def test_where_elements_lie(dtype, out_features):
    weight = numbers(out_features, 32, dtype)
    panels = pack_weight(weight)
    assert panels.is_contiguous()
    assert is_in_panels(panels)
    for feature in range(-(-out_features // PANEL_FEATURES) * PANEL_FEATURES):
        panel, column = divmod(feature, PANEL_FEATURES)
        for i in range(32):
            place = (i // 2, column, i % 2) if dtype == torch.bfloat16 else (i, column)
            expected = weight[feature, i] if feature < out_features else weight.new_zeros(())
            assert torch.equal(bits(panels[panel][place]), bits(expected))


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_features", [0, 1, 16, 37])
def test_there_and_back(dtype, out_features):
    weight = numbers(out_features, 48, dtype)
    panels = pack_weight(weight)
    unpacked = unpack_weight(panels, out_features=out_features)
    assert torch.equal(bits(unpacked), bits(weight))
    assert unpacked.is_contiguous()
    panels.zero_()
    assert torch.equal(bits(unpacked), bits(weight)), "it shares memory with the panels"


def test_a_conversion_leaves_panels_that_only_unpack():
    """Their shape is that of the dtype they were packed in, so that the op refuses them."""
    weight = torch.randn(20, 32).bfloat16()
    wide = pack_weight(weight).float()
    assert not is_in_panels(wide)
    assert not is_in_panels(weight)
    assert torch.equal(unpack_weight(wide, out_features=20), weight.float())
    narrow = pack_weight(weight.float()).bfloat16()
    assert not is_in_panels(narrow)
    assert torch.equal(unpack_weight(narrow, out_features=20), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_features_are_looked_up(dtype):
    weight = numbers(37, 32, dtype)
    features = torch.tensor([36, 0, 15, 16, 16, 31, 5])
    found = features_of_panels(pack_weight(weight), features)
    assert torch.equal(bits(found), bits(weight[features]))
    assert features_of_panels(pack_weight(weight), features[:0]).shape == (0, 32)
    with pytest.raises(IndexError):
        features_of_panels(pack_weight(weight), torch.tensor([48]))


def test_slices_and_transposes_are_taken():
    weight = torch.randn(64, 50).T[5:, ::2]
    assert torch.equal(unpack_weight(pack_weight(weight), out_features=45), weight)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(16, 32).double(), "expected dtype float32, float16 or bfloat16, got .*64"),
        (torch.zeros(16, 24), r"positive multiple of 16, got \[16, 24\]"),
        (torch.zeros(16, 0), r"positive multiple of 16, got \[16, 0\]"),
        (torch.zeros(32), r"expected shape \[out_features, in_features\]"),
        (torch.zeros(1, 32, 16), r"expected shape \[out_features, in_features\]"),
    ],
)
def test_what_cannot_be_packed_is_named(weight, message):
    with pytest.raises(ValueError, match=f"weight: .*{message}"):
        pack_weight(weight)
