"""From tensors seen at a boundary to the tables that code it: mean and covariance across channels, the task-weighted
transform, each coefficient's scale. Values in, values out; nothing is run or read here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from split.codec.calibration import Klt, grid_of, rounded
from split.tensor import Array
from split.workbench.planes import block_for, coefficients, planes

NEGLIGIBLE: Final = 1e-9
"""Of the greatest sensitivity × variance: a channel below counts as much. It costs no bits, but is coded all the same
when it moves thousands of times as far as it was seen to."""
SILENT: Final = 1e-12
"""Variance by the square of the mean, up to which a channel was always the same: FP32 rounds to 2^-24, FP64's sums to
less."""
SHRINK_SENSITIVITY: Final = 0.3
"""Of a matrix from runs towards its diagonal, which fewer runs tell than the rest."""
UNSEEN: Final = 0.01
"""Weight of a direction that an exact M does not look at, by that of a channel: a tenth of the precision. Transform and
inverse are still well conditioned."""
EXACT: Final = 1e-6
"""Least eigenvalue of an exact M, by the greatest, that is not 0: its weights are FP32, or rounded to 2^-11."""
PRIOR_BLOCKS: Final = 2.0
"""What the variance of a whole component counts in the scale of each of its coefficients, as blocks seen."""


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Of one tensor, gathered input by input; made with `Statistics(layout=…)`."""

    layout: str
    count: int = 0
    """Positions seen."""
    total: Array = field(default_factory=lambda: np.zeros(0))
    products: Array = field(default_factory=lambda: np.zeros((0, 0)))
    sizes: set[tuple[int, int]] = field(default_factory=set)
    """Rows and columns of the planes seen."""

    def add(self, array: Array) -> None:
        """One input's tensor; what is not finite makes the sums so, too (`finite`)."""
        x = planes(array, self.layout)
        rows = x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1)
        if not self.count:
            self.total, self.products = np.zeros(len(rows)), np.zeros((len(rows), len(rows)))
        self.count += rows.shape[1]
        self.total += rows.sum(axis=1)
        self.products += rows @ rows.T
        self.sizes.add((x.shape[2], x.shape[3]))

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.products).all())

    @property
    def mean(self) -> Array:
        """FP64 [channels]."""
        return self.total / max(self.count, 1)

    def covariance(self) -> Array:
        """FP64 [channels, channels], shrunk towards its diagonal where few positions were seen (as far as a matrix of
        so many independent rows is noise); a variance of 0 for a channel that was always the same."""
        found = self.products / max(self.count, 1) - np.outer(self.mean, self.mean)
        diagonal = np.where(np.diag(found) > SILENT * self.mean**2, np.diag(found), 0.0)
        noise = len(found) / (len(found) + self.count)
        found *= 1 - noise
        np.fill_diagonal(found, diagonal)
        return np.asarray(found)

    @property
    def deviation(self) -> Array:
        """FP64 [channels]."""
        return np.asarray(np.sqrt(np.diag(self.covariance())))


def transform_of(covariance: Array, sensitivity: Array, *, exact: bool = False) -> tuple[Array, Array]:
    """T = eigenvectors(M^½ Σ M^½)ᵀ M^½ and its inverse, FP64 [components, channels] and [channels, components], the
    component that matters most first: of all transforms whose uniform noise does the same harm through M, the one whose
    coefficients are uncorrelated. (The Karhunen–Loève transform in the coordinates in which M is the unit matrix.)

    `covariance` Σ, `sensitivity` M: [channels, channels]. Channels that the tail does not look at (sensitivity 0) are
    left out: zero columns of T, zero rows of the inverse. One that never changed was not asked about: it is a component
    of its own, by its sensitivity or else the greatest, so that a request in which it does change is not coded as if it
    did not. M is shrunk towards its diagonal; `exact`: but for directions that it does not look at at all, which are
    known, not only not seen yet.
    """
    if not np.diag(sensitivity).any():  # nothing is looked at: all alike
        sensitivity = plain_sensitivity(covariance)
    own, variance = np.diag(sensitivity), np.diag(covariance)
    active = np.flatnonzero((own > 0) & (variance > 0))
    silent = np.flatnonzero(variance <= 0)
    channels = len(covariance)
    transform, inverse = np.zeros((len(active), channels)), np.zeros((channels, len(active)))
    if active.size:
        # In units of each channel's own scale, so that no small channel is lost in the roots.
        weight = own[active] * variance[active]
        unit = np.sqrt(variance[active] / np.maximum(weight, NEGLIGIBLE * weight.max()))
        m = sensitivity[np.ix_(active, active)] * np.outer(unit, unit)
        m = (1 - SHRINK_SENSITIVITY) * m + SHRINK_SENSITIVITY * (_looked_at(m) if exact else np.eye(len(active)))
        sigma = covariance[np.ix_(active, active)] / np.outer(unit, unit)
        values, vectors = np.linalg.eigh((m + m.T) / 2)
        root = vectors * np.sqrt(values) @ vectors.T
        root_inverse = vectors / np.sqrt(values) @ vectors.T
        _, basis = np.linalg.eigh(root @ sigma @ root)
        basis = basis[:, ::-1]  # eigh: smallest first
        basis = basis * np.where(basis[np.abs(basis).argmax(axis=0), np.arange(basis.shape[1])] < 0, -1.0, 1.0)
        transform[:, active] = basis.T @ root / unit
        inverse[active] = unit[:, None] * (root_inverse @ basis)
    alone = np.sqrt(np.where(own > 0, own, own.max()))
    return (
        np.concatenate([transform, np.diag(alone)[silent]]),
        np.concatenate([inverse, np.diag(1 / alone)[:, silent]], axis=1),
    )


def _looked_at(m: Array) -> Array:
    """The unit matrix, but `UNSEEN` (after shrinking) for directions to which `m` has no weight."""
    values, vectors = np.linalg.eigh((m + m.T) / 2)
    unseen = vectors[:, values < EXACT * values[-1]]
    return np.asarray(np.eye(len(m)) - (1 - UNSEEN / SHRINK_SENSITIVITY) * (unseen @ unseen.T))


def plain_sensitivity(covariance: Array) -> Array:
    """What stands for M where the tail cannot be asked: all errors count alike, in units in which the channels together
    have variance 1 each on average. The transform is then the principal components'."""
    variance = np.trace(covariance) / len(covariance)
    return np.eye(len(covariance)) / (variance if variance > 0 else 1.0)


def klt_of(statistics: Statistics, sensitivity: Array, *, exact: bool = False) -> Klt:
    """As `transform_of` has it, without scales yet (all 1): `Scales` finds them on the inputs once more."""
    transform, inverse = transform_of(statistics.covariance(), sensitivity, exact=exact)
    block = block_for(statistics.sizes)
    return Klt(
        layout=statistics.layout,
        transform=rounded(transform.astype(np.float32)),
        inverse=rounded(inverse.astype(np.float32)),
        mean=statistics.mean.astype(np.float32),
        block=block,
        scales=np.ones((len(transform), *block), np.uint8),
    )


class Scales:
    """Mean |y| of each coefficient over the inputs: the scale of the Laplace distribution that fits best. None is 0:
    what was never seen to move has the smallest, and is coded when it moves."""

    def __init__(self, klt: Klt) -> None:
        self._klt = klt
        self._sum = np.zeros(klt.scales.shape)
        self._blocks = 0

    def add(self, array: Array) -> None:
        """One input's tensor."""
        y = transformed(self._klt, array)
        self._sum += np.abs(y).sum(axis=3)
        self._blocks += y.shape[3]

    def klt(self) -> Klt:
        """With the scales; of few blocks, each coefficient's is drawn towards its component's."""
        mean = self._sum / max(self._blocks, 1)
        component = mean.mean(axis=(1, 2), keepdims=True)
        drawn = (self._blocks * mean + PRIOR_BLOCKS * component) / (self._blocks + PRIOR_BLOCKS)
        klt = self._klt
        return Klt(
            layout=klt.layout,
            transform=klt.transform,
            inverse=klt.inverse,
            mean=klt.mean,
            block=klt.block,
            scales=np.maximum(grid_of(drawn), 1),
        )


def transformed(klt: Klt, array: Array) -> Array:
    """FP64 coefficients [components, block rows, block columns, blocks] of one tensor."""
    x = planes(array, klt.layout) - klt.mean.astype(np.float64)[:, None, None]
    y = np.einsum("kc,ncxy->nkxy", klt.transform.astype(np.float64), x, optimize=True)
    return coefficients(y, klt.block)


def gaussian_bytes(variances: Array, noise_share: float) -> float:
    """Bytes that independent Gaussian coefficients of these variances take at least, when the noise may have
    `noise_share` of their power: reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3.3).

    No codec reaches it; it ranks boundaries against each other.
    """
    found = np.sort(np.asarray(variances, np.float64).reshape(-1))
    power = found.sum()
    if not power > 0:
        return 0.0
    # Those below the water are all noise, the others have the water's level of it.
    below = np.concatenate([[0.0], np.cumsum(found)])
    level = (noise_share * power - below[:-1]) / np.arange(found.size, 0, -1)
    water = level[np.flatnonzero(level <= found)[0]]
    return float(0.5 * np.log2(np.maximum(found / water, 1.0)).sum() / 8)
