"""Who may import whom, read from the source: lower layers and one's own package, without cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import subten

ROOT = Path(subten.__file__).parent

LAYERS = {
    "core": 0,
    "config": 0,
    "device": 0,
    "files": 0,
    "tokenizer": 0,
    # It stands in for a library, so that codecs may import it as they may import Triton.
    "kernels.triton_shim": 0,
    "codecs": 1,
    "kernels": 1,
    "cache": 2,
    "layers": 2,
    "models": 3,
    "weights": 3,
    "calibration": 3,
    "engine": 4,
    "train": 5,
    "bench": 5,
    "serve": 5,
    "cli": 5,
}
SAME_LAYER = {
    ("config", "core"),
    ("device", "core"),
    ("tokenizer", "core"),
    ("kernels.triton_shim", "core"),
    ("kernels", "codecs"),
    ("weights", "models"),
    ("calibration", "models"),
    ("cli", "train"),
    ("cli", "bench"),
    ("cli", "serve"),
}
"""(importer, imported) of one layer; everything else stays inside its own package."""

WITHOUT_TORCH = (
    "core",
    "config",
    "files",
    "tokenizer",
    "cache.allocator",
    "cache.plane_plan",
    "cache.planes",
    "cache.use",
    "engine.scheduler",
)
WITH_TRITON = ("kernels", "codecs")
IMPORTED_BY_NO_ONE = ("cli", "bench", "serve", "train")
FORBIDDEN_NAMES = {"utils", "common", "helpers", "manager"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {("torch", "load"), ("torch", "save")}


def modules() -> dict[str, ast.Module]:
    """Dotted name below `subten` to parsed source; a package is named by itself."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return found


MODULES = modules()
PUBLIC = {"", "__main__"}
"""`subten` itself names its public objects, `python -m subten` starts the command line."""


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every absolute module name that a source imports, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            assert node.module is not None
            yield node.module, node
            for alias in node.names:
                if f"{node.module}.{alias.name}".removeprefix("subten.") in MODULES:
                    yield f"{node.module}.{alias.name}", node


def own_imports(name: str) -> set[str]:
    """Modules of `subten` that a module imports, by dotted name below `subten`."""
    found = {module for module, _ in imports(MODULES[name])}
    own = {m.removeprefix("subten").removeprefix(".") for m in found if m.split(".")[0] == "subten"}
    return own - {""}


def package(name: str) -> str:
    """First part of a module name; files of the command line count as one package."""
    if name in LAYERS:
        return name
    first = name.split(".")[0]
    return "cli" if first.startswith("cli_") else first


def may_import(importer: str, imported: str) -> bool:
    above, below = package(importer), package(imported)
    if above == below or (above, below) in SAME_LAYER:
        return True
    if below in IMPORTED_BY_NO_ONE:
        return False
    if above == "train" and below == "engine":
        return False
    return LAYERS[below] < LAYERS[above]


def test_every_file_has_a_layer() -> None:
    assert len(MODULES) > 20
    unknown = {package(name) for name in MODULES if name not in PUBLIC} - LAYERS.keys()
    assert not unknown, f"give these a layer: {unknown}"


def test_imports_go_down() -> None:
    for name in MODULES.keys() - PUBLIC:
        wrong = sorted(other for other in own_imports(name) if not may_import(name, other))
        assert not wrong, f"subten.{name} imports {wrong}"


def test_no_cycles() -> None:
    # Imports inside functions run later: only those at import time can close a circle.
    eager = {name: eager_imports(name) & MODULES.keys() for name in MODULES.keys() - PUBLIC}

    def reached(start: str, seen: set[str]) -> set[str]:
        for other in eager[start] - seen - PUBLIC:
            seen.add(other)
            reached(other, seen)
        return seen

    for name in eager:
        assert name not in reached(name, set()), f"subten.{name} imports itself in a circle"


def eager_imports(name: str) -> set[str]:
    top = ast.Module(body=[], type_ignores=[])
    for node in MODULES[name].body:
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_typing:
            top.body.append(node)
    found = {module.removeprefix("subten.") for module, _ in imports(top)}
    # `from subten.a import b` of a module b runs a/__init__ too, which every file below a may use.
    return {other for other in found if not name.startswith(f"{other}.")}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_planning_is_without_torch(name: str) -> None:
    reached, todo = set(), [name]
    while todo:
        current = todo.pop()
        if current in reached or current not in MODULES:
            continue
        reached.add(current)
        external = {module.split(".")[0] for module, _ in imports(MODULES[current])}
        assert not external & {"torch", "triton", "numpy"}, f"subten.{current}: {external}"
        todo.extend(own_imports(current))


def test_only_kernels_and_codecs_import_triton() -> None:
    for name, tree in MODULES.items():
        external = {module.split(".")[0] for module, _ in imports(tree)}
        assert "triton" not in external or name == "kernels.triton_shim", name
        if package(name) in WITH_TRITON or name == "kernels.triton_shim":
            continue
        taken = {
            alias.name
            for module, node in imports(tree)
            if module == "subten.kernels.triton_shim" and isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        # Whether Triton is there is for anyone to ask.
        assert taken <= {"HAS_TRITON"}, f"subten.{name} imports {taken}"


def test_nothing_pickled_is_opened() -> None:
    for name, tree in MODULES.items():
        external = {module.split(".")[0] for module, _ in imports(tree)}
        assert not external & FORBIDDEN_MODULES, f"subten.{name}: {external & FORBIDDEN_MODULES}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = (node.value.id, node.attr)
                assert called not in FORBIDDEN_CALLS, f"subten.{name}:{node.lineno}"
            if isinstance(node, ast.keyword):
                assert node.arg != "trust_remote_code", f"subten.{name}"


def test_no_file_is_named_for_nothing() -> None:
    for name in MODULES:
        assert not FORBIDDEN_NAMES & set(name.split(".")), name


def test_the_rules_can_fail() -> None:
    assert not may_import("codecs.affine", "kernels.attend")
    assert not may_import("cache.pool", "engine.engine")
    assert not may_import("engine.llm", "cli")
    assert not may_import("train.loop", "engine.llm")
    assert may_import("kernels.attend", "codecs")
    assert may_import("codecs.affine", "kernels.triton_shim")
    assert may_import("engine.llm", "weights.load")
    source = "def f():\n    import triton\n    from subten.engine import llm\n"
    assert [module for module, _ in imports(ast.parse(source))] == [
        "triton",
        "subten.engine",
        "subten.engine.llm",
    ]
