"""Settings of codecs are used near the sizes that they were measured at; a batch may have any."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from split.plan.calibrated_sizes import CalibratedSizes
from split.plan.plan import Placement, Plan
from split.plan.table import PlanTable
from split.profiles.contract import Contract, Data, Fidelity
from split.profiles.measured import CodecCosts, Point
from tests.split.test_plan_scaling import CARD, CUT, PROFILE

KLT = Plan(placement=Placement.SPLIT, cut=CUT, codec="klt")
RAW = Plan(placement=Placement.SPLIT, cut=CUT, codec="raw")


def table_of(ranges: tuple[tuple[int, int], ...]) -> PlanTable:
    curve = (Point(level=100, mean_bytes=50.0, p95_bytes=60.0, fidelity={"kl": 0.01}, fidelity_high={"kl": 0.02}),)
    klt = CodecCosts(codec="klt", bytes=50, encode_ms=0.1, decode_ms=0.1, curve=curve)
    (cut,) = PROFILE.cuts
    profile = msgspec.structs.replace(
        PROFILE, cuts=(msgspec.structs.replace(cut, codecs=(*cut.codecs, klt)),), calibrated_sizes=ranges
    )
    data = Data(codecs=("raw", "klt"), fidelity=Fidelity(measure="kl", bound=0.05))
    return PlanTable.build(CARD, profile, Contract(data=data))


@pytest.mark.parametrize(
    ("sizes", "far"),
    [((1, 128), False), ((1, 192), False), ((1, 193), True), ((1, 43), False), ((1, 42), True), ((500, 128), False)],
)
def test_half_as_much_again_is_near_and_the_batch_does_not_matter(sizes: tuple[int, ...], far: bool) -> None:
    """Measured at 64 to 128, one by one: 64 / 1.5 = 42.7."""
    assert CalibratedSizes(((1, 1), (64, 128)), batch_dim=0).are_far(sizes) is far


def test_where_nothing_is_said_of_sizes_none_is_far() -> None:
    assert not CalibratedSizes((), batch_dim=None).are_far((7, 9))


@pytest.mark.parametrize(("n", "may"), [(20, True), (30, True), (31, False), (9, False)])
def test_a_request_of_other_sizes_gets_no_setting_and_is_told_why(n: int, may: bool) -> None:
    table = table_of(((15, 20),)).at((n,))
    row = table.row_of[KLT]
    assert [bool(level[row]) for level in table.allowed] == [may, may, False]
    assert ("measured on inputs of other sizes" in table.why_not(0, row)) is not may
    assert table.allowed[0][table.row_of[RAW]]
    assert table.at(()).bounded.levels[row] == 100


def test_the_profiled_sizes_may_be_other_ones_than_those_calibrated() -> None:
    table = table_of(((100, 100),))
    assert not table.at((20,)).allowed[0][table.row_of[KLT]]
    assert table.at((100,)).allowed[0][table.row_of[KLT]]


def test_a_closer_bound_at_other_sizes_allows_nothing_either() -> None:
    table = table_of(((15, 20),)).within(0.03).at((40,))
    assert not table.allowed[0][table.row_of[KLT]]
    assert np.array_equal(table.costs, table_of(()).within(0.03).at((40,)).costs)
