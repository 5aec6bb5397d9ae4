"""What each layer caches of a text: rows and queries, layer by layer, with an exact cache.

Letters: T tokens, D head dimension (model width in x_TD), H query heads, G KV heads, N features of
all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from subten.kernels.norm_rope import norm_rope_torch
from subten.layers.decoder_layer import DecoderLayer
from subten.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRows:
    """What one layer would cache of a window, float32 rows [G, T, D] rounded to BF16.

    `raw_key_GTD` is the key before rotary embedding (not rounded), `cos_sin_TD` the angles.
    """

    layer: int
    raw_key_GTD: torch.Tensor
    key_GTD: torch.Tensor
    value_GTD: torch.Tensor
    cos_sin_TD: torch.Tensor


Attend = Callable[[LayerRows, torch.Tensor], torch.Tensor]
"""Rows and rotated queries q_HTD, float32 -> the output of attention, [H, T, D]."""


def attend_exact(rows: LayerRows, q_HTD: torch.Tensor) -> torch.Tensor:
    """Causal attention over the rows as they are."""
    return F.scaled_dot_product_attention(
        q_HTD[None], rows.key_GTD[None], rows.value_GTD[None], is_causal=True, enable_gqa=True
    )[0]


def read_layers(
    model: Decoder, windows: Sequence[torch.Tensor]
) -> Iterator[list[tuple[LayerRows, torch.Tensor]]]:
    """Each layer's exact rows and rotated queries of every window (token ids, int64)."""
    streams = [embed(model, id_T) for id_T in windows]
    for index in range(len(model.layers)):
        seen: list[tuple[LayerRows, torch.Tensor]] = []

        def attend(rows: LayerRows, q_HTD: torch.Tensor) -> torch.Tensor:
            seen.append((rows, q_HTD))  # noqa: B023
            return attend_exact(rows, q_HTD)

        streams = [run_layer(model, index, x_TD, attend) for x_TD in streams]
        yield seen


def embed(model: Decoder, id_T: torch.Tensor) -> torch.Tensor:
    """The residual stream of a window before the first layer, float32."""
    return F.embedding(id_T, model.embedding_VD).float()


@torch.inference_mode()
def run_layer(model: Decoder, index: int, x_TD: torch.Tensor, attend: Attend) -> torch.Tensor:
    """One layer over a window from its first token on, with the attention that is given."""
    layer, config, num_tokens = model.layers[index], model.config, len(x_TD)
    assert isinstance(layer, DecoderLayer), type(layer)
    attention, eps = layer.attention, config.norm_eps
    qkv_TN = attention.qkv(x_TD, norm_weight_K=layer.attention_norm_D, eps=eps)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q_THD, k_TGD, v_TGD = qkv_TN.view(num_tokens, -1, config.head_dim).split(heads, dim=1)
    position_T = torch.arange(num_tokens, device=x_TD.device)
    turned = [
        norm_rope_torch(x_THD.float(), model.cos_sin_PD, position_T, norm_weight_D=norm_D, eps=eps)
        for x_THD, norm_D in ((q_THD, attention.q_norm_D), (k_TGD, attention.k_norm_D))
    ]
    raw_TGD = k_TGD.float()
    if attention.k_norm_D is not None:
        weight_D = attention.k_norm_D.float()
        raw_TGD = F.rms_norm(raw_TGD, weight_D.shape, weight_D, eps)
    q_HTD, key_GTD, value_GTD = (
        x.bfloat16().float().transpose(0, 1) for x in (*turned, v_TGD.float())
    )
    rows = LayerRows(
        layer=index,
        raw_key_GTD=raw_TGD.transpose(0, 1),
        key_GTD=key_GTD,
        value_GTD=value_GTD,
        cos_sin_TD=model.cos_sin_PD[:num_tokens],
    )
    out_TN = attend(rows, q_HTD).transpose(0, 1).reshape(num_tokens, -1).to(qkv_TN.dtype)
    x_TD = attention.output(out_TN, residual_TN=x_TD)
    return layer.ffn(x_TD, layer.ffn_norm_D).float()  # type: ignore[no-any-return]
