"""Grouped-query attention over an adaptive cache: keys stored shaped, values as their planes allow.

Letters: T tokens of the step, D model width, H query heads, G key-value heads, M query heads of one
KV head, P positions in the rotary table, C columns of the score's own table; the head dimension is
also D where a name says THD, TGD, GDD or GD, and X is one more. N is all heads' features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from subten.codecs.adaptive import AdaptiveFormat
from subten.codecs.rotation import hadamard
from subten.kernels.adaptive_pages import LayerPages
from subten.kernels.beside import Beside
from subten.kernels.step import StepTensors
from subten.layers.attention import Attention


class AdaptiveAttention(Attention):
    """`Attention` over the planes of an adaptive cache.

    Keys are stored as (k - R b) A, with the rotary embedding R b of a constant b; queries turn with
    the inverse transpose of A, and the score of R b is added again, so that scores are what they
    were but for what coarse codes cost. Until `calibrate` is called, A is the Hadamard matrix and b
    the bias of the key projection, if it has one. With `keeps_mean` b is 0.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("k_turn_GDD", "q_turn_GDD", "k_mean_GD", "feedback_GDD"):
            self.register_buffer(name, None, persistent=False)
        self.k_turn_GDD: torch.Tensor | None
        self.q_turn_GDD: torch.Tensor | None
        self.k_mean_GD: torch.Tensor | None
        self.feedback_GDD: torch.Tensor | None
        self.keeps_mean = False

    def calibrate(
        self,
        matrix_GDD: torch.Tensor,
        inverse_GDD: torch.Tensor,
        *,
        mean_GD: torch.Tensor | None,
        feedback_GDD: torch.Tensor | None,
    ) -> None:
        """Store keys as (k - R mean) matrix from now on; call it while the cache is empty.

        The matrix is for keys after norm and rotary embedding, the mean for keys between the two.
        The error of channel j of a stored row, times feedback[j, i], is added to channel i > j
        before that is encoded. All float32, on the model's device.
        """
        shape = (self.num_kv_heads, self.head_dim, self.head_dim)
        for square in (matrix_GDD, inverse_GDD, feedback_GDD):
            assert square is None or square.shape == shape, (square.shape, shape)
        assert mean_GD is None or mean_GD.shape == shape[:2], (mean_GD.shape, shape)
        self.k_turn_GDD = matrix_GDD.contiguous()
        self.q_turn_GDD = inverse_GDD.mT.contiguous()
        self.k_mean_GD = None if self.keeps_mean else mean_GD
        self.feedback_GDD = None if feedback_GDD is None else feedback_GDD.contiguous()

    def forward(
        self,
        x_TD: torch.Tensor,
        norm_weight_D: torch.Tensor,
        step: StepTensors,
        *,
        pages_PGB: torch.Tensor | LayerPages,
        cos_sin_PD: torch.Tensor,
        rotation_DD: torch.Tensor | None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        """Residual stream x_TD [T, d_model] -> heads [T, N] for `output`, of its normed tokens.

        Writes this step's keys and values as `step.slot_T` and the window say, adds the softmax
        mass of each page to `pages_PGB.mass_SP`, if there is one, and marks tokens in `bad_T`.
        """
        layer, fmt = pages_PGB, self.fmt
        assert isinstance(layer, LayerPages), type(layer)
        assert isinstance(fmt, AdaptiveFormat), type(fmt)
        assert rotation_DD is not None, "adaptive caches are rotated"
        assert self.key_bias_GD is None, "its bias was left out for rows, which add it again"
        if self.k_turn_GDD is None:
            self._calibrate_plainly(x_TD.device)
        num_tokens = x_TD.shape[0]
        qkv_TN = self.qkv(x_TD, norm_weight_K=norm_weight_D, eps=self.norm_eps, beside=beside)
        qkv_THD = qkv_TN.view(num_tokens, -1, self.head_dim)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q_THD, k_TGD, v_TGD = qkv_THD.split(heads, dim=1)
        self.ops.append_mixed(
            self._stored_keys(k_TGD, cos_sin_PD, step),
            v_TGD,
            layer.pages,
            fmt.mixed,
            step,
            layer.window,
            rotation_DD=rotation_DD,
            feedback_GDD=self.feedback_GDD,
            bad_T=layer.bad_T,
        )
        q_THD, added = self._turned_queries(q_THD, cos_sin_PD, step)
        out_THD = self.ops.attend_mixed(
            q_THD,
            layer.pages,
            fmt.mixed,
            step,
            layer.window,
            scale=self.scale,
            rotation_DD=rotation_DD,
            mass_SP=layer.mass_SP,
            **added,
        )
        return out_THD.reshape(num_tokens, -1)  # type: ignore[no-any-return]

    def _calibrate_plainly(self, device: torch.device) -> None:
        rotation_DD = hadamard(self.head_dim, device)
        rotation_GDD = rotation_DD.expand(self.num_kv_heads, -1, -1)
        mean_GD = None
        if self.qkv.bias is not None and self.k_norm_D is None:
            bias_N = self.qkv.bias[self.key_rows]
            mean_GD = bias_N.detach().float().view(self.num_kv_heads, -1).contiguous()
        self.calibrate(rotation_GDD, rotation_GDD.mT, mean_GD=mean_GD, feedback_GDD=None)

    def _stored_keys(
        self, k_TGD: torch.Tensor, cos_sin_PD: torch.Tensor, step: StepTensors
    ) -> torch.Tensor:
        """(R (k - b)) A, float32; rotary embedding is linear, so that b may go before it."""
        assert self.k_turn_GDD is not None
        k_TGD, norm_D = k_TGD.float(), self.k_norm_D
        if self.k_mean_GD is not None:
            if norm_D is not None:
                k_TGD = F.rms_norm(k_TGD, norm_D.shape, norm_D.float(), self.norm_eps)
                norm_D = None
            k_TGD = k_TGD - self.k_mean_GD
        k_TGD = self.ops.norm_rope(
            k_TGD, cos_sin_PD, step.position_T, norm_weight_D=norm_D, eps=self.norm_eps
        )
        return torch.einsum("tgd,gdx->tgx", k_TGD, self.k_turn_GDD).contiguous()

    def _turned_queries(
        self, q_THD: torch.Tensor, cos_sin_PD: torch.Tensor, step: StepTensors
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Queries for stored keys, and what adds the score of the mean that those lack.

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
        turned_THD = turned_TGMD.flatten(1, 2).to(q_THD.dtype).contiguous()
        if self.k_mean_GD is None:
            return turned_THD, {}
        q1, q2 = q_TGMD.chunk(2, dim=-1)
        b1, b2 = self.k_mean_GD[:, None].chunk(2, dim=-1)
        coef_TGMC = torch.cat([q1 * b1 + q2 * b2, q2 * b1 - q1 * b2], dim=-1)
        return turned_THD, {"coef_THC": coef_TGMC.flatten(1, 2), "table_PC": cos_sin_PD}
