"""What the machine is asked, and the one thing that it is told."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from subten.core import ConfigError
from subten.device import detect


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:99", "", "cpu:0"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"device: got .*allowed: auto, cpu"):
        detect(name)


def test_cpu_is_what_torch_calls_cpu() -> None:
    assert detect("cpu").torch_device == torch.device("cpu")
    assert detect("cpu").memory_bytes > 0


def test_freed_memory_is_kept_where_glibc_is() -> None:
    # In a process of its own: the setting stays until the process ends.
    code = "from subten.device import keep_freed_memory; print(keep_freed_memory())"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, check=True, text=True)
    is_glibc = sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"
    assert answer.stdout.strip() == str(is_glibc)
