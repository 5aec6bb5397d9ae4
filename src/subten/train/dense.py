"""The dense Llama-family model that is taught from, frozen, in plain torch with static shapes."""

# Letters: B rows, S positions, T = B * S tokens, D model width, H query heads, G key-value heads,
# P head dimension, F feed-forward width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.config import ModelConfig
from subten.core import CheckpointError
from subten.weights.load import LoadedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseShape:
    """Sizes of a Llama-family model that the compiled layers depend on."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float

    @classmethod
    def from_config(cls, config: ModelConfig) -> DenseShape:
        """Sizes of a dense model; CheckpointError for what the trainer does not compute."""
        if config.is_moe or config.has_qk_norm or config.has_qkv_bias:
            raise CheckpointError(
                f"model: {config.architecture} with experts, q/k norms or biases cannot be "
                "upcycled; allowed: a dense Llama model without them"
            )
        return cls(
            width=config.d_model,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
        )


class DenseLayer(NamedTuple):
    """Weights of one dense layer: rows are outputs; q, k, v and gate, up are joined by rows."""

    attn_norm_D: Tensor
    qkv_weight: Tensor
    out_weight: Tensor
    ffn_norm_D: Tensor
    gate_up_weight: Tensor
    down_weight: Tensor


LayerFn = Callable[..., Any]


class DenseModel:
    """A frozen Llama-family model on one device in one dtype, layer by layer."""

    def __init__(self, loaded: LoadedModel) -> None:
        weights = {
            name.removesuffix(".codes"): tensor.detach()
            for name, tensor in loaded.model.named_parameters()
        }
        self.config = loaded.config
        self.shape = DenseShape.from_config(loaded.config)
        self.dtype = loaded.dtype
        self.embed_VD = weights["embedding_VD"]
        self.norm_D = weights["norm_D"]
        self.head_VD = weights.get("head_VD", self.embed_VD)
        self.device = self.embed_VD.device
        self.layers = [
            DenseLayer(*(weights[f"layers.{i}.{name}"] for name in _LAYER_WEIGHTS))
            for i in range(loaded.config.num_layers)
        ]
        self._cos_sin_PD = loaded.model.cos_sin_PD

    def rope(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each S x P, of positions 0 to S - 1."""
        cos, sin = self._cos_sin_PD[:num_positions].chunk(2, dim=-1)
        return cos.repeat(1, 2).to(self.dtype), sin.repeat(1, 2).to(self.dtype)


_LAYER_WEIGHTS = (
    "attention_norm_D",
    "attention.qkv.weight",
    "attention.output.weight",
    "ffn_norm_D",
    "ffn.gate_up.weight",
    "ffn.down.weight",
)


def make_dense_layer(shape: DenseShape) -> LayerFn:
    """The function (x_BSD, layer, cos, sin) -> x_BSD of one dense layer."""
    attention = make_attention(shape)

    def dense_layer(x_BSD: Tensor, layer: DenseLayer, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        x_BSD = attention(x_BSD, layer, cos_SP, sin_SP)
        h_BSD = F.rms_norm(x_BSD, (shape.width,), layer.ffn_norm_D, shape.norm_eps)
        gate, up = F.linear(h_BSD, layer.gate_up_weight).chunk(2, dim=-1)
        return x_BSD + F.linear(F.silu(gate) * up, layer.down_weight)

    return dense_layer


def make_attention(shape: DenseShape) -> LayerFn:
    """The function (x_BSD, layer, cos, sin) -> x_BSD of one layer's attention, residual added."""

    def attention(x_BSD: Tensor, layer: DenseLayer, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        h_BSD = F.rms_norm(x_BSD, (shape.width,), layer.attn_norm_D, shape.norm_eps)
        q, k, v = split_heads(F.linear(h_BSD, layer.qkv_weight), shape)
        q, k = rotate(q, cos_SP, sin_SP), rotate(k, cos_SP, sin_SP)
        is_grouped = shape.num_heads != shape.num_kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return x_BSD + F.linear(mixed.transpose(1, 2).flatten(2), layer.out_weight)

    return attention


def dense_forward(model: DenseModel, id_BS: Tensor, layer_fn: LayerFn) -> Tensor:
    """Final normalised state (B S D) of the dense model."""
    x_BSD = F.embedding(id_BS, model.embed_VD)
    cos_SP, sin_SP = model.rope(id_BS.shape[1])
    for layer in model.layers:
        x_BSD = layer_fn(x_BSD, layer, cos_SP, sin_SP)
    return F.rms_norm(x_BSD, (model.shape.width,), model.norm_D, model.shape.norm_eps)


def rotate(x: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Half-split rotary embedding of the last dimension (Su et al. 2021, in GPT-NeoX's order)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos_SP + torch.cat((-second, first), dim=-1) * sin_SP


def split_heads(qkv: Tensor, shape: DenseShape) -> tuple[Tensor, Tensor, Tensor]:
    """B x S x (H + 2G)P to q (B H S P), k and v (B G S P)."""
    rows, positions, _ = qkv.shape
    heads = qkv.view(rows, positions, -1, shape.head_dim).transpose(1, 2)
    sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = heads.split(sizes, dim=1)
    return q, k, v
