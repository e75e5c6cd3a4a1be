"""At which sizes of a model's open dims the settings of codecs hold what was measured of them.

A batch is judged by its items, whatever their number. Of other dims (a text's length, a picture's sides) nobody knows
what they do to the distance: the worst of the tokens alone is the farther off the more there are. So a setting is used
near the sizes that were measured, and not elsewhere.
"""

from __future__ import annotations

from typing import Final

NEAR_RATIO: Final = 1.5
"""So many times the largest, or the least part: the worst row of half as many more was 1.1 to 1.3 times as far off (KL
of a small classifier, from 1, 2, 8 to 32 rows)."""


class CalibratedSizes:
    """`ranges`: (least, largest) of each open dim, () where nothing is known of them; `batch_dim`: the number of that
    which counts items."""

    def __init__(self, ranges: tuple[tuple[int, int], ...], batch_dim: int | None) -> None:
        self._ranges = [
            (number, least / NEAR_RATIO, most * NEAR_RATIO)
            for number, (least, most) in enumerate(ranges)
            if number != batch_dim
        ]

    def are_far(self, sizes: tuple[int, ...]) -> bool:
        """Whether a request of these sizes is not near."""
        return any(number < len(sizes) and not low <= sizes[number] <= high for number, low, high in self._ranges)
