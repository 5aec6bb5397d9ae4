"""Lists of records in files: a measurement made again replaces the old one and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from subten.bench.records import KEY_FIELDS, add_records, weights_dtype
from subten.core import ConfigError


def record(**fields):
    return {"kind": "decode_latency", "shape": "s", "gpu": "g", "batch_size": 1, "ms": 1.0} | fields


def test_records_join_or_replace(tmp_path):
    path = tmp_path / "deep" / "latency.json"
    add_records(path, [record(), record(batch_size=2)])
    add_records(path, [record(ms=3.0), record(batch_size=4)])
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["batch_size"], row["ms"]) for row in found] == [(1, 3.0), (2, 1.0), (4, 1.0)]


@pytest.mark.parametrize("field", KEY_FIELDS)
def test_every_key_field_tells_records_apart(tmp_path, field):
    path = tmp_path / "latency.json"
    add_records(path, [record()])
    add_records(path, [record(**{field: "another"})])
    assert len(json.loads(path.read_text(encoding="utf-8"))) == 2


@pytest.mark.parametrize("content", ["{}", "[1]", "no json", "\xff"])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"json: got '.*other.json'; allowed: a file to make"):
        add_records(path, [record()])
    assert path.read_text(encoding="latin-1") == content


def test_a_process_that_ends_while_it_writes_leaves_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "latency.json"
    add_records(path, [record()])
    before = path.read_text(encoding="utf-8")
    whole = Path.write_bytes

    def killed(self, data):
        whole(self, data[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        add_records(path, [record(batch_size=2)])
    assert path.read_text(encoding="utf-8") == before
    assert list(tmp_path.iterdir()) == [path]


def test_names_of_weight_formats():
    assert weights_dtype("none", "bfloat16") == "bf16"
    assert weights_dtype("none", "float32") == "float32"
    assert weights_dtype("int4", "bfloat16") == "int4"
