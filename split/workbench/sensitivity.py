"""How much a model's outputs move with each channel of what crosses a cut, found by running the tail: no gradients.

Each channel is moved by a random sign at every position, all channels by the same signs; the Gram matrix of the
outputs' changes M estimates Σ over positions of JᵀJ (J: the outputs' derivatives), since signs of different positions
cancel on average (Hutchinson 1990). Outputs are weighed so that half of the squared change is the divergence that the
contract measures, to second order: with y = Uᵀ M^½ x and one step Δ for all of y, quantisation noise of variance Δ²/12
then costs Δ²/24 of it per component, whichever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from split.tensor import Array, Tensors
from split.workbench.planes import planes, unplaned

EPSILON: Final = 0.5
"""Size of a probe in standard deviations of its channel: between 0.1 and 1 it made 2 % of difference on a mobile CNN;
below, rounding of the runtime shows, above, the model is not linear any more."""
LOUD: Final = 256.0
"""How many times as far a channel is moved that moves nothing so: behind a rectifier that no input has opened, it may
matter yet. What still moves nothing is not looked at."""
SKETCH: Final = 16384
"""Most numbers kept of a change: of larger outputs random signed sums, which keep inner products on average
(Charikar, Chen, Farach-Colton 2002)."""
TEMPERATURE: Final = 2.0
"""Logits are halved before they are weighed as probabilities: what is nearly certain of its first class would tell
almost nothing else, and 17 pictures count like six. It gained 3 % of bytes at equal divergence."""
_FLOOR: Final = 1e-6
"""Least probability that is told from 0."""

Metric = Callable[[Tensors], Array]
"""Outputs near those it was made of → a vector (FP64) whose differences are weighed as above."""


def metric_of(outputs: Tensors, measure: str) -> Metric:
    """`measure`: as the contract names it; "" where it names none: then outputs that are classes' scores count as such,
    values between 0 and 1 as independent probabilities, all others by their size."""
    floats = {name: array for name, array in outputs.items() if array.dtype.kind == "f" and array.size}
    weighed = [(name, _weights(array.astype(np.float64), measure)) for name, array in floats.items()]

    def vector(found: Tensors) -> Array:
        parts = [change(found[name].astype(np.float64)) for name, change in weighed]
        return _sketched(np.concatenate(parts)) if parts else np.zeros(1)

    return vector


def _weights(base: Array, measure: str) -> Callable[[Array], Array]:
    rows = base.reshape(-1, base.shape[-1] if base.ndim else 1)
    distribution = bool((rows >= 0).all() and (np.abs(rows.sum(axis=1) - 1) <= 1e-3).all()) and rows.shape[1] > 1
    within = bool(((rows >= 0) & (rows <= 1)).all())
    scores = measure in ("kl", "top1") or (not measure and (distribution or (base.ndim == 2 and not within)))
    if scores and rows.shape[1] > 1:
        # KL(p ‖ q) ≈ ½ Σ p (Δ log q − mean)²
        logits = np.log(np.maximum(rows, _FLOOR)) if distribution else rows
        exponentials = np.exp((logits - logits.max(axis=1, keepdims=True)) / TEMPERATURE)
        p = exponentials / exponentials.sum(axis=1, keepdims=True)

        def classes(found: Array) -> Array:
            z = found.reshape(rows.shape)
            z = np.log(np.maximum(z, _FLOOR)) if distribution else z
            return np.asarray((np.sqrt(p) * (z - (p * z).sum(axis=1, keepdims=True))).reshape(-1))

        return classes
    if within and not measure:
        # Bernoulli: ½ p (1 − p) (Δ log-odds)² = ½ Δp² / (p (1 − p))
        spread = np.sqrt(np.maximum(base * (1 - base), _FLOOR)).reshape(-1)
        return lambda found: np.asarray(found.reshape(-1) / spread)
    match measure:
        case "cosine":  # ½ of the angle's square, by rows
            size = np.linalg.norm(rows, axis=1, keepdims=True) * np.sqrt(len(rows))
        case "rms" | "boxes":  # the rows near a threshold alone are too few to learn from: a tenth more bytes on faces
            size = np.sqrt((rows**2).sum(keepdims=True))
        case _:  # relative to the largest
            size = np.abs(rows).max(keepdims=True, initial=0.0) * np.sqrt(base.size)
    size = np.where(size > 0, size, 1.0)
    return lambda found: np.asarray((found.reshape(rows.shape) / size).reshape(-1))


def _sketched(vector: Array) -> Array:
    if vector.size <= SKETCH:
        return vector
    signs = np.random.default_rng(vector.size).integers(0, 2, vector.size) * 2.0 - 1.0
    padded = np.zeros(-(-vector.size // SKETCH) * SKETCH)
    padded[: vector.size] = vector * signs
    return np.asarray(padded.reshape(-1, SKETCH).sum(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """One float tensor among those that cross."""

    name: str
    layout: str
    deviation: Array
    """FP64 [channels]: of each channel over the calibration inputs; those with 0 are not probed."""


def gram(
    crossing: Tensors, probed: Sequence[Probed], finish: Callable[[Tensors], Tensors], measure: str, seed: int
) -> Iterator[dict[str, Array] | None]:
    """M of each probed tensor, FP64 [channels, channels], for one request: None after each run of the tail (so that the
    caller may stop), at the end the matrices.

    `crossing`: all that crosses; `finish`: what runs the tail on it. A tensor's change moves all positions of a channel
    at once, by the signs that `seed` stands for. Outputs whose shape changes (what a detector finds) are left out, as
    if the model had none of them; where no float is left, all matrices are 0.
    """
    base = finish(crossing)
    if not any(array.dtype.kind == "f" for array in base.values()):
        yield {one.name: np.zeros((len(one.deviation), len(one.deviation))) for one in probed}
        return
    with np.errstate(all="ignore"):
        metric = metric_of(base, measure)
        at = metric(base)
    found: dict[str, Array] = {}
    for number, one in enumerate(probed):
        array = crossing[one.name]
        x = planes(array, one.layout)
        n, channels, rows, columns = x.shape
        signs = np.random.default_rng((seed, number)).integers(0, 2, (n, rows, columns)) * 2.0 - 1.0
        changes = np.zeros((channels, at.size), np.float32)
        for channel in np.flatnonzero(one.deviation > 0):
            for size in (EPSILON * one.deviation[channel], LOUD * EPSILON * one.deviation[channel]):
                moved = x.copy()
                moved[:, channel] += size * signs
                with np.errstate(all="ignore"):  # what overflows counts as such
                    given = unplaned(moved, one.layout, array)
                outputs = finish(crossing | {one.name: given})
                steady = [name for name in base if outputs[name].shape == base[name].shape]
                if len(steady) < len(base):
                    yield from gram(crossing, probed, partial(_only, steady, finish), measure, seed)
                    return
                with np.errstate(all="ignore"):
                    changes[channel] = (metric(outputs) - at) / size
                if changes[channel].any():
                    break
            yield None
        found[one.name] = _gram_of(changes, one.deviation)
    yield found


def _only(names: Sequence[str], finish: Callable[[Tensors], Tensors], crossing: Tensors) -> Tensors:
    outputs = finish(crossing)
    return {name: outputs[name] for name in names}


def _gram_of(changes: Array, deviation: Array) -> Array:
    """FP64 [channels, channels] of `changes` FP32 [channels, numbers]; a channel whose change is not finite matters as
    much for each of its deviations as the one that matters most."""
    broken = np.flatnonzero(~np.isfinite(changes).all(axis=1))
    wide = changes.astype(np.float64)
    wide[broken] = 0.0
    found = wide @ wide.T
    most = (np.diag(found) * deviation**2).max(initial=0.0)
    found[broken, broken] = (most if most > 0 else 1.0) / deviation[broken] ** 2
    return np.asarray(found)
