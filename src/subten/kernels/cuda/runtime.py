"""Compile CUDA C++ with NVRTC, keep the machine code on disk, launch it on torch's stream.

Needs the extra `cuda` (cuda-bindings and NVRTC), and an NVIDIA GPU of compute capability 8.0 or
above to launch; without them everything imports and `is_available()` is False.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.resources
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from subten.config import cache_dir
from subten.device import MIN_CAPABILITY, block_shared_bytes, detect, has_gpu, on_device
from subten.files import write_whole

logger = logging.getLogger(__name__)

OPTIONS = ("--std=c++17",)
"""Options of every compilation beside the architecture; the cache is keyed by them too."""

Argument = torch.Tensor | int | float | ctypes.c_int64 | None
"""A kernel's argument: pointer (None is null), 32-bit integer, 32-bit float, 64-bit integer."""


def is_available(device: torch.device | None = None) -> bool:
    """Whether kernels can be compiled and launched on `device` (default: the first GPU)."""
    if not has_gpu() or not has_compiler():
        return False
    if device is not None and device.type != "cuda":
        return False
    index = 0 if device is None or device.index is None else device.index
    return detect(f"cuda:{index}").capability >= MIN_CAPABILITY and _can_load(index)


def _can_load(index: int) -> bool:
    """Whether one kernel compiles and loads: a driver may be older than the compiler's code.

    What loaded is kept by `kernel`; what failed is tried again for the next model, as memory may
    be free then.
    """
    try:
        kernel("route.cu", "route_kernel<4>", torch.device("cuda", index))
    except (RuntimeError, OSError) as error:
        logger.warning("no CUDA kernels on cuda:%d, Triton serves instead: %s", index, error)
        return False
    return True


def has_compiler() -> bool:
    """Whether cuda-bindings and NVRTC are installed, and work."""
    try:
        nvrtc_version()
    except ModuleNotFoundError:
        return False
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        logger.warning("no CUDA kernels, as NVRTC does not work: %s", error)
        return False
    return True


def nvrtc_version() -> str:
    """Version of the compiler, as `13.0`."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    major, minor = _nvrtc_value(nvrtc.nvrtcVersion(), "nvrtcVersion")
    return f"{major}.{minor}"


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name of a compute capability; Hopper's own instructions need its `a`."""
    major, minor = capability
    return f"sm_{major}{minor}a" if capability == (9, 0) else f"sm_{major}{minor}"


@functools.cache
def source_files() -> dict[str, str]:
    """Text of every .cu and .cuh of this package by file name."""
    folder = importlib.resources.files(__package__)
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith((".cu", ".cuh")))
    return {name: (folder / name).read_text(encoding="ascii") for name in names}


class Kernel:
    """One kernel on one device; call it to launch on torch's current stream of that device."""

    def __init__(self, cubin: bytes, symbol: str, device: torch.device) -> None:
        self._driver = importlib.import_module("cuda.bindings.driver")
        self._device = device
        # torch's context, which a thread that has run nothing yet does not have.
        got = self._driver.cuDevicePrimaryCtxRetain(device.index)
        context = self._value(got, f"cuDevicePrimaryCtxRetain of {device}")
        self._value(self._driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        self._module = self._value(self._driver.cuModuleLoadData(cubin), "cuModuleLoadData")
        got = self._driver.cuModuleGetFunction(self._module, symbol.encode())
        self._function = self._value(got, f"cuModuleGetFunction of {symbol}")
        # What a kernel declares counts too.
        self._shared_limit = 48 * 1024 - STATIC_BYTES
        self._pdl = self._attribute("PROGRAMMATIC_STREAM_SERIALIZATION")
        self._pdl.value.programmaticStreamSerializationAllowed = 1

    def __call__(
        self,
        grid: tuple[int, int, int] | tuple[int, int] | tuple[int],
        block: int,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        """Launch `grid` blocks of `block` threads; legal while a CUDA graph is captured.

        With `pdl` (programmatic dependent launch) the kernel may start before the one ahead of it
        in the stream has ended; its code must then wait before it touches what others write.
        `cluster` neighbours along x, at most 8, run at once and see each other's shared memory.
        """
        if shared_bytes > self._shared_limit:
            self._set_attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_bytes)
            self._shared_limit = shared_bytes
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        attributes = [self._pdl] if pdl else []
        if cluster > 1:
            attributes.append(self._attribute("CLUSTER_DIMENSION"))
            size = attributes[-1].value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        values = [pack_argument(arg) for arg in args]  # alive until the launch has copied them
        pointers = pointer_array(values)
        with on_device(self._device):
            got = self._driver.cuLaunchKernelEx(
                config, self._function, ctypes.addressof(pointers), 0
            )
        self._value(got, f"cuLaunchKernelEx, {grid} blocks of {block}, {shared_bytes} bytes")

    def _attribute(self, name: str) -> Any:
        """A launch attribute without its value."""
        attribute = self._driver.CUlaunchAttribute()
        ids = self._driver.CUlaunchAttributeID
        attribute.id = getattr(ids, f"CU_LAUNCH_ATTRIBUTE_{name}")
        return attribute

    def _set_attribute(self, name: str, value: int) -> None:
        attribute = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        got = self._driver.cuFuncSetAttribute(self._function, attribute, value)
        self._value(got, f"cuFuncSetAttribute, {name} = {value}")

    def _value(self, result: tuple[Any, ...], what: str) -> Any:
        error, *values = result
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{what}: {error!r}")
        return values[0] if values else None


def pointer_array(values: Sequence[Any]) -> Any:
    """The `void**` that a launch takes: the address of each value."""
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))


def pack_argument(arg: Argument) -> Any:
    """The C value that a kernel's parameter takes; an integer must fit 32 bits."""
    if arg is None:
        return ctypes.c_void_p(0)
    if isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    if isinstance(arg, ctypes.c_int64):
        return arg
    assert -(2**31) <= arg < 2**31, arg
    return ctypes.c_int32(arg)


def launch(
    source: str,
    name: str,
    grid: tuple[int, int, int] | tuple[int, int] | tuple[int],
    block: int,
    args: Sequence[Argument],
    *,
    device: torch.device,
    shared_bytes: int = 0,
    pdl: bool = False,
    cluster: int = 1,
) -> None:
    """Launch the kernel `name` of the file `source` on torch's current stream of `device`."""
    run = kernel(source, name, device)
    run(grid, block, args, shared_bytes=shared_bytes, pdl=pdl, cluster=cluster)


STATIC_BYTES = 1024
"""What kernels declare of a block's shared memory at most, where they do not say more."""


def max_shared_bytes(device: torch.device) -> int:
    """Dynamic shared memory that a block on `device` may have; a CPU stands in for sm_90."""
    return block_shared_bytes(device) - STATIC_BYTES


@functools.cache
def has_clusters(device: torch.device) -> bool:
    """Whether blocks of `device` can be launched in clusters: from compute capability 9.0 on."""
    return detect(str(device)).capability >= (9, 0)


def kernel(source: str, name: str, device: torch.device) -> Kernel:
    """The kernel that the expression `name` ("copy<float>") names in a .cu file of this package.

    Compiled at its first use on a device, which takes a second or two unless the disk cache has it,
    and loaded: so that first use must not be within a graph capture. Raises RuntimeError with the
    compiler's log.
    """
    assert device.type == "cuda" and device.index is not None, device
    return _kernel(source, name, device)


@functools.cache
def _kernel(source: str, name: str, device: torch.device) -> Kernel:
    arch = architecture(detect(str(device)).capability)
    cubin, symbol = cached_compile(source, name, arch)
    with on_device(device):
        return Kernel(cubin, symbol, device)


def cached_compile(source: str, name: str, arch: str) -> tuple[bytes, str]:
    """`compile_cubin` through files in `cache_dir()/cuda`, each written whole or not at all.

    A file is one line of JSON, with the symbol and the SHA-256 of the rest, and the machine code;
    one that does not agree with itself, or cannot be read, is made again. Where none can be written
    the code serves this process alone.
    """
    path = cache_dir() / "cuda" / f"{cache_key(source, name, arch, nvrtc_version())}.cubin"
    with contextlib.suppress(OSError):
        header, _, cubin = path.read_bytes().partition(b"\n")
        if (found := _read_header(header)) and found[1] == hashlib.sha256(cubin).hexdigest():
            return cubin, found[0]
    cubin, symbol = compile_cubin(source, name, arch)
    digest = hashlib.sha256(cubin).hexdigest()
    header = json.dumps({"symbol": symbol, "sha256": digest}).encode()
    try:
        write_whole(path, header + b"\n" + cubin)
    except OSError as error:
        _warn_not_kept(path.parent, error.strerror or type(error).__name__)
    return cubin, symbol


@functools.cache
def _warn_not_kept(folder: Path, reason: str) -> None:
    """Once for all kernels."""
    logger.warning("%s: compiled kernels are not kept: %s", folder, reason)


def cache_key(source: str, name: str, arch: str, version: str) -> str:
    """Hash of all that decides the machine code: every source file, names, options, compiler."""
    what = [source, name, arch, version, *OPTIONS]
    for file, text in source_files().items():
        if file == source or file.endswith(".cuh"):
            what += [file, text]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def compile_cubin(source: str, name: str, arch: str) -> tuple[bytes, str]:
    """Machine code of one kernel of `source`, and its symbol. Needs no GPU."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    files = source_files()
    headers = {file: text for file, text in files.items() if file.endswith(".cuh")}
    program = _nvrtc_value(
        nvrtc.nvrtcCreateProgram(
            files[source].encode(),
            source.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [file.encode() for file in headers],
        ),
        "nvrtcCreateProgram",
    )
    try:
        _nvrtc_value(nvrtc.nvrtcAddNameExpression(program, name.encode()), name)
        options = [option.encode() for option in (*OPTIONS, f"-arch={arch}")]
        result = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _buffer(_nvrtc_value(nvrtc.nvrtcGetProgramLogSize(program), "log size"))
        _nvrtc_value(nvrtc.nvrtcGetProgramLog(program, log), "log")
        text = log.decode(errors="replace").strip("\0 \n")
        _nvrtc_value(result, f"{source}, {name}, {arch}:\n{text}")
        symbol = _nvrtc_value(nvrtc.nvrtcGetLoweredName(program, name.encode()), name).decode()
        num_bytes = _nvrtc_value(nvrtc.nvrtcGetCUBINSize(program), "size of the cubin")
        cubin = _buffer(num_bytes)
        _nvrtc_value(nvrtc.nvrtcGetCUBIN(program, cubin), "cubin")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin[:num_bytes], symbol


def _buffer(num_bytes: int) -> bytes:
    """Bytes that NVRTC may write over.

    Never of length 1: those are the interpreter's own, one of each value, and the log of a program
    without warnings is one byte long.
    """
    return bytes(num_bytes + 1)


def _read_header(line: bytes) -> tuple[str, str] | None:
    try:
        header = json.loads(line)
        return header["symbol"], header["sha256"]
    except (ValueError, KeyError, TypeError):
        return None


def _nvrtc_value(result: tuple[Any, ...], what: str) -> Any:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"NVRTC {error!r}: {what}")
    return values[0] if len(values) == 1 else tuple(values)
