"""A linear layer: a weight in its format, perhaps a bias, and the op that multiplies by it.

Letters: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from subten.kernels import Ops
from subten.kernels.beside import Beside, add_product
from subten.kernels.weight_formats import Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpec:
    """Where and how the weights of a model are stored.

    `dtype` is that of norms, biases, activations and unquantised matrices, `quantization` a name in
    WEIGHT_FORMATS for the matrices of attention and feed-forward networks.
    """

    device: torch.device | str
    dtype: torch.dtype
    quantization: str = "none"

    def empty(self, *shape: int) -> nn.Parameter:
        """Uninitialised plain numbers of `dtype`."""
        return empty_parameter(*shape, device=self.device, dtype=self.dtype)

    def weight(self, *shape: int, name: str) -> Weight:
        """An uninitialised matrix, or stack of matrices, [..., N, K]; `name` stands in errors."""
        return Weight(shape, self.quantization, device=self.device, dtype=self.dtype, name=name)


def empty_parameter(*shape: int, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """Uninitialised weights that no gradient reaches; the loader fills every element."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """residual + bias + h @ weight.T, h the input or its RMSNorm; the weight is [N, K]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        ops: Ops,
        spec: WeightSpec,
        name: str,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight = spec.weight(out_features, in_features, name=name)
        self.bias = spec.empty(out_features) if has_bias else None

    def forward(
        self,
        x_TK: torch.Tensor,
        *,
        norm_weight_K: torch.Tensor | None = None,
        eps: float = 0.0,
        residual_TN: torch.Tensor | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        """x_TK [T, K] -> [T, N], in the residual's dtype or the layer's; see `kernels.linear`.

        `beside` may hold the weight unpacked already. The result is then in the memory of the
        residual, where that is float32 and the layer's dtype bfloat16.
        """
        weight = self.weight if beside is None else beside.take(self.weight)
        if (
            weight is not self.weight
            and residual_TN is not None
            and (residual_TN.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
            and norm_weight_K is None
            and self.bias is None
        ):
            return add_product(residual_TN, x_TK, weight.codes)
        return self.ops.linear(  # type: ignore[no-any-return]
            x_TK,
            weight,
            bias_N=self.bias,
            norm_weight_K=norm_weight_K,
            eps=eps,
            residual_TN=residual_TN,
        )
