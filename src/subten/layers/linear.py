"""A linear layer that follows the CPU policy for bfloat16.

Letters: T tokens, D inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import nn

from subten.kernels.cpu_linear import cpu_linear


def empty_parameter(*shape: int, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """Uninitialised weights that no gradient reaches; the loader fills every element."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x_TD -> x @ weight_ND.T + bias_N; the weight is [out, in], uninitialised."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool = False,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, device=device, dtype=dtype)
        self.bias = empty_parameter(out_features, device=device, dtype=dtype) if has_bias else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """x_TD [T, in] -> [T, out], in x's dtype."""
        return cpu_linear(x_TD, self.weight, self.bias)
