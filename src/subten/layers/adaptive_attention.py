"""Grouped-query attention over a cache whose pages have mixed fidelity.

Letters: T tokens of the step, D model width, H query heads, G key-value heads, M query heads of one
KV head, P positions in the rotary table, C columns of the score's own table; the head dimension is
also D where a name says THD, TGD, GDD or GD, and X is one more. N is all heads' features.
"""

from __future__ import annotations

from typing import Any

import torch

from subten.codecs.adaptive import AdaptiveFormat
from subten.codecs.rotation import hadamard
from subten.kernels.adaptive_pages import LayerPages
from subten.kernels.step import StepTensors
from subten.layers.attention import Attention


class AdaptiveAttention(Attention):
    """`Attention` over the planes of an adaptive cache, where pages lie as their places say.

    Keys are stored as Hadamard-rotated rows, or, once `calibrate` was called, as (k - R b) A with
    the rotary embedding R b of a constant b: coarse codes then cost the scores less.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("k_turn_GDD", "q_turn_GDD", "k_mean_GD", "still_1D"):
            self.register_buffer(name, None, persistent=False)
        self.k_turn_GDD: torch.Tensor | None
        self.q_turn_GDD: torch.Tensor | None
        self.k_mean_GD: torch.Tensor | None
        self.still_1D: torch.Tensor | None

    def calibrate(self, k_matrix_GDD: torch.Tensor, k_mean_GD: torch.Tensor | None) -> None:
        """Store keys as (k - R k_mean) k_matrix from now on; call it while the cache is empty.

        `k_matrix_GDD` is invertible, for rows after norm and rotary embedding; `k_mean_GD` is a key
        after norm, before rotary embedding. Scores stay what they were: queries turn with the
        inverse transpose, and the score of R k_mean is added again.
        """
        shape = (self.num_kv_heads, self.head_dim, self.head_dim)
        assert k_matrix_GDD.shape == shape, (k_matrix_GDD.shape, shape)
        assert k_mean_GD is None or k_mean_GD.shape == shape[:2], (k_mean_GD, shape)
        device = k_matrix_GDD.device
        # Both ops turn what they get by the Hadamard matrix, which is its own inverse.
        rotation_DD = hadamard(self.head_dim, device).double()
        matrix_GDD = k_matrix_GDD.double()
        inverse_GDD = torch.linalg.inv(matrix_GDD).transpose(1, 2)
        self.k_turn_GDD = (matrix_GDD @ rotation_DD).float()
        self.q_turn_GDD = (inverse_GDD @ rotation_DD).float()
        self.k_mean_GD = None if k_mean_GD is None else k_mean_GD.float()
        still = torch.zeros(1, self.head_dim, device=device)
        still[:, : self.head_dim // 2] = 1.0
        self.still_1D = still

    def forward(
        self,
        x_TD: torch.Tensor,
        norm_weight_D: torch.Tensor,
        step: StepTensors,
        *,
        pages_PGB: torch.Tensor | LayerPages,
        cos_sin_PD: torch.Tensor,
        rotation_DD: torch.Tensor | None,
    ) -> torch.Tensor:
        """Residual stream x_TD [T, d_model] -> the same, attention of its normed tokens added.

        Writes this step's keys and values into hot planes, as `step.slot_T` says, and adds the
        softmax mass of each page to `pages_PGB.mass_SP`, if there is one.
        """
        layer, fmt = pages_PGB, self.fmt
        assert isinstance(layer, LayerPages), type(layer)
        assert isinstance(fmt, AdaptiveFormat), type(fmt)
        num_tokens = x_TD.shape[0]
        qkv_TN = self.qkv(x_TD, norm_weight_K=norm_weight_D, eps=self.norm_eps)
        qkv_THD = qkv_TN.view(num_tokens, -1, self.head_dim)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q_THD, k_TGD, v_TGD = qkv_THD.split(heads, dim=1)
        added: dict[str, torch.Tensor] = {}
        if self.k_turn_GDD is None:
            q_THD = self.ops.kv_append(
                k_TGD,
                v_TGD,
                layer.pages.hot_HGB,
                fmt,
                cos_sin_PD,
                step.position_T,
                step.slot_T,
                rotation_DD=rotation_DD,
                norm_weight_D=self.k_norm_D,
                eps=self.norm_eps,
                q_THD=q_THD,
                q_norm_weight_D=self.q_norm_D,
            )
        else:
            self._append_turned(k_TGD, v_TGD, layer, cos_sin_PD, step, rotation_DD)
            q_THD, added = self._turn_queries(q_THD, cos_sin_PD, step)
        out_THD = self.ops.attend_mixed(
            q_THD,
            layer.pages,
            fmt.mixed,
            step,
            scale=self.scale,
            rotation_DD=rotation_DD,
            mass_SP=layer.mass_SP,
            **added,
        )
        out_TN = out_THD.reshape(num_tokens, -1)
        return self.output(out_TN, residual_TN=x_TD)  # type: ignore[no-any-return]

    def _append_turned(
        self,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        layer: LayerPages,
        cos_sin_PD: torch.Tensor,
        step: StepTensors,
        rotation_DD: torch.Tensor | None,
    ) -> None:
        """Append keys that were turned here, in float32; the op's own embedding stands still."""
        assert self.k_turn_GDD is not None
        assert self.still_1D is not None
        k_TGD = self.ops.norm_rope(
            k_TGD.float(),
            cos_sin_PD,
            step.position_T,
            norm_weight_D=self.k_norm_D,
            eps=self.norm_eps,
        )
        if self.k_mean_GD is not None:
            mean_TGD = self.k_mean_GD.expand(k_TGD.shape)
            k_TGD = k_TGD - self.ops.norm_rope(mean_TGD, cos_sin_PD, step.position_T)
        self.ops.kv_append(
            torch.einsum("tgd,gdx->tgx", k_TGD, self.k_turn_GDD),
            v_TGD.float(),
            layer.pages.hot_HGB,
            self.fmt,
            self.still_1D,
            torch.zeros_like(step.position_T),
            step.slot_T,
            rotation_DD=rotation_DD,
        )

    def _turn_queries(
        self, q_THD: torch.Tensor, cos_sin_PD: torch.Tensor, step: StepTensors
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Queries for turned keys, and what adds the score of the mean that those lack.

        q . R_n b = sum_i cos_ni (q_i b_i + q_j b_j) + sin_ni (q_j b_i - q_i b_j), j = i + D/2.
        """
        assert self.q_turn_GDD is not None
        q32_THD = self.ops.norm_rope(
            q_THD.float(),
            cos_sin_PD,
            step.position_T,
            norm_weight_D=self.q_norm_D,
            eps=self.norm_eps,
        )
        q_TGMD = q32_THD.unflatten(1, (self.num_kv_heads, -1))
        turned_TGMD = torch.einsum("tgmd,gdx->tgmx", q_TGMD, self.q_turn_GDD)
        turned_THD = turned_TGMD.flatten(1, 2).to(q_THD.dtype)
        if self.k_mean_GD is None:
            return turned_THD, {}
        q1, q2 = q_TGMD.chunk(2, dim=-1)
        b1, b2 = self.k_mean_GD[:, None].chunk(2, dim=-1)
        coef_TGMC = torch.cat([q1 * b1 + q2 * b2, q2 * b1 - q1 * b2], dim=-1)
        return turned_THD, {"coef_THC": coef_TGMC.flatten(1, 2), "table_PC": cos_sin_PD}
