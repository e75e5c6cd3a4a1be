"""Costs at other sizes, over a growth small enough to be worked out by hand: one dim n, work 10·n and n², one cut."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from split.codec.payload import encode
from split.graph.card import CutCard, ModelCard
from split.graph.growth import CutGrowth, Elements, Extent, Growth, Step
from split.ids import CutId, ModelDigest
from split.plan.plan import LOCAL, Placement, Plan
from split.plan.scaling import SIZES_KEPT_MAX
from split.plan.table import Column, PlanTable
from split.profiles.contract import Contract, Data
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.tensor import TensorSpec

CUT = CutId("aaaaaaaaaaaa")
N = Extent(0, (Step(0, 1, 0, 1),))
HALF = Extent(0, (Step(0, 1, 1, 2),))
CARD = ModelCard(
    digest=ModelDigest("sha256:" + "0" * 64),
    path="/models/tiny.onnx",
    files=(("tiny.onnx", 1, "0" * 64),),
    inputs=(TensorSpec(name="x", dtype="FP32", shape=(1, "n", 4)),),
    outputs=(TensorSpec(name="y", dtype="FP32", shape=(1, -1)),),
    nodes=3,
    opset=17,
    cuts=(
        CutCard(
            id=CUT,
            boundary=(
                TensorSpec(name="a", dtype="FP32", shape=(1, -1, 3)),
                TensorSpec(name="m", dtype="INT64", shape=(1, -1)),
            ),
            head_inputs=("x",),
            head_outputs=(),
            tail_inputs=(),
            shown_inputs=(),
            tail_outputs=("y",),
            nodes=1,
            compute_share=0.5,
            node_bitmap="01",
        ),
    ),
    growth=Growth(
        monomials=(((0, 1),), ((0, 2),)),
        extents=(N, HALF, Extent(3), Extent(1)),
        whole_work=(10.0, 1.0),
        outputs=(Elements(extents=(3, 0)),),
        cuts={CUT: CutGrowth(head_work=(10.0, 0.0), crossing=(Elements(extents=(3, 1, 2)), Elements(extents=(3, 1))))},
    ),
)
SPLIT, OFFLOAD = Plan(placement=Placement.SPLIT, cut=CUT, codec="raw"), Plan(placement=Placement.OFFLOAD, codec="raw")


def boundary(n: int) -> dict[str, np.ndarray]:  # type: ignore[type-arg]  # of two element types
    half = (n + 1) // 2
    return {"a": np.ones((1, half, 3), "f4"), "m": np.ones((1, half), "i8")}


def size(tensors: dict[str, np.ndarray], codec: str = "raw") -> int:  # type: ignore[type-arg]  # as above
    return len(b"".join(encode(tensors, codec)))


def codecs(nbytes: int) -> tuple[CodecCosts, ...]:
    return (CodecCosts(codec="raw", bytes=nbytes, encode_ms=1.0, decode_ms=2.0),)


PROFILE = ModelProfile(
    digest=CARD.digest,
    runtime="onnxruntime 1",
    fingerprint="f",
    dims={"n": 20},
    sizes=(20,),
    other_sizes=(10,),
    threads=1,
    whole_ms=64.0,  # work 600, at 10: 200
    other_whole_ms=24.0,
    image_ms=0.0,
    input_codecs=codecs(size({"x": np.ones((1, 20, 4), "f4")})),
    encoded_bytes=0,
    output_bytes=size({"y": np.ones((1, 20), "f4")}),
    cuts=(
        CutCosts(
            cut=CUT,
            head_ms=22.0,  # work 200, at 10: 100
            tail_ms=48.0,  # work 400, at 10: 100
            other_head_ms=12.0,
            other_tail_ms=6.0,
            codecs=codecs(size(boundary(20))),
        ),
    ),
)


def table_of(**changes: object) -> PlanTable:
    return PlanTable.build(CARD, msgspec.structs.replace(PROFILE, **changes), Contract(data=Data(codecs=("raw",))))


def costs(table: PlanTable, plan: Plan, column: Column) -> float:
    return float(table.costs[column, table.row_of[plan]])


def test_two_sizes_give_what_a_call_costs_and_what_an_operation_costs() -> None:
    at = table_of().at((40,))  # work 2000 in all, the head's 400
    assert costs(at, LOCAL, Column.HEAD) == pytest.approx(4 + 0.1 * 2000)
    assert at.whole_ms == pytest.approx(204)
    assert costs(at, SPLIT, Column.HEAD) == pytest.approx(2 + 0.1 * 400)
    assert costs(at, OFFLOAD, Column.TAIL) == pytest.approx(204)
    assert costs(at, OFFLOAD, Column.FINISH) == pytest.approx(204)
    at = table_of().at((1,))
    assert at.whole_ms == pytest.approx(4 + 0.1 * 11)


def test_what_would_cost_less_than_nothing_at_no_work_is_bent_at_the_lesser_size() -> None:
    table = table_of()  # the tail: 6 ms for 100, 48 ms for 400
    assert costs(table.at((30,)), SPLIT, Column.TAIL) == pytest.approx(48 + 500 * 42 / 300)
    assert costs(table.at((5,)), SPLIT, Column.TAIL) == pytest.approx(6 * 25 / 100)
    assert costs(table.at((5,)), SPLIT, Column.FINISH) == pytest.approx(6 * 25 / 100)


def test_it_does_not_matter_which_of_both_sizes_is_the_larger() -> None:
    cut = msgspec.structs.replace(PROFILE.cuts[0], head_ms=12.0, tail_ms=6.0, other_head_ms=22.0, other_tail_ms=48.0)
    there = table_of(sizes=(10,), other_sizes=(20,), whole_ms=24.0, other_whole_ms=64.0, cuts=(cut,))
    here = table_of()
    for n in (1, 10, 15, 20, 70):
        for column in (Column.HEAD, Column.TAIL, Column.FINISH):
            for plan in (LOCAL, SPLIT, OFFLOAD):
                assert costs(there.at((n,)), plan, column) == pytest.approx(costs(here.at((n,)), plan, column))


def test_one_size_gives_proportion() -> None:
    table = table_of(other_sizes=(), other_whole_ms=0.0)
    assert table.at((40,)).whole_ms == pytest.approx(64 * 2000 / 600)
    assert costs(table.at((40,)), SPLIT, Column.HEAD) == pytest.approx(22 * 2)


def test_more_work_is_never_predicted_to_take_less_time() -> None:
    cut = msgspec.structs.replace(PROFILE.cuts[0], other_head_ms=30.0)  # noise: half the work took longer
    table = table_of(cuts=(cut,))
    taken = [costs(table.at((n,)), SPLIT, Column.HEAD) for n in range(1, 100)]
    assert taken == sorted(taken)


@pytest.mark.parametrize("n", [1, 7, 20, 21, 64, 999])
def test_raw_payloads_are_known_to_the_byte(n: int) -> None:
    table = table_of().at((n,))
    assert round(costs(table, SPLIT, Column.UP)) == size(boundary(n))
    assert round(costs(table, OFFLOAD, Column.UP)) == size({"x": np.ones((1, n, 4), "f4")})
    assert costs(table, OFFLOAD, Column.DOWN) == pytest.approx(PROFILE.output_bytes * n / 20)


def test_the_spread_is_that_of_the_costs_at_these_sizes() -> None:
    table = table_of().at((33,))
    up, down, head, tail = table.costs[[Column.UP, Column.DOWN, Column.HEAD, Column.TAIL]]
    products = [up > 0, up, down, up * up, up * down, down * down, 0 * up, 0 * up, head * head, tail * tail]
    expected = np.array([*products, 0 * up])
    assert table.spread == pytest.approx(expected)


def test_sizes_that_were_profiled_and_no_sizes_change_nothing() -> None:
    table = table_of()
    assert table.at((20,)) is table
    assert table.at(()) is table
    fixed = PlanTable.build(msgspec.structs.replace(CARD, growth=None), PROFILE, Contract(data=Data()))
    assert fixed.at((7,)) is fixed


def test_a_table_keeps_few_of_itself_at_other_sizes_and_a_better_known_one_none() -> None:
    table = table_of()
    seven = table.at((7,))
    assert table.at((7,)) is seven
    for n in range(100, 200):
        table.at((n,))
    assert table.at((7,)) is not seven
    np.testing.assert_array_equal(table.at((7,)).costs, seven.costs)
    better = table.with_compute(head_ms=table.costs[Column.HEAD] * 2.0)
    assert better.at((7,)).whole_ms == pytest.approx(2 * seven.whole_ms)


def test_only_the_last_sizes_are_kept() -> None:
    table = table_of()
    first = table.scaling.at((1,))
    for n in range(100, 100 + SIZES_KEPT_MAX - 1):
        table.scaling.at((n,))
    assert table.scaling.at((1,)) is first
    for n in range(200, 200 + SIZES_KEPT_MAX):
        table.scaling.at((n,))
    assert table.scaling.at((1,)) is not first
