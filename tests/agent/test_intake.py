"""agent/intake.py: what a request may ask for together with its model's contract: the earliest deadline, the strictest
privacy word.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from agent.intake import InferenceRequest, Intake
from agent.room import Room
from agent.served_model import ServedModel
from split.graph.card import ModelCard
from split.ids import CutId, ModelName
from split.oip.infer import OipRequest
from split.oip.options import isthmus_options
from split.plan.plan import Placement
from split.plan.table import PlanTable
from split.profiles.contract import PRIVACY_ORDER, Behaviour, Contract, Data, InputContract, Privacy
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.workbench.cut import prepare

# `x` is mixed before any cut, `mask` reaches the tail as it came.
TWO_INPUTS = """
<ir_version: 10, opset_import: ["" : 18]>
two (float[1, 3] x, float[1, 3] mask) => (float[1, 3] y)
<float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}>
{
  a = MatMul(x, w)
  b = Relu(a)
  y = Mul(b, mask)
}
"""
DEFAULT_MS = 1000.0
RAW = CodecCosts(codec="raw", bytes=12, encode_ms=0.0, decode_ms=0.0)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = tmp_path_factory.mktemp("two")
    onnx.save(onnx.parser.parse_model(TWO_INPUTS), folder / "model.onnx")
    return prepare(folder / "model.onnx", folder / "cache")


def served(card: ModelCard, contract: Contract) -> ServedModel:
    return ServedModel(
        name=ModelName("two"),
        version="1",
        card=card,
        contract=contract,
        images={},
        labels={},
        folder=Path("none"),
        profile=None,
        store=SegmentStore(OrtEngine(), threads=1, budget_bytes=1 << 20),
    )


def admitted(card: ModelCard, contract: Contract, **parameters: bool | int | float | str) -> InferenceRequest:
    """A request of the parameters (`_` for `.`), received at 100 s and looked at 3 ms later."""
    inputs = {"x": np.zeros((1, 3), np.float32), "mask": np.ones((1, 3), np.float32)}
    wishes = {key.replace("isthmus_", "isthmus."): value for key, value in parameters.items()}
    intake = Intake(default_deadline_ms=DEFAULT_MS, room=Room(1 << 20))
    options = isthmus_options(OipRequest(inputs=inputs, parameters=wishes))
    return intake.admit(served(card, contract), inputs, (), options, received_at_s=100.0, now_s=100.003)


@pytest.mark.parametrize(
    ("promised_ms", "parameters", "deadline_ms"),
    [
        (None, {}, 1000.0),
        (120.0, {}, 120.0),
        (5000.0, {}, 1000.0),
        (120.0, {"isthmus_deadline_ms": 80}, 80.0),
        (120.0, {"isthmus_deadline_ms": 500}, 120.0),
        (120.0, {"timeout": 50_000}, 50.0),
        (120.0, {"timeout": 0}, 120.0),
        (120.0, {"timeout": 90_000, "isthmus_deadline_ms": 70}, 70.0),
        (None, {"timeout": 90_000, "isthmus_deadline_ms": 2000}, 90.0),
        (None, {"isthmus_deadline_ms": 3_600_000}, 1000.0),
    ],
)
def test_the_deadline_is_the_earliest_of_the_requests_the_contracts_and_the_daemons(
    card: ModelCard, promised_ms: float | None, parameters: dict[str, float], deadline_ms: float
) -> None:
    with admitted(card, Contract(behaviour=Behaviour(latency_p99_ms=promised_ms)), **parameters) as request:
        assert request.deadline_at_s == pytest.approx(100.0 + deadline_ms / 1000)
        assert request.facts.budget_ms == pytest.approx(deadline_ms - 3.0), "what reading it took is spent"


def allowed(card: ModelCard, contract: Contract, **parameters: str) -> set[CutId | Placement | None]:
    """Where a request may run, by cut or placement."""
    profile = ModelProfile(
        digest=card.digest,
        runtime="test",
        fingerprint="test",
        dims={},
        threads=1,
        whole_ms=1.0,
        image_ms=0.0,
        input_codecs=(RAW,),
        encoded_bytes=0,
        output_bytes=12,
        cuts=tuple(CutCosts(cut=cut.id, head_ms=0.5, tail_ms=0.5, codecs=(RAW,)) for cut in card.cuts),
        golden="",
    )
    table = PlanTable.build(card, profile, contract)
    with admitted(card, contract, **parameters) as request:
        flags = table.allowed[PRIVACY_ORDER.index(request.facts.privacy)]
    return {plan.cut or plan.placement for plan, ok in zip(table.plans, flags, strict=True) if ok}


@pytest.mark.parametrize(
    ("of_model", "of_mask", "of_request"), list(itertools.product(PRIVACY_ORDER, PRIVACY_ORDER, PRIVACY_ORDER))
)
def test_the_strictest_privacy_of_model_input_and_request_holds(
    card: ModelCard, of_model: Privacy, of_mask: Privacy, of_request: Privacy
) -> None:
    """Every cut of this model ships `mask` as it came, so a private mask allows as little as a private model."""
    assert {cut.shown_inputs for cut in card.cuts} == {("mask",)}
    contract = Contract(data=Data(privacy=of_model, inputs=(InputContract(name="mask", privacy=of_mask),)))
    everywhere = {Placement.LOCAL, Placement.OFFLOAD, *(cut.id for cut in card.cuts)}
    open_to_all = of_model == of_mask == of_request == "any"
    assert allowed(card, contract, isthmus_privacy=of_request) == (everywhere if open_to_all else {Placement.LOCAL})


def test_a_private_input_forbids_what_ships_it_and_nothing_else(card: ModelCard) -> None:
    """A split mixes `x` on the device, so it may go on though `x` is private; the offload ships it."""
    contract = Contract(data=Data(inputs=(InputContract(name="x", privacy="no-raw-input"),)))
    assert allowed(card, contract) == {Placement.LOCAL, *(cut.id for cut in card.cuts)}
    assert allowed(card, contract, isthmus_privacy="no-raw-input") == {Placement.LOCAL}, "of all inputs, the mask too"
    assert allowed(card, contract, isthmus_privacy="local-only") == {Placement.LOCAL}
