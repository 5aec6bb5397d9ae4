"""The dense teacher and the upcycled student, in plain torch with static shapes.

The student's experts are the dense feed-forward network plus low-rank deltas to gate, up and down.
As all experts share the base, its products are computed once for a token; an expert adds only its
low-rank part, taken from a product with all experts' deltas through a mask. So there is no gather,
sort or scatter, and torch.compile sees dense matrix products alone.
"""

# Letters: B rows, S positions, T = B * S tokens, D model width, H query heads, G key-value heads,
# P head dimension, F feed-forward width, E experts, K experts a token, R rank, L layers,
# V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.core import CheckpointError
from subten.train.balance import router_z_loss


class DenseCheckpoint(Protocol):
    """Where a dense model comes from: a GGUF file or a folder."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Keys of a Hugging Face Llama config."""

    def tensor(self, name: str) -> Tensor:
        """One tensor by its Hugging Face name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a Llama-family model."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    is_tied: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a Hugging Face Llama config; what the trainer cannot do raises CheckpointError."""
        for key, allowed in _ONLY.items():
            if key in config and config[key] not in allowed:
                shown = " or ".join(repr(value) for value in allowed)
                raise CheckpointError(f"config: {key}: got {config[key]!r}; allowed: {shown}")
        rope = dict(config.get("rope_parameters") or {})
        if rope.get("rope_type", "default") != "default":
            raise CheckpointError(
                f"config: rope_parameters.rope_type: got {rope['rope_type']!r}; allowed: 'default'"
            )
        theta = rope.get("rope_theta", config.get("rope_theta"))
        try:
            num_heads = int(config["num_attention_heads"])
            width = int(config["hidden_size"])
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                width=width,
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or width // num_heads),
                ffn_width=int(config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                rope_theta=10000.0 if theta is None else float(theta),
                norm_eps=float(config["rms_norm_eps"]),
                max_positions=int(config["max_position_embeddings"]),
                is_tied=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise CheckpointError(f"config: key {error.args[0]!r} is missing") from error


_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_scaling": (None,),
}


class DenseLayer(NamedTuple):
    """Weights of one dense layer: rows are outputs; q, k, v and gate, up are joined by rows."""

    attn_norm_D: Tensor
    qkv_weight: Tensor
    out_weight: Tensor
    ffn_norm_D: Tensor
    gate_up_weight: Tensor
    down_weight: Tensor


class Deltas(NamedTuple):
    """What training changes, for all layers (leading L) or for one (without it), in float32.

    Expert e's gate is the base's plus `gate_b[e].T @ gate_a[e]`; up and down likewise.
    """

    router: Tensor  # L E D
    gate_a: Tensor  # L E R D
    gate_b: Tensor  # L E R F
    up_a: Tensor  # L E R D
    up_b: Tensor  # L E R F
    down_a: Tensor  # L E R F
    down_b: Tensor  # L E R D

    def by_layer(self) -> list[Deltas]:
        """One record a layer; `unbind` so that the backward pass stacks each gradient once."""
        return [Deltas(*parts) for parts in zip(*(t.unbind(0) for t in self), strict=True)]

    @property
    def num_experts(self) -> int:
        """Experts a layer."""
        return int(self.router.shape[-2])

    @property
    def rank(self) -> int:
        """Rank of the deltas."""
        return int(self.gate_a.shape[-2])


class LayerLoad(NamedTuple):
    """What a layer's router did: tokens per expert, mean probability (E each), mean z (scalar)."""

    count_E: Tensor
    prob_E: Tensor
    z: Tensor


class DenseModel:
    """A frozen Llama-family model on one device in one dtype."""

    def __init__(
        self,
        checkpoint: DenseCheckpoint,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shape = ModelShape.from_config(checkpoint.config)
        self.device, self.dtype = device, dtype

        def load(*names: str) -> Tensor:
            rows = [checkpoint.tensor(f"model.{name}.weight") for name in names]
            joined = rows[0] if len(rows) == 1 else torch.cat(rows)
            return joined.to(device=device, dtype=dtype)

        self.embed_VD = load("embed_tokens")
        self.layers: list[DenseLayer] = []
        for i in range(self.shape.num_layers):
            attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            self.layers.append(
                DenseLayer(
                    load(f"layers.{i}.input_layernorm"),
                    load(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
                    load(f"{attn}.o_proj"),
                    load(f"layers.{i}.post_attention_layernorm"),
                    load(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                    load(f"{mlp}.down_proj"),
                )
            )
        self.norm_D = load("norm")
        if self.shape.is_tied:
            self.head_VD = self.embed_VD
        else:
            self.head_VD = checkpoint.tensor("lm_head.weight").to(device=device, dtype=dtype)

    def rope(self, num_positions: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each S x P, of positions from `start`."""
        half = torch.arange(0, self.shape.head_dim, 2, device=self.device, dtype=torch.float32)
        inverse = self.shape.rope_theta ** (-half / self.shape.head_dim)
        position = torch.arange(start, start + num_positions, device=self.device).float()
        angle = (position[:, None] * inverse).repeat(1, 2)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)


def rotate(x: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Half-split rotary embedding of the last dimension (Su et al. 2021, in GPT-NeoX's order)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos_SP + torch.cat((-second, first), dim=-1) * sin_SP


def split_heads(qkv: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor, Tensor]:
    """B x S x (H + 2G)P to q (B H S P), k and v (B G S P)."""
    rows, positions, _ = qkv.shape
    heads = qkv.view(rows, positions, -1, shape.head_dim).transpose(1, 2)
    sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = heads.split(sizes, dim=1)
    return q, k, v


LayerFn = Callable[..., Any]


def make_dense_layer(shape: ModelShape) -> LayerFn:
    """The function (x_BSD, layer, cos, sin) -> x_BSD of one dense layer."""
    attention = _make_attention(shape)

    def dense_layer(x_BSD: Tensor, layer: DenseLayer, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        x_BSD = attention(x_BSD, layer, cos_SP, sin_SP)
        h_BSD = F.rms_norm(x_BSD, (shape.width,), layer.ffn_norm_D, shape.norm_eps)
        gate, up = F.linear(h_BSD, layer.gate_up_weight).chunk(2, dim=-1)
        return x_BSD + F.linear(F.silu(gate) * up, layer.down_weight)

    return dense_layer


def make_student_layer(shape: ModelShape, top_k: int, reroute: str = "none") -> LayerFn:
    """The function (x_BSD, layer, deltas, cos, sin) -> (x_BSD, LayerLoad) of one upcycled layer.

    `reroute` is for measuring how much experts differ: "none"; "others" lets the experts ranked
    K+1 to 2K compute with the weights of the first K; "permute" lets expert e + 1 compute for e.
    """
    assert reroute in ("none", "others", "permute"), reroute
    attention = _make_attention(shape)

    def student_layer(
        x_BSD: Tensor, layer: DenseLayer, deltas: Deltas, cos_SP: Tensor, sin_SP: Tensor
    ) -> tuple[Tensor, LayerLoad]:
        x_BSD = attention(x_BSD, layer, cos_SP, sin_SP)
        h_BSD = F.rms_norm(x_BSD, (shape.width,), layer.ffn_norm_D, shape.norm_eps)
        h_TD = h_BSD.flatten(0, 1)
        num_experts, rank, _ = deltas.gate_a.shape

        score_TE = F.linear(h_TD.float(), deltas.router)
        prob_TE = score_TE.softmax(-1)
        if reroute == "others":
            ranked_prob, ranked_id = prob_TE.topk(2 * top_k, dim=-1)
            top_prob_TK, id_TK = ranked_prob[:, :top_k], ranked_id[:, top_k:]
        else:
            top_prob_TK, id_TK = prob_TE.topk(top_k, dim=-1)
            if reroute == "permute":
                id_TK = (id_TK + 1) % num_experts
        weight_TK = (top_prob_TK / top_prob_TK.sum(-1, keepdim=True)).to(h_TD.dtype)
        is_chosen_TKE = id_TK[..., None] == torch.arange(num_experts, device=h_TD.device)

        a = [t.flatten(0, 1).to(h_TD.dtype) for t in deltas[1:]]
        gate_a, gate_b, up_a, up_b, down_a, down_b = a
        gate_TF, up_TF = F.linear(h_TD, layer.gate_up_weight).chunk(2, dim=-1)
        gate_low = F.linear(h_TD, gate_a)
        up_low = F.linear(h_TD, up_a)
        act_TF = torch.zeros_like(gate_TF)
        down_low = torch.zeros_like(gate_low)
        for k in range(top_k):
            mask = is_chosen_TKE[:, k].to(h_TD.dtype).repeat_interleave(rank, dim=-1)
            gate_k = gate_TF + (gate_low * mask) @ gate_b
            up_k = up_TF + (up_low * mask) @ up_b
            act_k = F.silu(gate_k) * up_k * weight_TK[:, k, None]
            act_TF = act_TF + act_k
            down_low = down_low + F.linear(act_k, down_a) * mask
        out_TD = F.linear(act_TF, layer.down_weight) + down_low @ down_b
        load = LayerLoad(
            is_chosen_TKE.float().sum((0, 1)),
            prob_TE.mean(0),
            router_z_loss(score_TE),
        )
        return x_BSD + out_TD.view_as(x_BSD), load

    return student_layer


def dense_forward(model: DenseModel, id_BS: Tensor, layer_fn: LayerFn) -> Tensor:
    """Final normalised state (B S D) of the dense model."""
    x_BSD = F.embedding(id_BS, model.embed_VD)
    cos_SP, sin_SP = model.rope(id_BS.shape[1])
    for layer in model.layers:
        x_BSD = layer_fn(x_BSD, layer, cos_SP, sin_SP)
    return F.rms_norm(x_BSD, (model.shape.width,), model.norm_D, model.shape.norm_eps)


def student_forward(
    model: DenseModel, deltas: Deltas, id_BS: Tensor, layer_fn: LayerFn
) -> tuple[Tensor, LayerLoad]:
    """Final normalised state (B S D) of the student and the load of its layers (leading L)."""
    x_BSD = F.embedding(id_BS, model.embed_VD)
    cos_SP, sin_SP = model.rope(id_BS.shape[1])
    loads: list[LayerLoad] = []
    for layer, delta in zip(model.layers, deltas.by_layer(), strict=True):
        x_BSD, load = layer_fn(x_BSD, layer, delta, cos_SP, sin_SP)
        loads.append(load)
    state = F.rms_norm(x_BSD, (model.shape.width,), model.norm_D, model.shape.norm_eps)
    return state, LayerLoad(*(torch.stack(parts) for parts in zip(*loads, strict=True)))


def init_deltas(
    model: DenseModel,
    sample_BS: Tensor,
    *,
    num_experts: int,
    rank: int,
    router_std: float,
    seed: int,
) -> Deltas:
    """Deltas of an untrained student, which computes exactly what the dense model does.

    Every expert is the same function at first: B is zero and the weights of the chosen experts sum
    to one. What breaks the symmetry is A, drawn anew for each expert (B's gradient goes through
    it), and the router, drawn at random. The router's rows are freed of the mean input of the
    layer, measured on `sample_BS`, and scaled to scores of standard deviation `router_std` over
    tokens: without this the common part of all inputs sends all tokens to the same few experts.
    """
    shape = model.shape
    generator = torch.Generator().manual_seed(seed)
    sizes = (shape.num_layers, num_experts)

    def normal(width: int) -> Tensor:
        return torch.randn(*sizes, rank, width, generator=generator) / math.sqrt(width)

    def zeros(width: int) -> Tensor:
        return torch.zeros(*sizes, rank, width)

    router = torch.randn(*sizes, shape.width, generator=generator)
    for i, h_TD in enumerate(_ffn_inputs(model, sample_BS)):
        mean_D = h_TD.mean(0)
        rows = router[i] - (router[i] @ mean_D)[:, None] * mean_D / mean_D.square().sum()
        router[i] = rows * (router_std / (h_TD @ rows.T).std(0))[:, None]
    parts = (
        router,
        normal(shape.width), zeros(shape.ffn_width),
        normal(shape.width), zeros(shape.ffn_width),
        normal(shape.ffn_width), zeros(shape.width),
    )  # fmt: skip
    return Deltas(*(t.to(model.device) for t in parts))


def _make_attention(shape: ModelShape) -> LayerFn:
    def attention(x_BSD: Tensor, layer: DenseLayer, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        h_BSD = F.rms_norm(x_BSD, (shape.width,), layer.attn_norm_D, shape.norm_eps)
        q, k, v = split_heads(F.linear(h_BSD, layer.qkv_weight), shape)
        q, k = rotate(q, cos_SP, sin_SP), rotate(k, cos_SP, sin_SP)
        is_grouped = shape.num_heads != shape.num_kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return x_BSD + F.linear(mixed.transpose(1, 2).flatten(2), layer.out_weight)

    return attention


@torch.no_grad()
def _ffn_inputs(model: DenseModel, id_BS: Tensor) -> list[Tensor]:
    """The input (T D, float32, on the CPU) of each layer's feed-forward network."""
    attention, layer_fn = _make_attention(model.shape), make_dense_layer(model.shape)
    x_BSD = F.embedding(id_BS, model.embed_VD)
    cos_SP, sin_SP = model.rope(id_BS.shape[1])
    inputs: list[Tensor] = []
    for layer in model.layers:
        mid = attention(x_BSD, layer, cos_SP, sin_SP)
        h = F.rms_norm(mid, (model.shape.width,), layer.ffn_norm_D, model.shape.norm_eps)
        inputs.append(h.flatten(0, 1).float().cpu())
        x_BSD = layer_fn(x_BSD, layer, cos_SP, sin_SP)
    return inputs
