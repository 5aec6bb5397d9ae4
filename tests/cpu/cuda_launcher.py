"""Runs the CUDA kernels of `subten.kernels.cuda` in tests: on a GPU, or emulated on the CPU."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from subten.kernels.cuda import is_available, runtime

SOURCES = Path(runtime.__file__).parent
EMULATION = Path(__file__).parent / "cuda_emulation"


def emulator(*folders: Path) -> ctypes.CDLL:
    """The kernels compiled for the CPU, every thread of a block a fiber.

    `folders` hold `emulate.cpp` (the first) and stand-ins for headers, besides EMULATION.
    """
    library, log = _compile(*folders)
    assert library is not None, log
    return library


@functools.cache
def _compile(*folders: Path) -> tuple[ctypes.CDLL | None, str]:
    """The library, or none where it does not compile, and what the compiler said."""
    folders = (*folders, EMULATION)
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing"]
    command += ["-Wall", "-Wno-unknown-pragmas", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{folder}" for folder in (*folders, SOURCES)]
    with TemporaryDirectory(prefix="subten-emulator-") as folder:
        library = f"{folder}/emulate.so"
        command += [f"{folders[0]}/emulate.cpp", "-o", library]
        done = subprocess.run(command, capture_output=True, text=True)
        return (ctypes.CDLL(library) if done.returncode == 0 else None), done.stderr


def emulated_launch(
    source: str,
    name: str,
    grid: tuple[int, ...],
    block: int,
    args: Sequence[runtime.Argument],
    *,
    device: torch.device,
    shared_bytes: int = 0,
    pdl: bool = False,
) -> None:
    """`runtime.launch` on the CPU."""
    assert source.endswith(".cu") and device.type == "cpu" and isinstance(pdl, bool), source
    values = [runtime.pack_argument(arg) for arg in args]
    x, y, z = (*grid, 1, 1)[:3]
    pointers = runtime.pointer_array(values)
    failed = emulator().emulate(name.encode(), x, y, z, block, shared_bytes, pointers)
    assert not failed, f"the emulator does not hold {name}"


def use_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the entries of `subten.kernels.cuda` launch on `device`, or skip the test."""
    if device.type == "cuda":
        if not is_available(device):
            pytest.skip("needs cuda-bindings and NVRTC")
        # Kernels read weights before earlier ones have ended: inputs of a test must be in place.
        launch = runtime.launch

        def settled(*args: object, **kwargs: object) -> None:
            torch.cuda.synchronize()
            launch(*args, **kwargs)

        monkeypatch.setattr(runtime, "launch", settled)
        return
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++, and Linux")
    monkeypatch.setattr(runtime, "launch", emulated_launch)


def refuse_launch(*_args: object, **_kwargs: object) -> None:
    """`runtime.launch` where no kernel should be launched."""
    pytest.fail("launched")
