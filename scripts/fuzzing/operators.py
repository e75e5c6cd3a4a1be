"""What a random graph may grow by: one function for each family, which adds its nodes or finds that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from scripts.fuzzing.families.control import branch, function, loop, scan
from scripts.fuzzing.families.dense import binary, contrib, conv, matmul, normalise, recurrent, reduce, unary
from scripts.fuzzing.families.odd import chance, dropout, sequences, strings
from scripts.fuzzing.families.precision import casts, dynamic_int8, half, quantised
from scripts.fuzzing.families.shaping import integers, layout, several, shapes, varying
from scripts.fuzzing.graphs import Draft

Family = Callable[[Draft], bool]

FAMILIES: Final[tuple[tuple[int, Family], ...]] = (
    *((10, unary), (12, binary), (6, matmul), (8, conv), (4, normalise), (5, reduce), (4, several), (8, layout)),
    *((5, shapes), (3, integers), (2, varying), (4, casts), (2, half), (4, quantised), (4, dynamic_int8)),
    *((3, branch), (2, loop), (2, scan), (2, recurrent), (2, sequences), (1, strings), (2, chance), (2, dropout)),
    *((2, contrib), (3, function)),
)


def grow(draft: Draft) -> None:
    """Add one family's nodes, or none."""
    [family] = draft.dice.choices([f for _, f in FAMILIES], [weight for weight, _ in FAMILIES])
    family(draft)
