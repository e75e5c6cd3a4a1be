"""Which boundaries are worth coding, on tensors whose structure is known; and how curves are traced."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from split.graph.cuts import Cut
from split.ids import CutId
from split.profiles.measured import Point
from split.tensor import TensorSpec
from split.workbench.curves import curve, point, trace
from split.workbench.worth_coding import Worth, channels_within, choose, expected_bytes, layout_of


def worth(share: float, nbytes: float) -> Worth:
    name = f"{share:.2f}"
    cut = Cut(
        id=CutId(name),
        mask=1,
        nodes=1,
        boundary=(name,),
        head_inputs=(),
        head_outputs=(),
        tail_inputs=(),
        tail_outputs=(),
    )
    return Worth(cut=cut, share=share, nbytes=nbytes)


def chosen(*pairs: tuple[float, float], input_bytes: float = 1e9, limit: int = 8) -> list[str]:
    return [one.cut.id for one in choose([worth(*pair) for pair in pairs], input_bytes, limit=limit)]


def test_a_cut_must_send_less_than_every_one_before_it() -> None:
    assert chosen((0.1, 1000), (0.2, 1200), (0.3, 800), (0.5, 790), (0.7, 300)) == ["0.10", "0.30", "0.70"]


def test_a_little_deeper_and_cheaper_takes_the_place_of_the_one_before() -> None:
    assert chosen((0.10, 1000), (0.11, 500), (0.50, 100)) == ["0.11", "0.50"]


def test_heads_that_do_next_to_nothing_and_payloads_above_the_input_are_left_out() -> None:
    assert chosen((0.01, 10), (0.2, 5000), (0.4, 900), input_bytes=1000) == ["0.40"]
    assert chosen((0.2, 5000), (0.4, 3000), input_bytes=1000) == ["0.20", "0.40"]  # better than none


def test_of_many_the_hull_and_the_widest_gaps_are_kept() -> None:
    front = [(0.1 * n, 1000 * 0.5**n) for n in range(1, 10)]
    found = chosen(*front, limit=4)
    assert len(found) == 4
    assert {"0.10", "0.90"} <= set(found)


def spec(*shape: int | str) -> TensorSpec:
    return TensorSpec(name="x", dtype="FP32", shape=shape)


def test_alike_channels_and_smooth_planes_are_expected_to_cost_less() -> None:
    random = np.random.default_rng(1)
    noise = [random.normal(0, 1, (1, 16, 16, 16)).astype(np.float32) for _ in range(3)]
    alike = [np.repeat(array[:, :1], 16, axis=1) for array in noise]
    y, x = np.mgrid[:16, :16]
    smooth = [(array[:, :, :1, :1] * x + array[:, :, 1:2, :1] * y).astype(np.float32) for array in noise]
    costs = [expected_bytes(arrays, spec("n", 16, 16, 16)) for arrays in (noise, smooth, alike)]
    assert costs[1] < costs[0] / 3
    assert costs[2] < costs[0] / 7
    # 4096 Gaussian numbers with 5 % of noise: half a log of 20 each, 2.16 bits; and the sixth of a bit.
    assert costs[0] == pytest.approx(4096 * (0.5 * np.log2(20) / 8 + 0.02), rel=0.05)


def test_channels_are_told_by_the_layout_that_codes_shortest() -> None:
    random = np.random.default_rng(2)
    mixed = random.normal(0, 1, (24, 3))
    tokens = [(random.normal(0, 1, (1, 20, 3)) @ mixed.T).astype(np.float32) for _ in range(4)]
    assert layout_of(tokens, spec("n", 20, 24)) == "NTC"
    assert layout_of([array.transpose(0, 2, 1) for array in tokens], spec("n", 24, 20)) == "NCT"
    assert layout_of([np.full((1, 20, 24), np.inf, np.float32)], spec("n", 20, 24)) == ""


def test_some_of_many_channels_tell_what_all_cost_where_none_is_like_another() -> None:
    random = np.random.default_rng(3)
    tensors = [random.normal(0, 1, (1, 256, 16, 16)).astype(np.float32) for _ in range(3)]
    by_all, by_some = (expected_bytes(tensors, spec("n", 256, 16, 16), channels_max=most) for most in (512, 64))
    assert by_some == pytest.approx(by_all, rel=0.1)


@pytest.mark.parametrize(
    ("count", "channels_max"),
    [
        (1, 512),  # 512² × (784 + 512) = 3.4e8 each
        (29, 512),
        (30, 256),  # 256² × (784 + 256) = 6.8e7 each
        (146, 256),
        (147, 128),
        (100_000, 32),
    ],
)
def test_the_more_and_the_wider_boundaries_there_are_the_fewer_channels_they_are_compared_by(
    count: int, channels_max: int
) -> None:
    assert channels_within([(spec("n", 512, 28, 28), (1, 512, 28, 28))] * count, 1e10) == channels_max
    assert channels_within([(spec("n", 600, 600, 600), (1, 600, 600, 600))] * count, 1e10) == 512  # not transformed


def measured(level: int) -> Point:
    """Squared error of a step of eight levels an octave; bytes 15 % an octave's quarter."""
    step = 2 ** ((level - 128) / 8)
    return Point(
        level=level,
        mean_bytes=1000 / step,
        p95_bytes=1100 / step,
        fidelity={"kl": step * step},
        fidelity_high={"kl": step * step},
    )


def asked(evaluate: Callable[[int], Point], start: int, bound: float) -> list[int]:
    found = trace(evaluate, start=start, coarsest=255, finest=0, measure="kl", bound=bound)
    return sorted((one.level for one in found), reverse=True)


@pytest.mark.parametrize("start", [96, 128, 150, 255, 0])
def test_a_curve_reaches_around_the_bound_and_is_closest_at_it(start: int) -> None:
    levels = asked(measured, start, 1.0)
    inside = [level for level in levels if 0.2 <= measured(level).fidelity["kl"] <= 4]
    assert measured(levels[0]).fidelity["kl"] >= 4
    assert measured(levels[-1]).fidelity["kl"] <= 1 / 8
    assert {128, 129} <= set(levels)  # the last within and the first beyond, next to each other
    assert max(a - b for a, b in pairwise(inside)) <= 4
    if start in (96, 128, 150):
        assert len(levels) <= 20


def test_a_curve_ends_where_nothing_is_saved_any_more() -> None:
    def saturated(level: int) -> Point:
        return measured(min(level, 130))

    assert len(asked(saturated, 128, 100.0)) <= 4


def test_a_level_that_was_lucky_is_believed_no_more_than_the_finer_ones() -> None:
    lucky, worse = 132, {"kl": 1.3}  # at 132 kl is 2; at 128 it is 1, and here by chance 1.3

    def with_chance(level: int) -> Point:
        if level == lucky:
            return msgspec.structs.replace(measured(level), fidelity_high={"kl": 0.5})
        return measured(level) if level != 128 else msgspec.structs.replace(measured(level), fidelity_high=worse)

    found = {one.level: one for one in trace(with_chance, start=128, coarsest=255, finest=0, measure="kl", bound=1.0)}
    assert found[lucky].fidelity_high["kl"] == max(found[level].fidelity_high["kl"] for level in found if level < lucky)
    assert found[128].fidelity_high == worse
    assert found[lucky].fidelity == measured(lucky).fidelity
    cheapest = max(level for level, one in found.items() if one.within("kl", 1.0))
    assert cheapest == 127  # 2^(−1/4); the next one is beyond
    assert found[127] == measured(127)


def test_levels_that_grow_finer_are_traced_too() -> None:
    def mirrored(level: int) -> Point:
        return measured(200 - level)

    found = trace(mirrored, start=90, coarsest=60, finest=90, measure="kl", bound=1.0)
    levels = {one.fidelity["kl"]: level for level in range(60, 91) for one in found if one == mirrored(level)}
    assert {71, 72} <= set(levels.values())  # 129 and 128 of the other
    assert all(60 <= level <= 90 for level in levels.values())


def test_a_curve_holds_no_point_that_another_one_beats() -> None:
    points = [
        Point(
            level=1,
            mean_bytes=10.0,
            p95_bytes=10.0,
            fidelity={"kl": 0.5, "top1": 0.1},
            fidelity_high={"kl": 0.5, "top1": 0.1},
        ),
        Point(
            level=2,
            mean_bytes=10.0,
            p95_bytes=10.0,
            fidelity={"kl": 0.5, "top1": 0.1},
            fidelity_high={"kl": 0.5, "top1": 0.1},
        ),
        Point(
            level=3,
            mean_bytes=20.0,
            p95_bytes=20.0,
            fidelity={"kl": 0.6, "top1": 0.2},
            fidelity_high={"kl": 0.6, "top1": 0.2},
        ),
        Point(
            level=4,
            mean_bytes=30.0,
            p95_bytes=30.0,
            fidelity={"kl": 0.1, "top1": 0.2},
            fidelity_high={"kl": 0.1, "top1": 0.2},
        ),
    ]
    assert [one.level for one in curve(reversed(points), 5).points] == [1, 4]


def test_a_point_is_the_mean_over_requests_of_the_worst_output() -> None:
    ones = np.ones((1, 2), np.float32)
    expected = [{"y": ones, "z": ones}, {"y": ones, "z": ones}]
    outputs = [{"y": ones, "z": ones * np.float32(1.5)}, {"y": ones * 2, "z": ones}]
    found = point(7, [100, 300], outputs, expected, sources=[0, 1])
    assert (found.level, found.mean_bytes, found.p95_bytes) == (7, 200.0, 290.0)
    assert found.fidelity["relative"] == pytest.approx(0.75)
    assert found.fidelity["cosine"] == pytest.approx(0.0, abs=1e-12)
    twice = np.concatenate([ones, ones * 2])
    batch = point(7, [100], [{"y": twice}], [{"y": np.concatenate([ones, ones])}], sources=[0], items=[2])
    assert batch.fidelity["relative"] == pytest.approx(0.5)  # 0 and 1
    broken = point(7, [100], [{"y": ones * np.nan, "z": ones}], expected[:1], sources=[0])
    assert (broken.fidelity, broken.fidelity_high) == ({}, {})


def test_what_a_mean_is_at_most_goes_by_sources_and_shares_are_counted() -> None:
    """Two values 0.5 and 1 of two sources: 0.75 + 6.3138·0.25 (Student's t, one degree of freedom); twice as many of
    the same two sources tell no more. No wrong one of 20: 1 − 0.05^(1/20) (Clopper & Pearson)."""
    ones = np.ones((1, 2), np.float32)
    expected, outputs = [{"y": ones}] * 4, [{"y": ones * np.float32(by)} for by in (1.5, 2.0, 1.5, 2.0)]
    found = point(7, [1] * 4, outputs, expected, sources=[0, 1, 0, 1])
    assert found == point(7, [1, 1], outputs[:2], expected[:2], sources=[3, 9])
    assert found.fidelity_high["relative"] == pytest.approx(0.75 + 6.3138 * 0.25, rel=1e-4)
    assert found.within("relative", 2.33)
    assert not found.within("relative", 2.32)
    assert not found.within("entropy", 1e9)
    twenty = point(7, [1] * 20, [{"y": ones}] * 20, [{"y": ones}] * 20, sources=range(20))
    assert (twenty.fidelity["top1"], twenty.fidelity_high["kl"]) == (0.0, 0.0)
    assert twenty.fidelity_high["top1"] == pytest.approx(1 - 0.05 ** (1 / 20), abs=1e-6)
    alone = point(7, [1], outputs[:1], expected[:1], sources=[0])
    assert ("relative" in alone.fidelity, "relative" in alone.fidelity_high) == (True, False)
