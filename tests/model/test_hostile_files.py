# SPDX-License-Identifier: Apache-2.0
"""Whatever a file holds, loading it works or raises ValueError with one line that names it."""

from __future__ import annotations

import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model._gguf_tokenizers import tokenizer_metadata
from model._gguf_writing import write_gguf
from model._tiny_models import make_tiny

from paged_kv.models import load_model

FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    write_gguf(path, make_tiny("llama_tied"), metadata=tokenizer_metadata("llama-bpe"))
    return path.read_bytes()


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    make_tiny("llama_tied").save_pretrained(folder)
    return folder


def _load_or_refuse(path) -> bool:
    try:
        load_model(path)
    except ValueError as error:
        message = str(error)
    else:
        return True
    assert path.name in message
    assert "\n" not in message
    return False


def _header_length(data: bytes) -> int:
    """Where the tensor data begins: the end of the last tensor's name, roughly."""
    return data.rindex(b"output_norm.weight") + 100


def test_truncated_gguf_is_refused(gguf_bytes, tmp_path):
    header = _header_length(gguf_bytes)
    cuts = [header * i // 20 for i in range(20)]
    cuts += [header + (len(gguf_bytes) - header) * i // 12 for i in range(12)]
    cuts.append(len(gguf_bytes) - 33)
    for cut in cuts:
        path = tmp_path / "cut.gguf"
        path.write_bytes(gguf_bytes[:cut])
        assert not _load_or_refuse(path), cut


@FUZZ
@given(data=st.data())
def test_flipped_gguf_header_bytes(gguf_bytes, tmp_path, data):
    damaged = bytearray(gguf_bytes)
    header = _header_length(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(damaged)
    _load_or_refuse(path)


@FUZZ
@given(data=st.data())
def test_absurd_gguf_numbers(gguf_bytes, tmp_path, data):
    """64-bit counts, lengths and offsets at their limits."""
    damaged = bytearray(gguf_bytes)
    at = data.draw(st.integers(4, _header_length(gguf_bytes) - 8))
    value = data.draw(
        st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1])
    )
    damaged[at : at + 8] = struct.pack("<Q", value)
    path = tmp_path / "absurd.gguf"
    path.write_bytes(damaged)
    _load_or_refuse(path)


@pytest.mark.parametrize("junk", [b"", b"GGUF", b"GGUF" + b"\xff" * 100, b"\x00" * 4096])
def test_no_gguf_at_all(tmp_path, junk):
    path = tmp_path / "junk.gguf"
    path.write_bytes(junk)
    assert not _load_or_refuse(path)


def test_big_endian_gguf(gguf_bytes, tmp_path):
    path = tmp_path / "big.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + gguf_bytes[8:])
    with pytest.raises(ValueError, match="big-endian files are not"):
        load_model(path)


def _folder_with(good_folder, tmp_path, **files: bytes):
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).write_bytes(files.get(name, (good_folder / name).read_bytes()))
    return folder


def test_truncated_safetensors_is_refused(good_folder, tmp_path):
    data = (good_folder / "model.safetensors").read_bytes()
    for i in range(30):
        cut = len(data) * i // 30 if i % 2 else 3000 * i // 30
        folder = _folder_with(good_folder, tmp_path, **{"model.safetensors": data[:cut]})
        assert not _load_or_refuse(folder), cut


@FUZZ
@given(data=st.data())
def test_flipped_safetensors_header_bytes(good_folder, tmp_path, data):
    damaged = bytearray((good_folder / "model.safetensors").read_bytes())
    (header,) = struct.unpack("<Q", damaged[:8])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header + 7))] = data.draw(st.integers(0, 255))
    _load_or_refuse(_folder_with(good_folder, tmp_path, **{"model.safetensors": bytes(damaged)}))


@FUZZ
@given(data=st.data())
def test_flipped_config_bytes(good_folder, tmp_path, data):
    damaged = bytearray((good_folder / "config.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(32, 126))
    _load_or_refuse(_folder_with(good_folder, tmp_path, **{"config.json": bytes(damaged)}))
