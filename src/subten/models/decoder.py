"""The whole forward pass of every family: embedding, layers, final norm, head.

Letters: T tokens of the step, S sequences, V vocabulary, D model width (head dimension in the two
tables), L layers, P pages (positions in `cos_sin_PD`), G key-value heads, B bytes of a page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from subten.codecs import KVFormat
from subten.codecs.rotation import hadamard
from subten.config import ModelConfig
from subten.kernels import Ops
from subten.kernels.adaptive_pages import LayerPages
from subten.kernels.adaptive_step import AdaptiveStep, fail_bad
from subten.kernels.cpu_linear import head_logits
from subten.kernels.step import StepTensors
from subten.kernels.weight_formats import Weight
from subten.layers.decoder_layer import DecoderLayer
from subten.layers.linear import WeightSpec
from subten.layers.rope import cos_sin_table


class Decoder(nn.Module):
    """A decoder of any family, its weights allocated on `device` and filled by the loader.

    `fmt` is the KV format of every layer's pages. `quantization` is the format of the matrices of
    attention and feed-forward networks, and with `quantize_head` of a head that is not the
    embedding; embedding, norms, biases and routers are as they are. Run it under
    `torch.inference_mode()`.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        fmt: KVFormat,
        *,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str = "none",
        quantize_head: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.fmt = fmt
        self.device = device
        self.dtype = dtype
        self.quantization = quantization
        self.quantize_head = quantize_head
        plain = WeightSpec(device=device, dtype=dtype)
        spec = replace(plain, quantization=quantization)
        self.embedding_VD = plain.empty(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(
            DecoderLayer(config, ops=ops, fmt=fmt, spec=spec) for _ in range(config.num_layers)
        )
        self.norm_D = plain.empty(config.d_model)
        self.head_VD: Weight | None = None
        if not config.tie_word_embeddings:
            head = spec if quantize_head else plain
            self.head_VD = head.weight(config.vocab_size, config.d_model, name="head")
        self.cos_sin_PD = cos_sin_table(
            config.rope, head_dim=config.head_dim, max_len=config.max_model_len, device=device
        )
        self.rotation_DD = hadamard(config.head_dim, device) if fmt.codec.is_rotated else None

    def fold_routers(self) -> None:
        """Let each layer make what its backend's kernels take of its weights, once all are there.

        See `DecoderLayer.fold_router`.
        """
        layers: list[Any] = list(self.layers)
        for layer in layers:
            layer.fold_router()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as packed, folded routers included."""
        layers: list[Any] = list(self.layers)
        folded = [layer.router.folded_EM for layer in layers if layer.router is not None]
        return sum(t.numel() * t.element_size() for t in (*self.parameters(), *folded))

    def forward(
        self,
        step: StepTensors,
        pages_LPGB: torch.Tensor | AdaptiveStep,
        *,
        all_rows: bool = False,
    ) -> torch.Tensor:
        """Run one step -> logits_SV float32 of the rows `step.logit_row_S`.

        With `all_rows`, logits_TV of every token of the step. Appends the step's keys and values,
        encoded, to `pages_LPGB` uint8 [num_layers, num_pages, num_kv_heads, page_bytes], or to an
        adaptive cache, where a sequence with a token that cannot be stored has logits NaN.
        """
        # The residual stream stays float32: bfloat16 would round it off at each of the 2 L
        # additions (science/bf16_residual.py), and the stream is few bytes.
        x_TD = self.ops.embed(step.token_id_T, self.embedding_VD)
        bad_T = None
        each: Iterable[torch.Tensor | LayerPages]
        if isinstance(pages_LPGB, AdaptiveStep):
            bad_T = torch.zeros(len(x_TD), dtype=torch.int32, device=x_TD.device)
            each = pages_LPGB.layers(step, bad_T)
        else:
            each = pages_LPGB
        layers: list[Any] = list(self.layers)
        beside = None
        for layer, after, pages_PGB in zip(layers, [*layers[1:], None], each, strict=True):
            following = None
            # A step of single tokens asks for experts' weights while they are chosen.
            if after is not None and self.config.is_moe and step.max_query_len > 1:
                following = after.attention.unpack_beside(len(x_TD))
            x_TD = layer(
                x_TD,
                step,
                pages_PGB=pages_PGB,
                cos_sin_PD=self.cos_sin_PD,
                rotation_DD=self.rotation_DD,
                beside=beside,
                following=following,
            )
            beside = following
        # Where each sequence has one token, the rows that are wanted are all there are.
        x_SD = x_TD if all_rows or step.max_query_len == 1 else x_TD[step.logit_row_S]
        logits_SV = self._logits(x_SD)
        if bad_T is None:
            return logits_SV
        row_S = torch.arange(len(x_TD), device=bad_T.device) if all_rows else step.logit_row_S
        return fail_bad(logits_SV, bad_T, step, row_S)

    def _logits(self, x_SD: torch.Tensor) -> torch.Tensor:
        eps = self.config.norm_eps
        if self.head_VD is not None and self.head_VD.format != "none":
            return self.ops.linear(  # type: ignore[no-any-return]
                x_SD, self.head_VD, norm_weight_K=self.norm_D, eps=eps, out_dtype=torch.float32
            )
        h_SD = self.ops.rms_norm(x_SD, self.norm_D, eps=eps)
        head_VD = self.embedding_VD if self.head_VD is None else self.head_VD.codes
        return head_logits(h_SD, head_VD)
