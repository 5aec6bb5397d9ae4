"""Habits of the repository: sizes, words, tables that follow from results, documents that agree."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MEGABYTE = 10**6

LARGE_FILES = {
    "src/subten/assets/smollm2-moe-8x135m.safetensors": (
        "deltas and routers of the demo MoE, which no package ships",
        25 * MEGABYTE,
    ),
}
"""Files that may pass 1 MB: why, and how far."""

LONG_FILES = {
    "src/subten/kernels/attend.py": ("one op a file: plan, wrapper, twin and two kernels", 650),
}
"""Sources that may pass 500 lines: why, and how far."""

FORBIDDEN_IN_SOURCE = {
    # Nothing pickled is opened or written, and no code from a checkpoint runs.
    "pickle": r"\b(import|from) (c?pickle|dill|joblib|shelve|marshal)\b",
    "torch pickles": r"\btorch\.(load|save)\(",
    "remote code": r"trust_remote_code\s*=\s*True",
    "unfinished": r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))|raise NotImplementedError",
    "blind except": r"except( Base)?Exception:\s*pass",
}
MACHINE_PATH = re.compile(r"(?<![\w.~/:-])/(work|root|home|Users|opt|farm|mnt)/\w")


def load_tables() -> Any:
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("tables")


def listed_files() -> list[Path]:
    """Files of the project: what git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = found.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def texts() -> list[tuple[str, str]]:
    """Name and content of every text file but the results, the licence and this file."""
    found = []
    for path in listed_files():
        name = path.relative_to(ROOT).as_posix()
        if name in ("LICENSE", "tests/cpu/test_repo.py") or path.suffix in (".safetensors", ".png"):
            continue
        found.append((name, path.read_text(encoding="utf-8")))
    return found


def sources() -> list[tuple[str, str]]:
    return [(name, text) for name, text in texts() if re.match(r"src/.*\.py$", name)]


def test_no_file_is_large_without_a_reason():
    for path in listed_files():
        name, size = path.relative_to(ROOT).as_posix(), path.stat().st_size
        _, limit = LARGE_FILES.get(name, ("", MEGABYTE))
        assert size <= limit, f"{name}: {size} bytes; allowed: {limit}"


@pytest.mark.parametrize("what", FORBIDDEN_IN_SOURCE)
def test_sources_are_free_of(what):
    pattern = re.compile(FORBIDDEN_IN_SOURCE[what])
    hits = [f"{name}: {m[0]!r}" for name, text in sources() for m in pattern.finditer(text)]
    assert not hits


def test_only_device_py_asks_for_gpus():
    asks = re.compile(
        r"torch\.cuda\.(is_available|device_count|current_device|set_device|mem_get_info|get_device)"
    )
    files = {name for name, text in sources() if asks.search(text)}
    assert files == {"src/subten/device.py"}


def test_texts_are_ascii_and_name_no_place_of_one_machine():
    for name, text in texts():
        odd = {c for c in text if ord(c) > 126 or (ord(c) < 32 and c not in "\n\t")}
        # Results hold what a model wrote, and tests hold text that must survive as it is.
        assert not odd or name.startswith(("benchmarks/results/", "tests/")), (name, odd)
        hit = MACHINE_PATH.search(text)
        assert hit is None or name.startswith("tests/"), f"{name}: {text[hit.start() :][:40]!r}"


def test_sources_say_what_they_are_and_stay_short():
    for name, text in sources():
        num_lines = text.count("\n")
        _, limit = LONG_FILES.get(name, ("", 500))
        assert num_lines <= limit, f"{name}: {num_lines} lines; allowed: {limit}"
        if text.strip() and not name.endswith("/__init__.py"):
            assert ast.get_docstring(ast.parse(text)), f"{name}: no docstring"


def test_tables_follow_from_the_results():
    tables = load_tables()
    shown = set()
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        new = tables.fill(text, tables.read_results(tables.RESULTS))
        assert new == text, f"{name}: run: make tables"
        shown |= {match["name"] for match in tables.MARKED.finditer(text)}
    assert shown == set(tables.TABLES)


def test_every_result_belongs_to_a_table_and_says_where_it_is_from():
    for result in load_tables().read_results(ROOT / "benchmarks" / "results"):
        where = result.get("environment", result)
        assert not str(where.get("commit", "")).endswith("-dirty"), result["file"]
        kinds = ("demo", "latency", "kv_quality", "train")
        records = ("decode_latency", "decode_kernels", "peer_latency")
        records += ("serve_overhead", "serve_jitter", "adaptive_attend", "sanitizer")
        records += ("batch_differences", "logit_differences")
        schemes = (
            "kv_scheme_quality",
            "kv_needles",
            "kv_generation",
            "kv_synthetic",
            "kv_engine_quality",
        )
        assert result.get("kind") in (*kinds, *records, *schemes, "reliability"), result["file"]
        if result["kind"] == "reliability":
            assert result["passed"] is True, result["goal"]
            assert all(result[key] for key in ("number", "seen", "date", "commit", "command"))
        elif result["kind"] in (*records, *schemes):
            assert all(result[key] for key in ("date", "gpu", "torch", "command")), result["file"]
        elif result["kind"] != "train":
            environment = result["environment"]
            assert all(environment[key] for key in ("date", "device_name", "torch", "command"))


def test_a_table_is_made_anew_from_its_results():
    tables = load_tables()
    result = {
        "kind": "kv_quality",
        "model": "m",
        "text": "t",
        "results": [
            {
                "kv_cache_dtype": "int4",
                "kv_true_bits": 4.5,
                "perplexity": 20.5,
                "perplexity_ratio": 1.01,
                "kld_mean": 0.001,
                "kld_p999": 0.1,
                "top1_agreement": 0.98,
                "num_tokens": 1000,
            }
        ],
    }
    old = "a\n<!-- table: quality -->\nstale\n<!-- end of table -->\nb\n"
    new = tables.fill(old, [result])
    assert "| m, t | int4 | 4.500 | 20.500 | +1.00 % | 0.00100 | 0.1000 | 98.00 % | 1000 |" in new
    assert "stale" not in new
    assert new.startswith("a\n")
    assert new.endswith("\nb\n")
    assert tables.fill(new, [result]) == new
    assert tables.MISSING in tables.fill(new, [])
    with pytest.raises(KeyError):
        tables.fill(old.replace("quality", "unknown"), [])


def test_the_architecture_names_every_part_and_every_dependency():
    document = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "src" / "subten").iterdir()):
        if path.is_dir() and (path / "__init__.py").is_file():
            assert f"{path.name}/" in document, path.name
        elif path.suffix == ".py" and not path.name.startswith("__"):
            assert path.name in document, path.name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    for requirement in [*project["dependencies"], *(r for extra in extras for r in extra)]:
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        assert f"`{name[0]}`" in document, requirement


def test_torch_is_bounded_alike_where_it_is_named():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    script = (ROOT / "tools" / "install_torch.sh").read_text(encoding="utf-8")
    bounds = re.search(r'"(torch>=[^"]+)"', project)
    assert bounds is not None
    assert f'any_build="{bounds[1]}"' in script


def test_environment_variables_are_read_in_one_file_and_documented():
    document = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name, text in sources():
        for variable in re.findall(r"SUBTEN_[A-Z_]+", text):
            assert variable in document, variable
            assert name == "src/subten/config.py", f"{name}: {variable}"


def test_what_others_run_can_be_run():
    for name in (".ci/run", "tools/install_torch.sh"):
        assert os.access(ROOT / name, os.X_OK), name
