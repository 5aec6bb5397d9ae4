"""Compiling CUDA C++ without a GPU: availability, the disk cache and its key, every kernel."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from full_disk import full_disk

from subten import device
from subten.kernels.cuda import attend, runtime
from subten.kernels.cuda.gemv import FORMATS

KERNELS = [
    (source, f"{kernel}<{weight_format.struct}, {depth}{rest}>")
    for source, kernel, rest in (
        *(
            ("linear.cu", "linear_kernel", f", {x_is_bf16}, {is_one}")
            for x_is_bf16 in ("false", "true")
            for is_one in ("false", "true")
        ),
        ("linear_route.cu", "linear_route_kernel", ", 1, 3, 512, 1"),
        ("up_ahead.cu", "up_ahead_kernel", ", 1, 512, 1"),
        ("experts.cu", "up_kernel", ", false"),
        ("experts.cu", "up_kernel", ", true"),
        ("experts.cu", "down_kernel", ""),
    )
    for weight_format in FORMATS.values()
    for depth in weight_format.depths
] + [("route.cu", f"route_kernel<{keys}>") for keys in (1, 2, 4, 8, 16, 32)]

needs_compiler = pytest.mark.skipif(
    not runtime.has_compiler(), reason="needs cuda-bindings and NVRTC"
)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """What reached the compiler, which answers with bytes of its own; the cache is empty."""
    calls = []

    def compile_cubin(*what):
        calls.append(what)
        return b"code\n" + bytes([len(calls)]), "symbol"

    monkeypatch.setenv("SUBTEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "compile_cubin", compile_cubin)
    monkeypatch.setattr(runtime, "nvrtc_version", lambda: "13.0")
    runtime._warn_not_kept.cache_clear()
    return calls


def test_availability_never_raises(monkeypatch, device):
    assert runtime.is_available() in (True, False)
    assert runtime.is_available(torch.device("cpu")) is False
    if device.type == "cpu":
        assert runtime.is_available() is False

    def missing(_name):
        raise ImportError("no module")

    monkeypatch.setattr(runtime.importlib, "import_module", missing)
    assert runtime.has_compiler() is False


def test_a_compiler_that_fails_is_named_and_asked_again(monkeypatch, caplog):
    """One that is not installed is no news."""
    for error, expected, is_said in (
        (ModuleNotFoundError("No module named 'cuda'"), False, False),
        (RuntimeError("no libnvrtc here"), False, True),
        (None, True, False),
    ):

        def version(error=error):
            if error is not None:
                raise error

        monkeypatch.setattr(runtime, "nvrtc_version", version)
        caplog.clear()
        assert runtime.has_compiler() is expected
        assert ("no libnvrtc here" in caplog.text) is is_said


def test_code_that_the_driver_refuses_leaves_the_work_to_triton(monkeypatch, caplog):
    """Until it loads: that memory was too short for one model says nothing of the next."""
    monkeypatch.setattr(runtime, "has_gpu", lambda: True)
    monkeypatch.setattr(runtime, "has_compiler", lambda: True)
    monkeypatch.setattr(runtime, "detect", lambda _name: SimpleNamespace(capability=(9, 0)))
    for error, expected in ((RuntimeError("cuModuleLoadData: invalid image"), False), (None, True)):

        def load(*_args, error=error):
            if error is not None:
                raise error

        monkeypatch.setattr(runtime, "kernel", load)
        assert runtime.is_available(torch.device("cuda", 0)) is expected
    assert "invalid image" in caplog.text and "Triton serves" in caplog.text


def test_a_second_process_finds_the_code_on_disk(compiled, tmp_path):
    first = runtime.cached_compile("linear.cu", "a<1>", "sm_90a")
    assert runtime.cached_compile("linear.cu", "a<1>", "sm_90a") == first
    assert len(compiled) == 1
    files = list((tmp_path / "cuda").iterdir())
    assert [f.suffix for f in files] == [".cubin"]  # nothing half written stays


def test_a_damaged_file_is_made_again(compiled, tmp_path):
    runtime.cached_compile("linear.cu", "a<1>", "sm_90a")
    (file,) = (tmp_path / "cuda").iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", b"{}\n" + whole, b"[1]\n", b"\xff\n"):
        file.write_bytes(damaged)
        num_calls = len(compiled)
        cubin, symbol = runtime.cached_compile("linear.cu", "a<1>", "sm_90a")
        assert len(compiled) == num_calls + 1 and symbol == "symbol"
        assert cubin == b"code\n" + bytes([len(compiled)])


@pytest.mark.usefixtures("compiled")
def test_a_disk_that_takes_nothing_loses_no_compilation(tmp_path, caplog):
    """Full, it leaves no half of a file either, and is named once, not for every kernel."""
    with full_disk():
        first = runtime.cached_compile("linear.cu", "a<1>", "sm_90a")
        second = runtime.cached_compile("linear.cu", "a<2>", "sm_90a")
    assert (first, second) == ((b"code\n\1", "symbol"), (b"code\n\2", "symbol"))
    assert list((tmp_path / "cuda").iterdir()) == []
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path / 'cuda'}: compiled kernels are not kept: File too large")


@pytest.mark.usefixtures("compiled")
def test_a_folder_that_cannot_be_made_loses_no_compilation(tmp_path, caplog):
    (tmp_path / "cuda").write_text("a file")
    for number in (1, 2):
        found = runtime.cached_compile("linear.cu", "a<1>", "sm_90a")
        assert found == (b"code\n" + bytes([number]), "symbol")
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("compiled")
def test_what_cannot_be_read_is_made_again(tmp_path, monkeypatch):
    """As another user's file may be; root may read all, so that a folder stands for it."""
    monkeypatch.setattr(runtime, "cache_key", lambda *_what: "key")
    (tmp_path / "cuda" / "key.cubin" / "in it").mkdir(parents=True)
    found = runtime.cached_compile("linear.cu", "a<1>", "sm_90a")
    assert found == (b"code\n\1", "symbol")
    assert [f.name for f in (tmp_path / "cuda").iterdir()] == ["key.cubin"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
@pytest.mark.usefixtures("compiled")
def test_who_may_read_the_code_is_for_the_umask_to_say(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        runtime.cached_compile("linear.cu", "a<1>", "sm_90a")
    finally:
        os.umask(before)
    (file,) = (tmp_path / "cuda").iterdir()
    assert file.stat().st_mode & 0o777 == mode


def test_all_that_decides_the_code_is_in_the_key(monkeypatch):
    base = ("linear.cu", "a<1>", "sm_90a", "13.0")
    keys = {runtime.cache_key(*base)}
    for i, other in enumerate(("experts.cu", "a<2>", "sm_80", "13.1")):
        keys.add(runtime.cache_key(*base[:i], other, *base[i + 1 :]))
    files = runtime.source_files()
    for name in ("linear.cu", "gemv.cuh", "experts.cu"):
        changed = files | {name: files[name] + "\n"}
        monkeypatch.setattr(runtime, "source_files", lambda changed=changed: changed)
        keys.add(runtime.cache_key(*base))
    # All differ, but for a change in a file that this kernel does not include.
    assert len(keys) == 1 + 4 + 2


def test_arguments_become_the_types_of_the_parameters():
    tensor = torch.zeros(4)
    assert runtime.pack_argument(tensor).value == tensor.data_ptr()
    assert runtime.pack_argument(None).value is None
    assert isinstance(runtime.pack_argument(3), ctypes.c_int32)
    assert isinstance(runtime.pack_argument(3.0), ctypes.c_float)
    assert runtime.pack_argument(ctypes.c_int64(2**40)).value == 2**40
    with pytest.raises(AssertionError):
        runtime.pack_argument(2**31)


WITHOUT_WARNINGS = """
import ctypes, sys
from types import ModuleType

from subten.kernels.cuda import runtime

def write(text):
    def to(_program, at):
        address = ctypes.cast(ctypes.c_char_p(at), ctypes.c_void_p)
        ctypes.memmove(address, text, len(text))
        return (0,)
    return to

nvrtc = ModuleType("cuda.bindings.nvrtc")
vars(nvrtc).update(
    nvrtcCreateProgram=lambda *_: (0, 1),
    nvrtcAddNameExpression=lambda *_: (0,),
    nvrtcCompileProgram=lambda *_: (0,),
    nvrtcGetProgramLogSize=lambda _: (0, 1),
    nvrtcGetProgramLog=write(b"\\0"),
    nvrtcGetLoweredName=lambda *_: (0, b"symbol"),
    nvrtcGetCUBINSize=lambda _: (0, 1),
    nvrtcGetCUBIN=write(b"c"),
    nvrtcDestroyProgram=lambda _: (0,),
)
sys.modules[nvrtc.__name__] = nvrtc
assert runtime.compile_cubin("linear.cu", "a<1>", "sm_90a") == (b"c", "symbol")
assert [bytes([value])[0] for value in range(256)] == list(range(256))
"""


def test_a_compiler_without_a_word_leaves_the_bytes_of_python_alone(tmp_path):
    """In a process of its own, as one that has them broken is good for nothing, and from sources:
    out of a .pyc constants come as objects of their own."""
    command = [sys.executable, "-X", f"pycache_prefix={tmp_path}", "-c", WITHOUT_WARNINGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_plans_for_more_shared_memory_than_a_gpu_has_are_refused(monkeypatch):
    """Consumers' GPUs copy in bulk too, but a block has 99 KiB there; others hand over as well."""
    gpu, found = torch.device("cuda", 0), {}
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        said = SimpleNamespace(capability=capability)
        for module in (device, attend):
            monkeypatch.setattr(module, "detect", lambda _name, said=said: said)
        device.block_shared_bytes.cache_clear()
        attend.has_bulk_copies.cache_clear()
        found[capability] = (runtime.max_shared_bytes(gpu) // 1024, attend.has_bulk_copies(gpu))
    device.block_shared_bytes.cache_clear()
    attend.has_bulk_copies.cache_clear()
    assert found == {
        (8, 0): (162, False),
        (8, 9): (98, False),
        (9, 0): (226, True),
        (10, 0): (226, True),
        (12, 0): (98, False),
    }
    assert runtime.max_shared_bytes(torch.device("cpu")) == 226 * 1024


def test_more_shared_memory_is_asked_for_where_it_is_needed(monkeypatch):
    """Once for each larger number of bytes above 48 KiB, of which 1 KiB may be declared: the down
    product of two tokens of Llama-2-7B takes 48,256 besides."""
    asked = []

    class Names:
        """An enumeration whose members are their names."""

        def __getattr__(self, name: str) -> str:
            return name

    def answer(*values):
        return lambda *_args: (0, *values)

    def set_attribute(function, name, value):
        asked.append((function, name, value))
        return (0,)

    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUfunction_attribute=Names(),
        CUlaunchAttributeID=Names(),
        CUlaunchAttribute=lambda: SimpleNamespace(value=SimpleNamespace()),
        CUlaunchConfig=SimpleNamespace,
        cuDevicePrimaryCtxRetain=answer("context"),
        cuCtxSetCurrent=answer(),
        cuModuleLoadData=answer("module"),
        cuModuleGetFunction=answer("function"),
        cuFuncSetAttribute=set_attribute,
        cuLaunchKernelEx=answer(),
    )
    monkeypatch.setattr(runtime.importlib, "import_module", lambda _name: driver)
    monkeypatch.setattr(runtime, "on_device", lambda _device: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=0)
    )
    kernel = runtime.Kernel(b"", "name", torch.device("cuda", 0))
    assert asked == []
    for num_bytes in (47 * 1024, 48256, 60 * 1024, 60 * 1024, 50 * 1024, 61 * 1024):
        kernel((1,), 32, (), shared_bytes=num_bytes)
    name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert asked == [("function", name, size) for size in (48256, 60 * 1024, 61 * 1024)]


def test_architecture_of_a_capability():
    assert runtime.architecture((9, 0)) == "sm_90a"
    assert runtime.architecture((8, 0)) == "sm_80"
    assert runtime.architecture((12, 0)) == "sm_120"


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(("source", "name"), [KERNELS[1], KERNELS[-4]])
def test_nvrtc_compiles(source, name, arch):
    cubin, symbol = runtime.compile_cubin(source, name, arch)
    assert cubin[:4] == b"\x7fELF" and symbol.encode() in cubin


@needs_compiler
def test_the_compiler_tells_what_is_wrong():
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        runtime.compile_cubin("linear.cu", "no_such_kernel<1>", "sm_90a")


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize(("source", "name"), KERNELS)
def test_every_kernel_compiles_and_loads(source, name, device):
    runtime.kernel(source, name, torch.zeros(1, device=device).device)
