"""Statistics of a model's keys and queries, and what the cache gains from them.

From text read once with an exact cache, for each layer and KV head:

- the mean key before rotary embedding, m. The cache stores k - R_n m (R_n turns position n), and
  q . R_n m is added to the score: exact, since it depends on positions alone.
- S, the covariance of such keys, and F, the second moment of the queries: what scores feel.

A transform stores rows k A in place of rotated ones, and queries turn to q A^-T, so that scores
are what they were. A row with one norm is quantised with an error equal in all stored channels.

- Balanced: the A under which scores feel least of that error,

      N = S^-1/2 (S^1/2 F S^1/2)^1/2 S^-1/2,    A = U diag(e)^1/2 H,    N = U diag(e) U^T,

  H the Hadamard rotation. It minimises tr(F A^-T A^-1) tr(A^T S A) (Cauchy-Schwarz: the least is
  the square of tr (S^1/2 F S^1/2)^1/2); that channels are alike is H's work.
- Shaped: A = S^-1/4 H, and the error of each channel is fed into the channels after it, so that
  what is left falls where queries do not look; the filter is the Cholesky factor of
  A^-1 F A^-T, as in GPTQ (Frantar et al., 2023) for weights. Only encoding knows of it.

Letters: L layers, G KV heads, D head dimension, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from subten.calibration.rows import read_layers
from subten.codecs.rotation import hadamard
from subten.core import RequestError, refuse
from subten.models.decoder import Decoder

NUM_SINKS = 4
"""First tokens of a text: far from all other keys, exact in the cache, and left out here."""

RIDGE = 1e-2
"""Share of the mean eigenvalue that is added to each: no direction is thought to be free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyStatistics:
    """Moments of every layer and KV head: means float32, second moments float64.

    `mean_key_LGD` before rotary embedding, `mean_value_LGD`, `key_LGDD` S, `query_LGDD` F.
    """

    mean_key_LGD: torch.Tensor
    mean_value_LGD: torch.Tensor
    key_LGDD: torch.Tensor
    query_LGDD: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyTransform:
    """How keys are stored, float32: rows k A, queries q A^-T; `feedback_LGDD` of a shaped one.

    `feedback_LGDD[..., j, i]` is how much of channel j's error is added to channel i > j, and
    `outlier_LGD` int32 its channels, first those that cost most in codes.
    """

    matrix_LGDD: torch.Tensor
    inverse_LGDD: torch.Tensor
    feedback_LGDD: torch.Tensor | None = None
    outlier_LGD: torch.Tensor | None = None


def key_statistics(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    *,
    progress: Callable[[float], None] = lambda _share: None,
) -> KeyStatistics:
    """Read texts, token ids each and at most the model's context of them.

    A few thousand tokens suffice: D^2 numbers a head, each a mean over all tokens.
    """
    limit, device = model.config.max_model_len, model.device
    windows = [
        torch.tensor(ids[:limit], device=device) for ids in texts if len(ids[:limit]) > NUM_SINKS
    ]
    if not windows:
        raise refuse(RequestError, "text", "none", f"texts of more than {NUM_SINKS} tokens")
    found = []
    for index, seen in enumerate(read_layers(model, windows)):
        rows = [rows for rows, _ in seen]
        mean_key_GD = _mean([r.raw_key_GTD for r in rows])
        rest = [r.key_GTD - turn(mean_key_GD, r.cos_sin_TD) for r in rows]
        # The queries of one KV head are of one kind.
        q_GTD = [
            q_HTD[:, NUM_SINKS:].reshape(len(mean_key_GD), -1, q_HTD.shape[-1]) for _, q_HTD in seen
        ]
        key_GDD = _square([x_GTD[:, NUM_SINKS:] for x_GTD in rest])
        found.append((mean_key_GD, _mean([r.value_GTD for r in rows]), key_GDD, _square(q_GTD)))
        progress((index + 1) / len(model.layers))
    mean_key_LGD, mean_value_LGD, key_LGDD, query_LGDD = (
        torch.stack(each) for each in zip(*found, strict=True)
    )
    return KeyStatistics(
        mean_key_LGD=mean_key_LGD,
        mean_value_LGD=mean_value_LGD,
        key_LGDD=key_LGDD,
        query_LGDD=query_LGDD,
    )


def _mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Over all tokens but the sinks of each window: [G, T, D] each -> float32 [G, D]."""
    all_GTD = torch.cat([x_GTD[:, NUM_SINKS:] for x_GTD in parts], dim=1)
    return all_GTD.double().mean(dim=1).float()


def _square(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Second moment of rows [G, T, D], float64 [G, D, D]."""
    all_GTD = torch.cat(list(parts), dim=1).double()
    return all_GTD.mT @ all_GTD / all_GTD.shape[1]


def turn(mean_GD: torch.Tensor, cos_sin_TD: torch.Tensor) -> torch.Tensor:
    """R_n m of every position: [G, D], angles [T, D] -> [G, T, D]; half-split pairs."""
    first_G1C, second_G1C = mean_GD[:, None].chunk(2, dim=-1)
    cos_TC, sin_TC = cos_sin_TD.chunk(2, dim=-1)
    turned = (
        first_G1C * cos_TC - second_G1C * sin_TC,
        second_G1C * cos_TC + first_G1C * sin_TC,
    )
    return torch.cat(turned, dim=-1)


def hadamard_transform(statistics: KeyStatistics) -> KeyTransform:
    """The rotation that codecs use without calibration."""
    shape = statistics.key_LGDD.shape
    rotation_DD = hadamard(shape[-1], statistics.key_LGDD.device)
    return KeyTransform(
        matrix_LGDD=rotation_DD.expand(shape), inverse_LGDD=rotation_DD.mT.expand(shape)
    )


def balanced_transform(statistics: KeyStatistics) -> KeyTransform:
    """The matrix under which scores feel least of an error equal in all channels."""
    matrix_LGDD = balanced_matrix(statistics.key_LGDD, statistics.query_LGDD)
    return _transform(matrix_LGDD, statistics.key_LGDD)


def shaped_transform(statistics: KeyStatistics) -> KeyTransform:
    """Half of the keys' covariance evened out, and the feedback that moves errors aside."""
    rotation_DD = hadamard(statistics.key_LGDD.shape[-1], statistics.key_LGDD.device).double()
    matrix_LGDD = _power(_ridged(statistics.key_LGDD), -0.25) @ rotation_DD
    inverse_LGDD = torch.linalg.inv(matrix_LGDD)
    felt_LGDD = _ridged(inverse_LGDD @ _ridged(statistics.query_LGDD) @ inverse_LGDD.mT)
    # A factor whose column i holds channels up to i: Cholesky's with the channels in reverse.
    factor_LGDD = torch.linalg.cholesky(felt_LGDD.flip(-1, -2)).flip(-1, -2)
    left_LGD = factor_LGDD.diagonal(dim1=-2, dim2=-1)
    feedback_LGDD = factor_LGDD / left_LGD[..., None, :]
    size_LGDD = matrix_LGDD.mT @ _ridged(statistics.key_LGDD) @ matrix_LGDD
    transform = _transform(matrix_LGDD, statistics.key_LGDD)
    return KeyTransform(
        matrix_LGDD=transform.matrix_LGDD,
        inverse_LGDD=transform.inverse_LGDD,
        feedback_LGDD=feedback_LGDD.triu(1).float(),
        outlier_LGD=_outliers_first(left_LGD.square(), size_LGDD.diagonal(dim1=-2, dim2=-1)),
    )


def _outliers_first(felt_LGD: torch.Tensor, size_LGD: torch.Tensor) -> torch.Tensor:
    """Channels in the order of what it saves to keep them exact, int32.

    Scores feel sum(felt) sum(size) / D of the error that a unit of size makes: a channel that has
    none takes its share out of both sums.
    """
    felt_share_LGD, size_share_LGD = (
        x_LGD / x_LGD.sum(dim=-1, keepdim=True) for x_LGD in (felt_LGD, size_LGD)
    )
    return (felt_share_LGD + size_share_LGD).argsort(dim=-1, descending=True).int()


def balanced_matrix(key_DD: torch.Tensor, query_DD: torch.Tensor) -> torch.Tensor:
    """A of S and F, float64 [..., D, D]; see the head of the file."""
    s_DD, f_DD = _ridged(key_DD), _ridged(query_DD)
    root_DD, inverse_root_DD = _power(s_DD, 0.5), _power(s_DD, -0.5)
    n_DD = inverse_root_DD @ _power(root_DD @ f_DD @ root_DD, 0.5) @ inverse_root_DD
    values_D, vectors_DD = torch.linalg.eigh(n_DD)
    rotation_DD = hadamard(n_DD.shape[-1], n_DD.device).double()
    return vectors_DD @ torch.diag_embed(values_D.clamp(min=1e-30).sqrt()) @ rotation_DD  # type: ignore[no-any-return]


def score_noise(statistics: KeyStatistics, transform: KeyTransform) -> torch.Tensor:
    """How much each layer's scores feel of a coarse code, float64 [L].

    The variance of q . e / sqrt(D), in the mean over KV heads, for an error e that is equal in all
    stored channels and as large as the row.
    """
    inverse_LGDD = transform.inverse_LGDD.double()
    felt_LGDD = inverse_LGDD @ statistics.query_LGDD @ inverse_LGDD.mT
    matrix_LGDD = transform.matrix_LGDD.double()
    size_LGDD = matrix_LGDD.mT @ statistics.key_LGDD @ matrix_LGDD
    head_dim = matrix_LGDD.shape[-1]
    return (_trace(felt_LGDD) * _trace(size_LGDD)).mean(dim=1) / head_dim**2


def _trace(x_DD: torch.Tensor) -> torch.Tensor:
    return x_DD.diagonal(dim1=-2, dim2=-1).sum(dim=-1)


def _transform(matrix_LGDD: torch.Tensor, key_LGDD: torch.Tensor) -> KeyTransform:
    # The scale of A is free, as each row has its norm: stored rows have an RMS of 1 in the mean,
    # in the middle of what a norm of one byte can say.
    square = _trace(matrix_LGDD.mT @ _ridged(key_LGDD) @ matrix_LGDD) / matrix_LGDD.shape[-1]
    matrix_LGDD = matrix_LGDD / square.sqrt()[..., None, None]
    return KeyTransform(
        matrix_LGDD=matrix_LGDD.float(), inverse_LGDD=torch.linalg.inv(matrix_LGDD).float()
    )


def _ridged(x_DD: torch.Tensor) -> torch.Tensor:
    mean = x_DD.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    eye_DD = torch.eye(x_DD.shape[-1], device=x_DD.device, dtype=x_DD.dtype)
    return x_DD + RIDGE * mean.clamp(min=1e-30) * eye_DD


def _power(x_DD: torch.Tensor, exponent: float) -> torch.Tensor:
    """A power of a symmetric positive definite matrix."""
    values_D, vectors_DD = torch.linalg.eigh(x_DD)
    floor = values_D[..., -1:] * 1e-12
    powered_D = torch.maximum(values_D, floor).pow(exponent)
    return vectors_DD @ torch.diag_embed(powered_D) @ vectors_DD.mT  # type: ignore[no-any-return]
