"""Cross-entropy plus distillation over a large vocabulary, without keeping its logits."""

# Letters: T tokens, C tokens of a chunk, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LossParts(NamedTuple):
    """Weighted loss (scalar, differentiable) and, per token (T), cross-entropy and KL in nats."""

    loss: Tensor
    ce_T: Tensor
    kd_T: Tensor


ChunkFn = Callable[..., tuple[Tensor, Tensor, Tensor]]


def chunk_loss(
    student_CD: Tensor, dense_CD: Tensor, head_VD: Tensor, target_C: Tensor, ce_weight_C: Tensor,
    kd_weight_C: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Cross-entropy (C), KL(dense || student) (C), and the gradient of their weighted sum (C D).

    The head is frozen, so the gradient of the student's logits closes at once:
    (w_ce + w_kd) softmax(student) - w_ce onehot(target) - w_kd softmax(dense).
    """
    student = (student_CD @ head_VD.T).float().log_softmax(-1)
    dense = (dense_CD @ head_VD.T).float().log_softmax(-1)
    dense_prob = dense.exp()
    ce_C = -student.gather(-1, target_C[:, None]).squeeze(-1)
    kd_C = (dense_prob * (dense - student)).sum(-1)
    is_target = torch.arange(head_VD.shape[0], device=target_C.device) == target_C[:, None]
    grad_CV = (ce_weight_C + kd_weight_C)[:, None] * student.exp() - kd_weight_C[
        :, None
    ] * dense_prob
    grad_CV = torch.where(is_target, grad_CV - ce_weight_C[:, None], grad_CV)
    return ce_C, kd_C, grad_CV.to(head_VD.dtype) @ head_VD


class _DistilLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student_TD: Tensor, dense_TD: Tensor, head_VD: Tensor, target_T: Tensor,
        ce_weight_T: Tensor, kd_weight_T: Tensor, chunk: int, chunk_fn: ChunkFn,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ce, kd, grad = [], [], []
        for start in range(0, student_TD.shape[0], chunk):
            part = slice(start, start + chunk)
            ce_C, kd_C, grad_CD = chunk_fn(
                student_TD[part], dense_TD[part], head_VD, target_T[part], ce_weight_T[part],
                kd_weight_T[part],
            )  # fmt: skip
            ce.append(ce_C)
            kd.append(kd_C)
            grad.append(grad_CD)
        ce_T, kd_T = torch.cat(ce), torch.cat(kd)
        ctx.save_for_backward(torch.cat(grad))
        ctx.mark_non_differentiable(ce_T, kd_T)
        return (ce_T * ce_weight_T + kd_T * kd_weight_T).sum(), ce_T, kd_T

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TD,) = ctx.saved_tensors
        return (grad_TD * grad_loss.to(grad_TD.dtype), *([None] * 7))


def distil_loss(
    student_TD: Tensor, dense_TD: Tensor, head_VD: Tensor, target_T: Tensor, *, ce_weight_T: Tensor,
    kd_weight_T: Tensor, chunk: int, chunk_fn: ChunkFn = chunk_loss,
) -> LossParts:  # fmt: skip
    """Sum over tokens of w_ce * cross-entropy + w_kd * KL(dense || student).

    The gradient to `student_TD` is made in the forward pass, `chunk` tokens at a time, so at most
    chunk x V logits exist.
    """
    return LossParts(
        *_DistilLoss.apply(  # type: ignore[no-untyped-call]
            student_TD, dense_TD, head_VD, target_T, ce_weight_T, kd_weight_T, chunk, chunk_fn
        )
    )
