"""The model's picture input, made anew as JPEG and WebP of several sizes and qualities: what that costs, by the same
measures and on the same requests as the cuts' curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from split.codec.calibration import Curve
from split.codec.payload import decode, encode
from split.codec.picture import LEVELS, PICTURE_CODECS
from split.profiles.contract import Fidelity
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import Point
from split.runtime.engine import Segment
from split.workbench.coded_cut import DECODED_BYTES_MAX, HeldOut
from split.workbench.curves import curve, point, trace


def ladders() -> list[range]:
    """Levels of one size each, in the order of their quality."""
    starts = [
        number for number, level in enumerate(LEVELS) if not number or level.quarters != LEVELS[number - 1].quarters
    ]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(LEVELS)], strict=True)]


def picture_curves(
    whole: Segment,
    held_out: Sequence[HeldOut],
    pictures: Mapping[str, ImageSpec],
    fidelity: Fidelity,
    *,
    part_of: Callable[[int], Callable[[], bool]],
) -> dict[str, Curve]:
    """Codec → curve, around the bound of `fidelity`.

    `whole`: the unsplit model; `pictures`: how its inputs are made of them. `part_of(left)`: whether there is still
    time for one more of `left` ladders.
    """
    requests = [request.inputs() for request in held_out]

    def at(codec: str, level: int) -> Point:
        payloads = [b"".join(encode(inputs, codec, level=level, pictures=pictures)) for inputs in requests]
        outputs = [whole.run(decode(payload, max_bytes=DECODED_BYTES_MAX)) for payload in payloads]
        return point(
            level,
            [*map(len, payloads)],
            outputs,
            [request.expected for request in held_out],
            sources=[request.source for request in held_out],
            items=[request.items for request in held_out],
            contract=fidelity,
        )

    found: dict[str, Curve] = {}
    left = len(PICTURE_CODECS) * len(ladders())
    for codec in PICTURE_CODECS:
        points: list[Point] = []
        for ladder in ladders():
            points += trace(
                partial(at, codec),
                start=ladder[-1],
                coarsest=ladder[0],
                finest=ladder[-1],
                measure=fidelity.name,
                bound=fidelity.bound,
                has_time=part_of(left),
            )
            left -= 1
        found[codec] = curve(points, len(requests))
    return found
