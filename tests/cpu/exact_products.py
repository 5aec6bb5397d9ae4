"""Matrix products that do not depend on what is multiplied beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


class ExactProducts(TorchFunctionMode):
    """Matrix products of float32 by way of float64: a row's do not depend on the rows beside it.

    In float32 they do, in the last bit, which turns a number in BF16 or a code now and then, and
    then a token wherever two logits are near.
    """

    PRODUCTS = (F.linear, torch.einsum, torch.Tensor.__matmul__, torch.Tensor.matmul)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.PRODUCTS:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.double, (args, kwargs or {}))
        return func(*args, **kwargs).float()
