"""A model of a given shape with random weights, and a page pool full of random keys and values.

For speed alone: sizes, formats and memory traffic are those of real weights. The draw keeps
activations in range at any depth, so that no arithmetic meets an infinity or a subnormal.

Letters: T tokens of a chunk, G key-value heads, D head dimension.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from subten.bench.plan import weight_bytes_held
from subten.bench.quality import with_format
from subten.cache.pool import PagePool
from subten.codecs import KVFormat, kv_format
from subten.config import ModelConfig
from subten.core import PAGE_SIZE, ConfigError, refuse
from subten.device import Device, on_device
from subten.kernels import select_ops
from subten.kernels.weight_formats import Weight
from subten.models.decoder import Decoder

CHUNK_ELEMENTS = 2**26
"""Weights drawn at a time, at least an expert: 256 MB in float32, whatever the model's size."""

CHUNK_TOKENS = 2**14
"""Tokens encoded at a time."""

Progress = Callable[[float], None]


def check_memory(
    config: ModelConfig, quantization: str, dtype: torch.dtype, device: Device
) -> None:
    """ConfigError where the weights alone exceed the device's memory: before any is taken."""
    needed = weight_bytes_held(config, quantization) * dtype.itemsize / 2
    if needed > device.memory_bytes > 0:
        raise refuse(
            ConfigError,
            "shape, quantization",
            f"{needed / 1e9:.1f} GB of weights",
            f"at most the {device.memory_bytes / 1e9:.1f} GB of {device.name}",
        )


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds any more, graphs and their memory included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.inference_mode()
def random_decoder(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    quantization: str = "none",
    seed: int = 0,
    progress: Progress = lambda _share: None,
) -> Decoder:
    """A decoder of this shape, every matrix normal with variance 1 / inputs, norms about 1.

    Rows are drawn on the device in chunks and put straight into their place, packed where
    `quantization` is fp8 or int4: no second copy of the model exists at any time. The KV format
    is bf16; `with_format` gives the same weights another one.
    """
    model = Decoder(
        config,
        select_ops(backend, device),
        kv_format("bf16", config.head_dim),
        device=device,
        dtype=dtype,
        quantization=quantization,
    )
    generator = torch.Generator(device).manual_seed(seed)
    modules = list(model.named_modules())
    for index, (_, module) in enumerate(modules):
        if isinstance(module, Weight):
            _fill_weight(module, generator)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                _fill_plain(name, parameter, generator)
        progress((index + 1) / len(modules))
    model.fold_routers()
    return model


@torch.inference_mode()
def fill_pool(model: Decoder, pool: PagePool, seed: int = 0) -> None:
    """Encode a random key and value into every row of every page, through `kv_append`.

    Positions count from 0 through the pool and start again where the rotary table ends.
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    slot_T = torch.arange(pool.num_pages * PAGE_SIZE, device=device)
    position_T = slot_T % model.cos_sin_PD.shape[0]
    layers: list[Any] = list(model.layers)
    with on_device(device):
        for layer, pages_PGB in zip(layers, pool.pages_LPGB, strict=True):
            for start in range(0, len(slot_T), CHUNK_TOKENS):
                chunk = slice(start, start + CHUNK_TOKENS)
                shape = (2, len(slot_T[chunk]), pool.num_kv_heads, pool.fmt.head_dim)
                kv_2TGD = torch.empty(shape, dtype=model.dtype, device=device)
                kv_2TGD.normal_(generator=generator)
                model.ops.kv_append(
                    kv_2TGD[0],
                    kv_2TGD[1],
                    pages_PGB,
                    pool.fmt,
                    model.cos_sin_PD,
                    position_T[chunk],
                    slot_T[chunk],
                    rotation_DD=model.rotation_DD,
                    norm_weight_D=layer.attention.k_norm_D,
                    eps=model.config.norm_eps,
                )


def in_format(model: Decoder, fmt: KVFormat) -> Decoder:
    """The same weights over pages of `fmt`."""
    return model if model.fmt == fmt else with_format(model, fmt)


def _fill_weight(weight: Weight, generator: torch.Generator) -> None:
    std = weight.in_features**-0.5
    if weight.format == "none":
        weight.codes.normal_(std=std, generator=generator)
        return
    num_rows = weight.shape[0]
    chunk_rows = max(1, CHUNK_ELEMENTS // (weight.numel() // num_rows))
    for start in range(0, num_rows, chunk_rows):
        stop = min(start + chunk_rows, num_rows)
        rows = torch.empty(stop - start, *weight.shape[1:], device=weight.codes.device)
        rows.normal_(std=std, generator=generator)
        # The search for the best int4 scale would change no byte count.
        weight.copy_((slice(start, stop),), rows, search=False)


def _fill_plain(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Norm weights are about 1, biases small, embedding rows of unit variance."""
    if "norm" in name:
        parameter.normal_(mean=1.0, std=0.1, generator=generator)
    elif "bias" in name:
        parameter.normal_(std=0.1, generator=generator)
    elif name.startswith("embedding"):
        parameter.normal_(generator=generator)
    else:
        parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
