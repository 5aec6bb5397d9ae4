"""What each layer caches of a text: rows and queries, layer by layer, with an exact cache.

A text is a window [T, ...], or several of one length [W, T, ...]: names leave W out.

Letters: W windows, T tokens, D head dimension (model width in x_TD), H query heads, G KV heads, N
features of all heads, M tokens of all windows.
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
    """What one layer would cache of a text, float32 rows [G, T, D] rounded to BF16.

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
    q_4, key_4, value_4 = (
        x.reshape(-1, *x.shape[-3:]) for x in (q_HTD, rows.key_GTD, rows.value_GTD)
    )
    out_WHTD = F.scaled_dot_product_attention(q_4, key_4, value_4, is_causal=True, enable_gqa=True)
    return out_WHTD.view_as(q_HTD)


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


def embed(model: Decoder, id_WT: torch.Tensor) -> torch.Tensor:
    """The residual stream of windows, or of one [T], before the first layer, float32."""
    x_MD = model.ops.embed(id_WT.flatten(), model.embedding_VD)
    return x_MD.view(*id_WT.shape, -1)  # type: ignore[no-any-return]


@torch.inference_mode()
def run_layer(model: Decoder, index: int, x_TD: torch.Tensor, attend: Attend) -> torch.Tensor:
    """One layer over a text from its first token on, with the attention that is given."""
    layer, config = model.layers[index], model.config
    assert isinstance(layer, DecoderLayer), type(layer)
    attention, eps = layer.attention, config.norm_eps
    *windows, num_tokens, _ = x_TD.shape
    x_MD = x_TD.reshape(-1, x_TD.shape[-1])
    qkv_MN = attention.qkv(x_MD, norm_weight_K=layer.attention_norm_D, eps=eps)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q_MHD, k_MGD, v_MGD = qkv_MN.view(len(x_MD), -1, config.head_dim).split(heads, dim=1)
    position_M = torch.arange(len(x_MD), device=x_TD.device) % num_tokens
    turned = [
        norm_rope_torch(x_MHD.float(), model.cos_sin_PD, position_M, norm_weight_D=norm_D, eps=eps)
        for x_MHD, norm_D in ((q_MHD, attention.q_norm_D), (k_MGD, attention.k_norm_D))
    ]
    raw_MGD = k_MGD.float()
    if attention.k_norm_D is not None:
        weight_D = attention.k_norm_D.float()
        raw_MGD = F.rms_norm(raw_MGD, weight_D.shape, weight_D, eps)

    def by_head(x_MHD: torch.Tensor) -> torch.Tensor:
        return x_MHD.view(*windows, num_tokens, -1, config.head_dim).transpose(-3, -2)

    q_HTD, key_GTD, value_GTD = (by_head(_rounded(x_MHD)) for x_MHD in (*turned, v_MGD.float()))
    rows = LayerRows(
        layer=index,
        raw_key_GTD=by_head(raw_MGD.contiguous()),
        key_GTD=key_GTD,
        value_GTD=value_GTD,
        cos_sin_TD=model.cos_sin_PD[:num_tokens],
    )
    out_MN = attend(rows, q_HTD).transpose(-3, -2).reshape(len(x_MD), -1).to(qkv_MN.dtype)
    x_MD = attention.output(out_MN, residual_TN=x_MD)
    return layer.ffn(x_MD, layer.ffn_norm_D).float().view_as(x_TD)  # type: ignore[no-any-return]


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """As a model in BF16 has it, whatever this one's dtype."""
    return x.bfloat16().float()
