"""The upcycled student, in plain torch with static shapes.

Its experts are the dense feed-forward network plus low-rank deltas to gate, up and down.
As all experts share the base, its products are computed once for a token; an expert adds only its
low-rank part, taken from a product with all experts' deltas through a mask. So there is no gather,
sort or scatter, and torch.compile sees dense matrix products alone.
"""

# Letters: B rows, S positions, T = B * S tokens, D model width, H query heads, G key-value heads,
# P head dimension, F feed-forward width, E experts, K experts a token, R rank, L layers,
# V vocabulary

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.train.balance import router_z_loss
from subten.train.dense import (
    DenseLayer,
    DenseModel,
    DenseShape,
    LayerFn,
    make_attention,
    make_dense_layer,
)


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


def make_student_layer(shape: DenseShape, top_k: int, reroute: str = "none") -> LayerFn:
    """The function (x_BSD, layer, deltas, cos, sin) -> (x_BSD, LayerLoad) of one upcycled layer.

    `reroute` is for measuring how much experts differ: "none"; "others" lets the experts ranked
    K+1 to 2K compute with the weights of the first K; "permute" lets expert e + 1 compute for e.
    """
    assert reroute in ("none", "others", "permute"), reroute
    attention = make_attention(shape)

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
    width, ffn_width = model.config.d_model, model.config.d_ffn
    generator = torch.Generator().manual_seed(seed)
    sizes = (model.config.num_layers, num_experts)

    router = torch.randn(*sizes, width, generator=generator)
    for i, h_TD in enumerate(_ffn_inputs(model, sample_BS)):
        mean_D = h_TD.mean(0)
        rows = router[i] - (router[i] @ mean_D)[:, None] * mean_D / mean_D.square().sum()
        router[i] = rows * (router_std / (h_TD @ rows.T).std(0))[:, None]
    parts = [router]
    for inner, outer in ((width, ffn_width), (width, ffn_width), (ffn_width, width)):
        a = torch.randn(*sizes, rank, inner, generator=generator) / math.sqrt(inner)
        parts += [a, torch.zeros(*sizes, rank, outer)]
    return Deltas(*(t.to(model.device) for t in parts))


@torch.no_grad()
def _ffn_inputs(model: DenseModel, id_BS: Tensor) -> list[Tensor]:
    """The input (T D, float32, on the CPU) of each layer's feed-forward network."""
    attention, layer_fn = make_attention(model.shape), make_dense_layer(model.shape)
    x_BSD = F.embedding(id_BS, model.embed_VD)
    cos_SP, sin_SP = model.rope(id_BS.shape[1])
    inputs: list[Tensor] = []
    for layer in model.layers:
        mid = attention(x_BSD, layer, cos_SP, sin_SP)
        h = F.rms_norm(mid, (model.shape.width,), layer.ffn_norm_D, model.shape.norm_eps)
        inputs.append(h.flatten(0, 1).float().cpu())
        x_BSD = layer_fn(x_BSD, layer, cos_SP, sin_SP)
    return inputs
