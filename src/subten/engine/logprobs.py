"""Log-probabilities of chosen tokens and of the likeliest ones, from the model's own logits.

Letters: R rows, V vocabulary, N likeliest tokens.
"""

from __future__ import annotations

import torch

from subten.core import TokenLogprobs

ROWS_AT_ONCE = 16
"""Rows that are widened to float64 together, so that a prompt's chunk stays small beside a step."""


def read_logprobs(
    logits_RV: torch.Tensor, token_ids: list[int], num_top: list[int]
) -> list[TokenLogprobs | None]:
    """For each row its token's log-probability and the `num_top` likeliest, or None.

    None stands for a row whose logits are NaN, +inf or nowhere finite. logits_RV float32. The sums
    are float64 and their logarithm is rounded to float32: whichever order a device adds in, the
    result is the same to the bit in all but one case of about 10**7. Waits for the device.
    """
    assert logits_RV.dtype == torch.float32, logits_RV.dtype
    assert len(logits_RV) == len(token_ids) == len(num_top), (logits_RV.shape, len(token_ids))
    found: list[TokenLogprobs | None] = []
    for first in range(0, len(token_ids), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        found += _read(logits_RV[part], token_ids[part], num_top[part])
    return found


def _read(
    logits_RV: torch.Tensor, token_ids: list[int], num_top: list[int]
) -> list[TokenLogprobs | None]:
    token_R = torch.tensor(token_ids).to(logits_RV.device, non_blocking=True)
    own_R1 = logits_RV.gather(1, token_R.unsqueeze(-1))
    total_R1 = logits_RV.double().logsumexp(dim=-1, keepdim=True)
    rank_R1 = (logits_RV > own_R1).sum(dim=-1, keepdim=True) + 1
    num_wanted = min(max(num_top), logits_RV.shape[-1])
    top_id_RN = _key(logits_RV).topk(num_wanted, dim=-1).indices
    ids_RN = torch.cat([token_R.unsqueeze(-1), top_id_RN], dim=-1)
    logprob_RN = (logits_RV.gather(1, ids_RN).double() - total_R1).float().double()
    # One copy: ids and ranks are exact in float64.
    packed = torch.cat([total_R1, rank_R1.double(), top_id_RN.double(), logprob_RN], dim=-1)
    found: list[TokenLogprobs | None] = []
    for row, token_id, wanted in zip(packed.tolist(), token_ids, num_top, strict=True):
        total, rank, ids = row[0], row[1], row[2 : 2 + num_wanted]
        own, *others = row[2 + num_wanted :]
        if not -torch.inf < total < torch.inf:
            found.append(None)
            continue
        pairs = zip(ids[:wanted], others[:wanted], strict=True)
        top = tuple((int(i), logprob) for i, logprob in pairs if logprob > -torch.inf)
        found.append(TokenLogprobs(token_id=token_id, logprob=own, rank=int(rank), top=top))
    return found


def _key(logits_RV: torch.Tensor) -> torch.Tensor:
    """int64 in the order of the logits, the lowest id first among equals: `topk` promises none."""
    # Adding zero makes -0.0 the equal of 0.0.
    bits_RV = (logits_RV + 0.0).view(torch.int32).long()
    ordered_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV)
    id_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    return (ordered_RV << 22) - id_V
