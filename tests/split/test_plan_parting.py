"""Plans in parts, over a model small enough to be worked out by hand: work and bytes are those of a row, times rows."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from split.graph.card import CutCard, ModelCard
from split.graph.growth import CutGrowth, Elements, Extent, Growth, Step, batch_dim
from split.ids import CutId, ModelDigest
from split.plan.decide import decide, estimate_all
from split.plan.link import LinkEstimate
from split.plan.observation import Observation, RemoteView
from split.plan.parting import PART_MS, part_sizes
from split.plan.plan import Placement, PlanEstimate, RequestFacts
from split.plan.slack import MARGIN_MS
from split.plan.table import PlanTable
from split.profiles.contract import Contract
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.tensor import TensorSpec

CUT = CutId("aaaaaaaaaaaa")
ROW = 1_000
"""Bytes of one row of the boundary."""
SPEC = TensorSpec(name="x", dtype="FP32", shape=("N", 250))
CARD = ModelCard(
    digest=ModelDigest("sha256:" + "0" * 64),
    path="/models/tiny.onnx",
    files=(("tiny.onnx", 1, "0" * 64),),
    inputs=(SPEC,),
    outputs=(replace(SPEC, name="y"),),
    nodes=2,
    opset=17,
    cuts=(
        CutCard(
            id=CUT,
            boundary=(replace(SPEC, name="a"),),
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
        monomials=(((0, 1),),),
        extents=(Extent(0, (Step(0, 1, 0, 1),)), Extent(250)),
        whole_work=(2.0,),
        outputs=(Elements(extents=(0, 1)),),
        cuts={CUT: CutGrowth(head_work=(1.0,), crossing=(Elements(extents=(0, 1)),))},
    ),
)
HEAD, TAIL, UP = 10.0, 6.0, 8.0
"""ms of a row: on the device, at the companion, on the link. The way back takes 0.01 ms a row, and 20 ms in all."""
PROFILE = ModelProfile(
    digest=CARD.digest,
    runtime="r",
    fingerprint="f",
    dims={"N": 1},
    sizes=(1,),
    threads=1,
    whole_ms=200.0,
    image_ms=0.0,
    input_codecs=(CodecCosts(codec="raw", bytes=ROW, encode_ms=0.0, decode_ms=0.0),),
    encoded_bytes=0,
    output_bytes=ROW,
    cuts=(
        CutCosts(
            cut=CUT,
            head_ms=HEAD,
            tail_ms=TAIL,
            codecs=(CodecCosts(codec="raw", bytes=ROW, encode_ms=0.0, decode_ms=0.0),),
        ),
    ),
    rows_apart=True,
)


def chosen(rows: int, *, profile: ModelProfile = PROFILE, budget_ms: float = 1e6, link_up: float = UP) -> PlanEstimate:
    table = PlanTable.build(CARD, profile, Contract())
    observation = Observation(
        edge_queue_ms=0.0,
        slowdown=1.0,
        alpha=1.0,
        alpha_sigma=0.0,
        image_ms=0.0,
        image_ratio=1.0,
        remote=RemoteView(
            link=LinkEstimate(
                rtt_ms=20.0, up_ms_per_byte=link_up / ROW, down_ms_per_byte=1e-5, covariance=(0.0,) * 6, age_s=0.0
            ),
            beta=1.0,
            beta_sigma=0.0,
            speed_ratio=1.0,
            image_ms=0.0,
            queue_ms=0.0,
            queue_sigma_ms=0.0,
            opened=np.ones(len(table), dtype=np.bool_),
            payload_bytes_max=1e9,
        ),
        incumbent=0,
    )
    facts = RequestFacts(budget_ms=budget_ms, mode=Placement.SPLIT, sizes=(rows,))
    found = decide(table, observation, facts).chosen
    assert found in estimate_all(table, observation, facts)
    return found


def line(parts: list[list[float]]) -> float:
    """When the last part is through all stages, by playing it: `parts[k][stage]` ms, each stage one part at a time."""
    free_at = [0.0] * len(parts[0])
    for part in parts:
        at = 0.0
        for stage, ms in enumerate(part):
            at = free_at[stage] = max(at, free_at[stage]) + ms
    return free_at[-1]


@pytest.mark.parametrize("rows", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("up", [1.0, 8.0, 20.0])
def test_the_time_that_is_predicted_is_that_of_parts_played_through_the_stages(rows: int, up: float) -> None:
    found = chosen(rows, link_up=up)
    size = -(-rows // found.parts)
    played = line([[HEAD * size, up * size, TAIL * size, 0.01 * size]] * found.parts)
    messages_ms = PART_MS * found.parts if found.parts > 1 else 0.0
    assert found.predicted_ms == pytest.approx(20.0 + played + messages_ms, rel=0.02)
    assert sum(found.stages_ms.values()) == pytest.approx(found.predicted_ms)


@pytest.mark.parametrize("rows", [2, 4, 8, 12])
def test_no_other_number_of_parts_would_gain_much(rows: int) -> None:
    found = chosen(rows)
    others = [
        20.0 + line([[HEAD * size, UP * size, TAIL * size, 0.01 * size]] * parts) + PART_MS * parts
        for parts, size in part_sizes(rows)
    ]
    assert found.parts > 1
    assert found.predicted_ms <= 1.06 * min(others)


def test_one_row_is_one_part() -> None:
    assert chosen(1).parts == 1
    assert chosen(1).stages_ms["overlap"] == 0.0


def test_a_model_whose_rows_were_not_found_apart_is_never_parted() -> None:
    assert chosen(8, profile=msgspec.structs.replace(PROFILE, rows_apart=False)).parts == 1


def test_where_a_call_costs_the_same_whatever_its_size_nothing_is_parted() -> None:
    [cut] = PROFILE.cuts
    flat = msgspec.structs.replace(
        PROFILE,
        other_sizes=(8,),
        other_whole_ms=201.0,
        cuts=(msgspec.structs.replace(cut, other_head_ms=HEAD, other_tail_ms=TAIL),),
    )
    assert chosen(8, profile=flat, link_up=0.01).parts == 1


def test_parts_leave_the_time_to_finish_each_of_them_here() -> None:
    # head and tail of all rows, and a margin for each part, must fit the budget
    all_here_ms = 8 * (HEAD + 1.05 * TAIL)
    assert chosen(8, budget_ms=all_here_ms + 1.5 * MARGIN_MS).parts == 1
    roomy = chosen(8, budget_ms=all_here_ms + 2.5 * MARGIN_MS)
    assert roomy.parts == 2


def test_parts_are_as_even_as_they_can_be_and_none_is_empty() -> None:
    for rows in range(2, 40):
        for parts, size in part_sizes(rows):
            taken = [min(size, rows - first) for first in range(0, rows, size)]
            assert len(taken) == parts
            assert sum(taken) == rows
            assert min(taken) >= 1


def test_a_batch_is_one_name_that_leads_everything() -> None:
    def spec(*shape: int | str) -> TensorSpec:
        return TensorSpec(name="t", dtype="FP32", shape=shape)

    assert batch_dim((spec("N", "L"),), (spec("N", 4),)) == 0
    assert batch_dim((spec("N", 4),), (spec("M", 4),)) is None
    assert batch_dim((spec("N", 4),), (spec(4),)) is None
    assert batch_dim((spec(-1, 4),), (spec(-1, 4),)) is None
    assert batch_dim((spec("N", "N"),), (spec("N"),)) is None
    assert batch_dim((spec(),), (spec(),)) is None
