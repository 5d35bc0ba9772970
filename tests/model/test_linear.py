# SPDX-License-Identifier: Apache-2.0
"""Products with weights, and the batch-invariant mode: in it the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
import transformers
from model._paged_runner import PagedRunner
from model._tiny_models import hf_logits, make_tiny, random_ids
from torch.nn import functional

from paged_kv import LLM
from paged_kv.kv_cache_memory import HUGE_PAGE_BYTES
from paged_kv.models import load_model
from paged_kv.models.linear import TILE_ROWS, Linear, in_fixed_tiles
from paged_kv.models.weight_memory import (
    lay_in_panels,
    lay_in_rows,
    move_to_huge_pages,
    narrow_if_exact,
)
from paged_kv.weight_panels import IN_FEATURES_UNIT, is_in_panels


def _linear(in_features: int, out_features: int, *, bias: bool, dtype=torch.float32) -> Linear:
    torch.manual_seed(0)
    linear = Linear(in_features, out_features, bias=bias)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape).to(dtype)
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("in_panels", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (33, 7), (1, 1), (16, 5)])
def test_product(in_features, out_features, in_panels, batch_invariant, bias):
    """Also of widths that the op doesn't take."""
    linear = _linear(in_features, out_features, bias=bias)
    linear.batch_invariant = batch_invariant
    weight = linear.weight.data
    if in_panels:
        lay_in_panels(linear.weight, out_features=out_features)
        assert is_in_panels(linear.weight) == (in_features % IN_FEATURES_UNIT == 0)
    for rows in (0, 1, 5, 16, 17, 100):
        x = torch.randn(rows, in_features)
        expected = functional.linear(x, weight, linear.bias)
        torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(linear.plain_weight(), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    """As on a CPU without units for 16 bits: sums in float32, inputs and outputs in 16 bits."""
    linear = _linear(64, 96, bias=True, dtype=dtype)
    x = torch.randn(5, 64).to(dtype)
    expected = functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    lay_in_panels(linear.weight, out_features=96)
    got = linear(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_units_for_16_bits_are_used_unless_bits_must_not_change(
    batch_invariant, monkeypatch, tmp_path
):
    monkeypatch.setattr("paged_kv.models.decoder.has_units_for", lambda _: True)
    make_tiny("llama_tied").bfloat16().save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16).model
    model.prepare_weights(batch_invariant=batch_invariant)
    with torch.profiler.profile() as profile:
        model.layers[0].mlp.down_proj(torch.randn(5, 96).bfloat16())
        model.compute_logits(torch.randn(5, 64).bfloat16())
    called = {event.key: event.count for event in profile.key_averages()}
    assert called.get("aten::linear", 0) == (0 if batch_invariant else 2)
    assert called.get("paged_kv::linear", 0) == (2 if batch_invariant else 0)
    model.prepare_weights(batch_invariant=True)
    assert is_in_panels(model.layers[0].mlp.down_proj.weight)


def test_panels_are_undone_for_other_dtypes():
    linear = _linear(32, 20, bias=False)
    weight = linear.weight.data.clone()
    lay_in_panels(linear.weight, out_features=20)
    address = linear.weight.data_ptr()
    lay_in_panels(linear.weight, out_features=20)
    assert linear.weight.data_ptr() == address
    linear.bfloat16()
    lay_in_panels(linear.weight, out_features=20)
    assert is_in_panels(linear.weight)
    assert torch.equal(linear.plain_weight(), weight.bfloat16())
    lay_in_rows(linear.weight, out_features=20)
    assert torch.equal(linear.weight, weight.bfloat16())


@pytest.mark.parametrize("has_units", [False, True])
def test_a_prepared_model_is_converted(has_units, monkeypatch, tmp_path):
    """Until it is prepared again it says so."""
    make_tiny("llama_tied").save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    expected = model.weight_slots()["model.embed_tokens.weight"].bfloat16()
    model.prepare_weights()
    model.bfloat16()
    with pytest.raises(RuntimeError, match=r"weight: expected rows, .* torch.bfloat16: call prep"):
        model.layers[0].mlp.down_proj(torch.randn(5, 96).bfloat16())
    with pytest.raises(RuntimeError, match="weight: expected rows, or panels on a CPU"):
        model.embed(torch.tensor([1]))
    monkeypatch.setattr("paged_kv.models.decoder.has_units_for", lambda _: has_units)
    model.prepare_weights()
    assert is_in_panels(model.embed_tokens) != has_units
    assert torch.equal(model.embed(torch.arange(20)), expected[:20])
    assert torch.equal(model.weight_slots()["model.embed_tokens.weight"], expected)


def test_an_engine_says_that_its_model_is_to_be_batch_invariant(monkeypatch, tmp_path):
    """So that a CPU's units for 16 bits are left alone."""
    monkeypatch.setattr("paged_kv.models.decoder.has_units_for", lambda _: True)
    make_tiny("llama_tied").bfloat16().save_pretrained(tmp_path)
    for batch_invariant in (False, True):
        loaded = load_model(tmp_path, dtype=torch.bfloat16)
        LLM(loaded, num_blocks=8, max_model_len=64, batch_invariant=batch_invariant)
        assert is_in_panels(loaded.model.embed_tokens) == batch_invariant


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
def test_weights_that_fit_into_16_bits_are_kept_so(dtype, bias, monkeypatch):
    """And give the same bits as in float32."""
    linear = _linear(96, 2000, bias=bias)
    numbers = torch.tensor([0.0, -0.0, torch.inf, torch.finfo(dtype).tiny, 1 + 2**-7, 3.0])
    linear.weight.data = linear.weight.data.to(dtype).float()
    linear.weight.data[-1, : len(numbers)] = numbers
    narrow = _linear(96, 2000, bias=bias)
    narrow.weight.data = linear.weight.data.clone()
    lay_in_panels(narrow.weight, out_features=2000)
    assert narrow.weight.dtype == dtype
    assert torch.equal(narrow.plain_weight().float(), linear.weight)
    monkeypatch.setattr("paged_kv.models.weight_memory.narrow_if_exact", lambda _: None)
    lay_in_panels(linear.weight, out_features=2000)
    assert linear.weight.dtype == torch.float32
    x = torch.randn(5, 96)
    after = narrow(x)
    assert after.dtype == torch.float32
    assert torch.equal(after.view(torch.int32), linear(x).view(torch.int32))


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
    lay_in_panels(parameter, out_features=8)
    assert parameter.dtype == torch.float32
    assert parameter.shape == (8, 33)


@pytest.mark.parametrize("variant", ["llama_biases", "llama_tied", "qwen3", "gemma3"])
def test_a_float32_model_of_16_bit_weights(variant, tmp_path, monkeypatch):
    """It takes half of the memory, and computes in float32 what it computed before."""
    make_tiny(variant).bfloat16().save_pretrained(tmp_path)
    model, wide = load_model(tmp_path).model, load_model(tmp_path).model
    model.prepare_weights()
    monkeypatch.setattr("paged_kv.models.weight_memory.narrow_if_exact", lambda _: None)
    monkeypatch.setattr("paged_kv.models.decoder.narrow_if_exact", lambda _: None)
    wide.prepare_weights()
    for module in model.modules():
        if isinstance(module, Linear):
            is_for_op = module.plain_weight().shape[1] % IN_FEATURES_UNIT == 0
            assert is_in_panels(module.weight) == is_for_op
            assert module.weight.dtype == (torch.bfloat16 if is_for_op else torch.float32)
    is_head = model.lm_head is None and model.config.hidden_size % IN_FEATURES_UNIT == 0
    assert is_in_panels(model.embed_tokens) == is_head
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    assert model.dtype == wide.dtype == torch.float32
    ids = random_ids(30)
    logits, expected = (
        PagedRunner(m, num_seqs=1, max_len=30, seed=1).step({0: ids})[0] for m in (model, wide)
    )
    assert logits.dtype == torch.float32
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("variant", ["llama_biases", "llama_tied"])
def test_embeddings_are_those_of_the_checkpoint(variant, tmp_path):
    """Also where the head reads the same matrix in panels."""
    make_tiny(variant).bfloat16().save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    ids = torch.tensor(random_ids(20))
    expected = model.embed(ids)
    model.prepare_weights()
    assert is_in_panels(model.embed_tokens) == (model.lm_head is None)
    embedded = model.embed(ids)
    assert embedded.dtype == torch.float32
    assert torch.equal(embedded, expected)


def test_weights_are_widened_for_other_devices(tmp_path):
    """There products take operands of one dtype."""
    make_tiny("llama_tied").bfloat16().save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    model.prepare_weights()
    shapes = {name: slot.shape for name, slot in model.weight_slots().items()}
    model.to("meta").prepare_weights()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.dim() for parameter in model.parameters()} == {1, 2}
    assert {name: slot.shape for name, slot in model.weight_slots().items()} == shapes


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
