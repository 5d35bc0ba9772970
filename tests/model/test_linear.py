# SPDX-License-Identifier: Apache-2.0
"""Products with weights, and the batch-invariant mode: in it the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
import transformers
from model._paged_runner import PagedRunner
from model._tiny_models import hf_logits, make_tiny, random_ids
from torch.nn import functional

from paged_kv._model_ops import IN_FEATURES_UNIT
from paged_kv.kv_cache_memory import HUGE_PAGE_BYTES
from paged_kv.models import load_model
from paged_kv.models.linear import TILE_ROWS, Linear, in_fixed_tiles
from paged_kv.models.weight_memory import move_to_huge_pages, narrow_if_exact


def _linear(in_features: int, out_features: int, *, bias: bool, dtype=torch.float32) -> Linear:
    torch.manual_seed(0)
    linear = Linear(in_features, out_features, bias=bias)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape).to(dtype)
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (33, 7), (1, 1)])
def test_product(in_features, out_features, batch_invariant, bias):
    """Also of widths that the op doesn't take."""
    linear = _linear(in_features, out_features, bias=bias)
    linear.batch_invariant = batch_invariant
    for rows in (0, 1, 5, 16, 17, 100):
        x = torch.randn(rows, in_features)
        expected = functional.linear(x, linear.weight, linear.bias)
        torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype, monkeypatch):
    """As on a CPU without units for 16 bits: sums in float32, inputs and outputs in 16 bits."""
    monkeypatch.setattr("paged_kv.models.linear._has_units_for", lambda _: False)
    linear = _linear(64, 96, bias=True, dtype=dtype)
    x = torch.randn(5, 64).to(dtype)
    got = linear(x)
    assert got.dtype == dtype
    expected = functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_units_for_16_bits_are_used_unless_bits_must_not_change(batch_invariant, monkeypatch):
    monkeypatch.setattr("paged_kv.models.linear._has_units_for", lambda _: True)
    linear = _linear(64, 96, bias=False, dtype=torch.bfloat16)
    linear.batch_invariant = batch_invariant
    with torch.profiler.profile() as profile:
        linear(torch.randn(5, 64).bfloat16())
    called = {event.key for event in profile.key_averages()}
    assert ("aten::linear" in called) != batch_invariant
    assert ("paged_kv::linear" in called) == batch_invariant


def test_parameters_in_huge_pages(monkeypatch):
    """In order, each at a line of the cache, in chunks; a second move does nothing."""
    monkeypatch.setattr("paged_kv.models.weight_memory._CHUNK_BYTES", 8 << 20)
    shapes = [(1000, 300), (7,), (500, 301), (3, 3), (2000, 600), (9,)]  # one on its own
    dtypes = [torch.float32, torch.bfloat16]
    parameters = [
        torch.nn.Parameter(torch.randn(shape).to(dtypes[i % 2]), requires_grad=False)
        for i, shape in enumerate(shapes)
    ]
    values = [parameter.clone() for parameter in parameters]
    move_to_huge_pages(parameters)
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.dtype == value.dtype
        assert torch.equal(parameter, value)
        assert parameter.untyped_storage().data_ptr() % HUGE_PAGE_BYTES == 0
        assert parameter.data_ptr() % 64 == 0
    places = [parameter.data_ptr() for parameter in parameters]
    assert places[0] % HUGE_PAGE_BYTES == 0
    assert places[1] == places[0] + 1_200_000
    assert places[2] == places[1] + 64
    chunks = [parameter.untyped_storage().data_ptr() for parameter in parameters]
    assert chunks[5] == chunks[0]
    assert len(set(chunks)) == 2
    move_to_huge_pages(parameters)
    assert [parameter.data_ptr() for parameter in parameters] == places


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_fit_into_16_bits_are_kept_so(dtype, bias):
    """And give the same bits as in float32, with and without the mode that promises bits."""
    linear = _linear(96, 2000, bias=bias)
    numbers = torch.tensor([0.0, -0.0, torch.inf, torch.finfo(dtype).tiny, 1 + 2**-7, 3.0])
    linear.weight.data = linear.weight.data.to(dtype).float()
    linear.weight.data[-1, : len(numbers)] = numbers
    x = torch.randn(5, 96)
    for linear.batch_invariant in (False, True):
        before = linear(x)
        narrow = _linear(96, 2000, bias=bias)
        narrow.batch_invariant, narrow.weight.data = linear.batch_invariant, linear.weight.data
        narrow_if_exact(narrow.weight)
        assert narrow.weight.dtype == dtype
        assert torch.equal(narrow.weight.float(), linear.weight)
        after = narrow(x)
        assert after.dtype == torch.float32
        assert torch.equal(after.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("number", [1 + 2**-12, 1e-9, 1e38, torch.nan])
def test_weights_that_need_32_bits_are_kept(number):
    """One number, anywhere: of more digits, too small or too large for either type, or NaN."""
    matrix = torch.ones(3000, 32)
    matrix[0, 0] = 1 + 2**-10  # no bfloat16
    matrix[2500, 31] = number
    parameter = torch.nn.Parameter(matrix, requires_grad=False)
    data = parameter.data_ptr()
    narrow_if_exact(parameter)
    assert parameter.dtype == torch.float32
    assert parameter.data_ptr() == data


def test_without_registers_to_widen_in_nothing_is_narrowed(monkeypatch):
    monkeypatch.setattr("paged_kv.models.weight_memory._widens_in_registers", lambda: False)
    parameter = torch.nn.Parameter(torch.ones(8, 32), requires_grad=False)
    narrow_if_exact(parameter)
    assert parameter.dtype == torch.float32


def test_weights_that_go_through_torch_are_not_narrowed():
    """There the other operand has to have the same dtype."""
    parameter = torch.nn.Parameter(torch.ones(8, 33), requires_grad=False)
    narrow_if_exact(parameter)
    assert parameter.dtype == torch.float32


@pytest.mark.parametrize("variant", ["llama_biases", "llama_tied", "qwen3", "gemma3"])
def test_a_float32_model_of_16_bit_weights(variant, tmp_path):
    """It takes half of the memory, and computes in float32 what it computed before."""
    make_tiny(variant).bfloat16().save_pretrained(tmp_path)
    model, plain = load_model(tmp_path).model, load_model(tmp_path).model
    model.prepare_weights()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    narrow = {m.dtype for m in matrices if m.shape[1] % IN_FEATURES_UNIT == 0}
    assert narrow == {torch.bfloat16}
    assert model.dtype == plain.dtype == torch.float32
    ids = random_ids(30)
    logits, expected = (
        PagedRunner(m, num_seqs=1, max_len=30, seed=1).step({0: ids})[0] for m in (model, plain)
    )
    assert logits.dtype == torch.float32
    assert torch.equal(logits, expected)


def test_weights_are_widened_for_other_devices(tmp_path):
    """There products take operands of one dtype."""
    make_tiny("llama_tied").bfloat16().save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    model.prepare_weights()
    model.to("meta").prepare_weights()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 48, 50])
def test_tiles(rows):
    """Every product has `TILE_ROWS` rows, and the rows come back in order without the padding."""
    shapes, x = [], torch.randn(rows, 8)

    def double(tile):
        shapes.append(tile.shape[0])
        return 2 * tile

    assert torch.equal(in_fixed_tiles(double, x), 2 * x)
    assert shapes == [TILE_ROWS] * -(-rows // TILE_ROWS) if rows else [0]


@pytest.mark.parametrize("variant", ["llama_biases", "llama_tied", "qwen3", "gemma3"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_prepared_model(variant, batch_invariant, tmp_path):
    """Transformers' logits; its weights can still be read and saved."""
    hf_model = make_tiny(variant)
    hf_model.save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    model.prepare_weights()
    model.set_batch_invariant(batch_invariant)
    for name, slot in model.weight_slots().items():
        torch.testing.assert_close(slot, hf_model.state_dict()[name], rtol=0, atol=0)
    ids = random_ids(30)
    runner = PagedRunner(model, num_seqs=1, max_len=30)
    logits = torch.cat(
        [runner.step({0: ids[:20]})[0], *(runner.step({0: [i]})[0] for i in ids[20:])]
    )
    torch.testing.assert_close(logits, hf_logits(hf_model, ids), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """As wide as SmolLM2, so that libraries do sum in another order for another number of rows."""
    folder = tmp_path_factory.mktemp("wide")
    config = transformers.LlamaConfig(
        vocab_size=160,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("prepared", [False, True])
def test_batch_invariant_mode_gives_identical_bits(wide_folder, prepared):
    """Alone or with others, in one go, in chunks or token by token."""
    model = load_model(wide_folder).model
    if prepared:
        model.prepare_weights()
    model.set_batch_invariant(True)
    ids, other = random_ids(70), random_ids(90, seed=1)
    (whole,) = PagedRunner(model, num_seqs=1, max_len=70).step({0: ids}).values()

    runner = PagedRunner(model, num_seqs=1, max_len=70, seed=1)
    chunks = [runner.step({0: ids[:33]}), runner.step({0: ids[33:62]})]
    chunks += [runner.step({0: [token]}) for token in ids[62:]]
    assert torch.equal(torch.cat([chunk[0] for chunk in chunks]), whole)

    runner = PagedRunner(model, num_seqs=2, max_len=90, seed=2)
    steps = [runner.step({1: other[:3], 0: ids[:50]}), runner.step({1: other[3:], 0: ids[50:69]})]
    steps.append(runner.step({0: ids[69:], 1: [5]}))
    assert torch.equal(torch.cat([step[0] for step in steps]), whole)


def test_the_mode_can_be_left(wide_folder):
    model = load_model(wide_folder).model
    ids = random_ids(20)
    before = PagedRunner(model, num_seqs=1, max_len=20).step({0: ids})[0]
    model.set_batch_invariant(True)
    model.set_batch_invariant(False)
    assert torch.equal(PagedRunner(model, num_seqs=1, max_len=20).step({0: ids})[0], before)
