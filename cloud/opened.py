"""A segment that a session may ask for, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from split.errors import InvalidRequest
from split.tensor import Array, TensorSpec, dtype_name


@dataclass(slots=True, kw_only=True)
class Opened:
    """A tail, or the whole model, that this session may ask for."""

    path: Path
    feeds: tuple[TensorSpec, ...]
    """Tensors it takes: the boundary and the inputs the tail needs, or the model's inputs."""
    outputs: tuple[str, ...]
    """Outputs made here."""
    model_outputs: frozenset[str]
    """All outputs of the model: asking for one that the head made is right, answering it is the device's."""
    expected_ms: float = 0.0
    """Of the next run."""


def check_feeds(feeds: Mapping[str, Array], specs: Sequence[TensorSpec]) -> None:
    """InvalidRequest unless `feeds` are exactly these tensors by name, element type and rank.

    Sizes are not compared: a boundary's shape is known only as far as shape inference went; the runtime checks them.
    """
    wanted = {spec.name: spec for spec in specs}
    if feeds.keys() != wanted.keys():
        raise InvalidRequest(
            f"expected the tensors {', '.join(sorted(wanted)) or 'none'}, got {', '.join(sorted(feeds)) or 'none'}"
        )
    for name, array in feeds.items():
        spec = wanted[name]
        if dtype_name(array.dtype) != spec.dtype or array.ndim != len(spec.shape):
            raise InvalidRequest(
                f"tensor {name!r} must have datatype {spec.dtype} and {len(spec.shape)} dims, got "
                f"{dtype_name(array.dtype)} and shape {list(array.shape)}"
            )
