"""What every test shares: the device, a seeded generator, markers and the comparison.

`pytest --device cuda` runs the same kernel tests on a GPU; on the default `cpu` they run under
Triton's interpreter. `--seed N` repeats the random inputs of a failed run.
`--failures FILE` keeps each failure as it happens.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="cpu (Triton's interpreter), cuda or cuda:N")
    parser.addoption("--seed", type=int, default=None, help="seed of the random inputs")
    parser.addoption("--failures", type=Path, help="file that gets each failure as it happens")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU; run with --device cuda")
    config.addinivalue_line("markers", "demo: needs the demo model, built before the tests")
    config.addinivalue_line("markers", "triton: launches Triton kernels (interpreted on the CPU)")
    device = torch.device(config.getoption("--device"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError("--device: got 'cuda', but torch sees no GPU; allowed: cpu")
        os.environ.pop("TRITON_INTERPRET", None)
        # Processes side by side share the cores: twins compute on the CPU.
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    else:
        # Triton reads this when a kernel is decorated: before any test imports subten.kernels.
        os.environ["TRITON_INTERPRET"] = "1"
        # One thread: results do not depend on the machine's cores, and small ops run faster.
        torch.set_num_threads(1)
    failures = config.getoption("--failures")
    if failures is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(failures))


class Failures:
    """Keeps what failed, and why, where a run is cut before it can say so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}, {report.when}:\n{report.longreprtext}\n\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = torch.device(config.getoption("--device")).type == "cuda"
    no_triton = _why_no_triton(on_gpu)
    for item in items:
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with --device cuda"))
        if item.get_closest_marker("triton") and no_triton:
            item.add_marker(pytest.mark.skip(reason=no_triton))


def _why_no_triton(on_gpu: bool) -> str | None:
    if not HAS_TRITON:
        return "Triton is not installed"
    if not on_gpu:
        import numpy
        import triton

        versions = [
            tuple(int(part) for part in module.__version__.split(".")[:2])
            for module in (triton, numpy)
        ]
        if versions[0] < (3, 7) and versions[1] >= (2, 4):
            return "the interpreter of Triton before 3.7 fails with NumPy 2.4 and later"
    return None


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that `--device` names."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator with a fresh seed, printed so that a failure can be run again.

    It stays on the CPU so that a seed gives the same inputs on every device.
    """
    seed = request.config.getoption("--seed")
    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    print(f"seed of the random inputs: --seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def randn(generator: torch.Generator, device: torch.device) -> Callable[..., torch.Tensor]:
    """`randn(*shape, dtype=float32, scale=1.0)`: normal values on the device under test."""

    def make(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=dtype)

    return make


@pytest.fixture(scope="session")
def server() -> Iterator[object]:
    """The HTTP server that its tests share, started when the first of them asks.

    It must end well, and without an error in its log.
    """
    from serving import KEY, OTHER_KEY, Server

    server = Server(api_key=[KEY, OTHER_KEY], max_queued_requests=20)
    yield server
    assert server.close() == 0
    assert not [line for line in server.lines if line.get("level") == "error"]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` comes filled with NaN, or with an absurd integer: what an op fails to write
    shows in its result."""
    empty = torch.empty

    def make(*args: object, **kwargs: object) -> torch.Tensor:
        new = empty(*args, **kwargs)
        if new.dtype == torch.bool:
            return new.fill_(True)
        return new.fill_(float("nan") if new.is_floating_point() else torch.iinfo(new.dtype).max)

    monkeypatch.setattr(torch, "empty", make)


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    max_error: float,
    rms_error: float,
    name: str = "values",
) -> None:
    """Fail unless the largest AND the root-mean-square difference stay within their bounds.

    Both bounds are absolute, in the unit of the values; compared in float64. Equal infinities
    differ by 0; a NaN on either side never passes. The message names the worst coordinate.
    """
    assert actual.shape == expected.shape, (name, tuple(actual.shape), tuple(expected.shape))
    if actual.numel() == 0:
        return
    left, right = actual.detach().cpu().double(), expected.detach().cpu().double()
    difference = torch.where(left == right, 0.0, (left - right).abs())
    difference = difference.nan_to_num(nan=float("inf"), posinf=float("inf"))
    flat = int(difference.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), left.shape))
    worst = float(difference.flatten()[flat])
    rms = float(difference.square().mean().sqrt())
    assert worst <= max_error and rms <= rms_error, (
        f"{name}: max error {worst:.3e} (allowed {max_error:.3e}) at {where}: "
        f"got {float(left.flatten()[flat])!r}, expected {float(right.flatten()[flat])!r}; "
        f"rms error {rms:.3e} (allowed {rms_error:.3e})"
    )
