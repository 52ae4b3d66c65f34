"""Low-rank factors of an LM head.

All factorisations are one: of all matrices of rank r, the product A B is nearest to W in the norm
`|| F^1/2 (W - A B) M^1/2 ||`, where F weighs tokens by their frequency and M is the second moment
of the head's inputs. With `F^1/2 W M^1/2 = U S V^T` the solution is `B = V_r^T M^-1/2` and
`A = F^-1/2 U_r S_r = W M^1/2 V_r`. Plain SVD leaves both out, frequency-aware SVD leaves M out.

A is thus W times a small matrix, which together with B is all that has to be stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ERROR_ROWS = 64
_NORM_ROWS = 16
_LEAST_SHARE = 1e-6  # of the largest eigenvalue: directions that inputs hardly use stay invertible


class HeadFactors(NamedTuple):
    """A head of low rank.

    Attributes:
        up: [V, R], A.
        down: [R, H], B.
    """

    up: Tensor
    down: Tensor


class HeadProjection(NamedTuple):
    """Factors whose A is the full head times a small matrix.

    Attributes:
        lift: [H, R] float32.
        down: [R, H] float32, B.
    """

    lift: Tensor
    down: Tensor

    def apply(self, weight: Tensor) -> HeadFactors:
        """Make the factors of a head.

        Args:
            weight: [V, H] full head.

        Returns:
            Factors in float32 on its device.
        """
        lift, down = self.lift.to(weight.device), self.down.to(weight.device)
        return HeadFactors(weight.float() @ lift, down)


def smooth_frequencies(counts: Tensor, smoothing: float) -> Tensor:
    """Token frequencies that are above zero.

    Args:
        counts: [V] occurrences.
        smoothing: Added to every count, above 0.

    Returns:
        [V] float64 that sums to 1.

    Raises:
        ValueError: If `smoothing` is not above 0.
    """
    if smoothing <= 0:
        raise ValueError(f"smoothing must be above 0, got {smoothing}")
    smoothed = counts.double() + smoothing
    return smoothed / smoothed.sum()


def factorize_head(
    weight: Tensor,
    rank: int,
    *,
    frequencies: Tensor | None = None,
    second_moment: Tensor | None = None,
) -> HeadProjection:
    """The nearest head of a rank; see the module's docstring for what near means.

    Args:
        weight: [V, H] full head.
        rank: R, at most H.
        frequencies: [V] above 0; None weighs all tokens alike.
        second_moment: [H, H] mean of `h h^T` over the head's inputs; None takes the identity.

    Returns:
        The projection, directions in order of their weight: the first r rows of `down` and columns
        of `lift` are those of rank r.

    Raises:
        ValueError: If the rank is out of range.
    """
    hidden = weight.shape[1]
    if not 1 <= rank <= hidden:
        raise ValueError(f"rank must be in [1, {hidden}], got {rank}")
    w = weight.double()
    weighted = w if frequencies is None else w * frequencies.double().sqrt()[:, None]
    # The right singular vectors suffice, and H by H is far smaller than V by H.
    gram = weighted.T @ weighted
    root = inverse = None
    if second_moment is not None:
        values, vectors = torch.linalg.eigh(second_moment.double())
        values = values.clamp(min=float(values[-1]) * _LEAST_SHARE)
        root = (vectors * values.sqrt()) @ vectors.T
        inverse = (vectors / values.sqrt()) @ vectors.T
        gram = root @ gram @ root
    leading = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :rank]
    lift = leading if root is None else root @ leading
    down = leading.T if inverse is None else leading.T @ inverse
    return HeadProjection(lift.float().contiguous(), down.float().contiguous())


def relative_error(weight: Tensor, factors: HeadFactors) -> float:
    """How far some evenly spread rows of a head are from their low-rank rows.

    Args:
        weight: [V, H].
        factors: Of any head.

    Returns:
        Mean of `|W_i - A_i B| / |W_i|`.
    """
    rows = _spread(weight, _ERROR_ROWS)
    wanted = weight[rows].float()
    found = factors.up[rows].float() @ factors.down.float()
    scale = wanted.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((wanted - found).norm(dim=1) / scale).mean())


def row_norms(weight: Tensor) -> tuple[float, ...]:
    """What tells one head from another in any dtype.

    Args:
        weight: [V, H].

    Returns:
        Norms of some evenly spread rows.
    """
    return tuple(weight[_spread(weight, _NORM_ROWS)].float().norm(dim=1).tolist())


def _spread(weight: Tensor, count: int) -> Tensor:
    vocab_size = weight.shape[0]
    rows = torch.arange(min(count, vocab_size), device=weight.device)
    return rows * vocab_size // len(rows)
