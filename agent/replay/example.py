"""A model to try policies on without measuring one: EfficientNet-Lite0 at 224 × 224 as two x86 cores of a virtual
machine measured it, rounded, six of its cuts. A split sends less than the input as tensors, and mostly more than its
JPEG."""

from __future__ import annotations

from typing import Final

from agent.replay.known import Known
from agent.replay.world import Stages
from split.ids import CutId
from split.plan.plan import LOCAL, Placement, Plan

WHOLE_MS: Final = 5.2
IMAGE_MS: Final = 2.0
ENCODED_BYTES: Final = 20_000
"""A JPEG of that size at quality 90."""
OUTPUT_BYTES: Final = 4_064

_CUTS: Final = (
    # head ms, tail ms, raw bytes, int8 bytes, int8 encode ms, int8 decode ms, share of the operations
    ("000000000001", 0.80, 4.43, 301_184, 69_756, 0.21, 0.12, 0.10),
    ("000000000002", 1.41, 3.76, 125_568, 29_889, 0.12, 0.06, 0.22),
    ("000000000003", 1.89, 3.32, 62_848, 15_795, 0.09, 0.04, 0.31),
    ("000000000004", 2.53, 2.63, 87_936, 22_104, 0.11, 0.05, 0.47),
    ("000000000005", 3.42, 1.45, 37_760, 11_072, 0.09, 0.03, 0.68),
    ("000000000006", 5.03, 0.10, 5_184, 630, 0.05, 0.03, 0.98),
)


def example(companion_ratio: float = 1.0, *, encoded: bool = True) -> dict[Plan, Stages]:
    """Its plans. The companion takes `companion_ratio` of the device's time for the same work; `encoded`: whether its
    contract takes pictures as they come."""
    image_ms = IMAGE_MS if encoded else 0.0
    plans = {LOCAL: Stages(image_ms=image_ms, head_ms=WHOLE_MS)}
    for cut, head_ms, tail_ms, raw, int8, encode_ms, decode_ms, _ in _CUTS:
        for codec, size, there_ms, here_ms in (("raw", raw, 0.01, 0.01), ("int8", int8, decode_ms, encode_ms)):
            plans[Plan(placement=Placement.SPLIT, cut=CutId(cut), codec=codec)] = Stages(
                image_ms=image_ms,
                head_ms=head_ms,
                encode_ms=here_ms,
                up_bytes=size,
                cloud_decode_ms=companion_ratio * there_ms,
                tail_ms=companion_ratio * tail_ms,
                down_bytes=OUTPUT_BYTES,
                finish_ms=tail_ms,
            )
    for codec, size, there_ms, here_ms in (("raw", 602_240, 0.015, 0.01), ("int8", 150_680, 0.07, 0.22)):
        plans[Plan(placement=Placement.OFFLOAD, codec=codec)] = Stages(
            image_ms=image_ms,
            encode_ms=here_ms,
            up_bytes=size,
            cloud_decode_ms=companion_ratio * there_ms,
            tail_ms=companion_ratio * WHOLE_MS,
            down_bytes=OUTPUT_BYTES,
            finish_ms=WHOLE_MS,
        )
    if encoded:
        plans[Plan(placement=Placement.OFFLOAD, codec="encoded")] = Stages(
            up_bytes=ENCODED_BYTES,
            cloud_decode_ms=companion_ratio * IMAGE_MS,
            tail_ms=companion_ratio * WHOLE_MS,
            down_bytes=OUTPUT_BYTES,
            finish_ms=IMAGE_MS + WHOLE_MS,
        )
    return plans


def known_example(companion_ratio: float = 1.0, *, encoded: bool = True) -> Known:
    """What a device knows of it."""
    shares = {CutId(cut): share for cut, *_, share in _CUTS}
    return Known.of(example(companion_ratio, encoded=encoded), shares)
