"""Grouped-query attention over the paged, encoded KV cache.

Letters: T tokens of the step, D model width, H query heads, G key-value heads, P pages, B bytes of
a page; the head dimension is also D where a name says THD or TGD. N is all heads' features.
"""

from __future__ import annotations

import torch
from torch import nn

from subten.codecs import KVFormat
from subten.config import ModelConfig
from subten.kernels import Ops
from subten.kernels.beside import Beside, unpack_beside
from subten.kernels.step import StepTensors
from subten.layers.linear import Linear, WeightSpec


class Attention(nn.Module):
    """Norm and project, rotate, append to the pages, attend; `output` projects back.

    q, k and v are rows of one matrix, in that order. `output` is the layer's to call: what comes
    after it may share its launch. `q_norm_D` and `k_norm_D` are the per-head
    RMSNorm weights of models that have them.

    Until `strip_key_bias` is called, keys are stored as the projection makes them, with its bias.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        ops: Ops,
        fmt: KVFormat,
        spec: WeightSpec,
    ) -> None:
        super().__init__()
        assert fmt.head_dim == config.head_dim, (fmt.head_dim, config.head_dim)
        self.ops = ops
        self.fmt = fmt
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.norm_eps = config.norm_eps
        num_query = config.num_heads * config.head_dim
        num_rows = num_query + 2 * config.num_kv_heads * config.head_dim
        has_bias = config.has_qkv_bias
        self.qkv = Linear(
            config.d_model, num_rows, ops=ops, spec=spec, name="qkv", has_bias=has_bias
        )
        self.output = Linear(
            num_query,
            config.d_model,
            ops=ops,
            spec=spec,
            name="attention output",
            has_bias=has_bias,
        )
        self.q_norm_D: nn.Parameter | None = None
        self.k_norm_D: nn.Parameter | None = None
        if config.has_qk_norm:
            self.q_norm_D = spec.empty(config.head_dim)
            self.k_norm_D = spec.empty(config.head_dim)
        self.register_buffer("key_bias_GD", None, persistent=False)
        self.key_bias_GD: torch.Tensor | None

    @property
    def key_rows(self) -> slice:
        """Rows of `qkv` that make keys."""
        first = self.num_heads * self.head_dim
        return slice(first, first + self.num_kv_heads * self.head_dim)

    def strip_key_bias(self) -> None:
        """Store keys without the bias of their projection from now on; their scores keep it.

        Call it while the cache is empty, for layers with such a bias and no norm after it.
        """
        bias_N = self.qkv.bias
        assert bias_N is not None, "no bias to strip"
        assert self.k_norm_D is None, "a norm follows the bias"
        assert self.key_bias_GD is None, "stripped already"
        key_bias_N = bias_N.detach()[self.key_rows].float()
        self.key_bias_GD = key_bias_N.view(self.num_kv_heads, self.head_dim).contiguous()
        # Not in place: other formats of the same model may share the weights.
        rest_N = bias_N.detach().clone()
        rest_N[self.key_rows] = 0
        self.qkv.bias = nn.Parameter(rest_N, requires_grad=False)

    def unpack_beside(self, num_tokens: int) -> Beside | None:
        """What of the weights can be unpacked beside other work, for a step of so many tokens."""
        return unpack_beside([self.qkv.weight, self.output.weight], num_tokens)

    def forward(
        self,
        x_TD: torch.Tensor,
        norm_weight_D: torch.Tensor,
        step: StepTensors,
        *,
        pages_PGB: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        rotation_DD: torch.Tensor | None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        """Residual stream x_TD [T, d_model] -> heads [T, N] for `output`, of its normed tokens.

        Writes this step's keys and values, encoded, into this layer's `pages_PGB`. `beside` may
        hold weights that are unpacked already.
        """
        num_tokens = x_TD.shape[0]
        qkv_TN = self.qkv(x_TD, norm_weight_K=norm_weight_D, eps=self.norm_eps, beside=beside)
        qkv_THD = qkv_TN.view(num_tokens, -1, self.head_dim)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q_THD, k_TGD, v_TGD = qkv_THD.split(heads, dim=1)
        out_THD = self.ops.append_attend(
            q_THD,
            k_TGD,
            v_TGD,
            pages_PGB,
            self.fmt,
            cos_sin_PD,
            step,
            scale=self.scale,
            rotation_DD=rotation_DD,
            q_norm_weight_D=self.q_norm_D,
            k_norm_weight_D=self.k_norm_D,
            eps=self.norm_eps,
            key_bias_GD=self.key_bias_GD,
        )
        return out_THD.reshape(num_tokens, -1)  # type: ignore[no-any-return]
