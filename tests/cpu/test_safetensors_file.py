"""Damaged safetensors files are refused by file, field, what came and what was wanted."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import (
    Tiny,
    encode,
    frame,
    llama_checkpoint,
    load,
    pickled_canary,
    refusal,
    write_folder,
)

from subten.core import CheckpointError
from subten.weights.safetensors_file import open_safetensors

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "got a file of 0 bytes"),
    "seven bytes": (b"\x02" + bytes(6), "got a file of 7 bytes"),
    "length 0": (bytes(8) + b"{}", "header length: got 0"),
    "length 7 of a longer header": (
        (7).to_bytes(8, "little") + b'{"a": {}}',
        "is not JSON",
    ),
    "length beyond the file": ((99).to_bytes(8, "little") + b"{}", "header length: got 99"),
    "length 2^63": ((2**63).to_bytes(8, "little") + b"{}", f"header length: got {2**63}"),
    "length -1": (b"\xff" * 8 + b"{}", f"header length: got {2**64 - 1}"),
    "not JSON": (frame(b"{nonsense}"), "is not JSON"),
    "not UTF-8": (frame(b'{"\xff": 1}'), "is not JSON"),
    "deep nesting": (frame(b"[" * 100_000), "is not JSON"),
    "NaN": (frame(b'{"a": NaN}'), "got NaN"),
    "a list": (frame(b"[]"), "got a list"),
    "duplicate key": (
        frame(b'{"a": %b, "a": %b}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(8)),
        "key 'a' is there twice",
    ),
    "metadata": (frame(b'{"__metadata__": {"a": 1}}'), "__metadata__"),
    "entry": (frame(b'{"a": 5}'), "a: entry: got 5"),
    "field missing": (frame(b'{"a": {"dtype": "F32", "shape": []}}'), "a: entry: got"),
    "cut data": (frame(json.dumps({"a": ENTRY}).encode(), bytes(7)), "the file is cut"),
    "trailing data": (frame(json.dumps({"a": ENTRY}).encode(), bytes(9)), "bytes follow"),
    "pickle in a zip": (b"PK\x03\x04" + bytes(60), "is a zip archive"),
}
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown dtype": ({"dtype": "F31"}, "dtype: got 'F31'"),
    "dtype list": ({"dtype": ["F32"]}, "dtype: got ['F32']"),
    "negative size": ({"shape": [-2]}, "shape: got [-2]"),
    "boolean size": ({"shape": [True, 2]}, "shape: got [True, 2]"),
    "fraction": ({"shape": [2.0]}, "shape: got [2.0]"),
    "shape too large": ({"shape": [3]}, "12 bytes, as F32 [3] needs"),
    "shape overflow": ({"shape": [2**33, 2**33]}, "as F32 [8589934592, 8589934592] needs"),
    "negative start": ({"data_offsets": [-8, 0]}, "data_offsets: got [-8, 0]"),
    "reversed": ({"data_offsets": [8, 0]}, "data_offsets: got [8, 0]"),
    "one offset": ({"data_offsets": [8]}, "data_offsets: got [8]"),
    "gap": ({"data_offsets": [4, 12]}, "neither overlap nor leave gaps"),
    "beyond the file": ({"data_offsets": [2**70, 2**70 + 8]}, "neither overlap nor leave gaps"),
}
for _name, (_fields, _text) in FIELDS.items():
    HEADERS[_name] = (frame(json.dumps({"a": ENTRY | _fields}).encode(), bytes(8)), _text)


@pytest.fixture
def llama(generator: torch.Generator) -> Tiny:
    return llama_checkpoint(generator)


@pytest.mark.parametrize("name", HEADERS)
def test_damaged_header_is_refused(name: str, llama: Tiny, tmp_path: Path) -> None:
    data, text = HEADERS[name]
    folder = write_folder(tmp_path / "m", llama[0], {})
    (folder / "model.safetensors").write_bytes(data)
    message = refusal(folder)
    assert "model.safetensors: " in message and text in message


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": ENTRY, "b": ENTRY}).encode()
    (tmp_path / "x.safetensors").write_bytes(frame(header, bytes(8)))
    with pytest.raises(CheckpointError, match="b: data_offsets"):
        open_safetensors(tmp_path / "x.safetensors")


def test_tensor_without_elements_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode({"a": torch.ones(3), "none": torch.empty(0, 5), "b": torch.ones(2)}))
    file = open_safetensors(path)
    assert file.read("none").shape == (0, 5) and bool((file.read("b") == 1).all())


def test_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode({"a": torch.ones(3)}))
    file = open_safetensors(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="a: got 11 bytes, wanted 12"):
        file.read("a")


def test_random_damage_is_refused_or_harmless(
    llama: Tiny,
    generator: torch.Generator,
    tmp_path: Path,
) -> None:
    """Flipped bits in the header, and cuts: a CheckpointError or a model, never another error."""
    folder = write_folder(tmp_path / "m", *llama)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    num_refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        place = int(torch.randint(0, header_bytes, (1,), generator=generator))
        damaged[place] ^= 1 << int(torch.randint(0, 8, (1,), generator=generator))
        if int(torch.randint(0, 3, (1,), generator=generator)) == 0:
            del damaged[int(torch.randint(0, len(whole), (1,), generator=generator)) :]
        path.write_bytes(bytes(damaged))
        try:
            load(folder)
        except CheckpointError as error:
            num_refused += "\n" not in str(error)
    assert num_refused > 75


@pytest.mark.parametrize("is_zipped", [False, True])
def test_pickle_with_another_name_is_refused(is_zipped: bool, llama: Tiny, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", *llama)
    path = folder / "model.safetensors"
    data = pickled_canary(tmp_path / "ran")
    path.write_bytes(data)
    if is_zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", data)
    assert "model.safetensors" in refusal(folder)
    assert not (tmp_path / "ran").exists()
