"""A model of ten nodes and one cut, described but not there: for tests of what plans and records."""

from __future__ import annotations

from split.graph.card import CutCard, ModelCard
from split.ids import CutId, ModelDigest
from split.plan.plan import Placement, Plan
from split.tensor import TensorSpec

CUT = CutId("aaaaaaaaaaaa")
SPLIT = Plan(placement=Placement.SPLIT, cut=CUT, codec="raw")
OFFLOAD = Plan(placement=Placement.OFFLOAD, codec="raw")


def tiny_card(x: str = "x", boundary: str = "t") -> ModelCard:
    """`x`, `boundary`: what its input and the tensor at the cut are called."""
    return ModelCard(
        digest=ModelDigest("sha256:" + "0" * 64),
        path="/models/tiny.onnx",
        files=(),
        inputs=(TensorSpec(name=x, dtype="FP32", shape=(1, 3, 64, 64)),),
        outputs=(TensorSpec(name="y", dtype="FP32", shape=(1, 10)),),
        nodes=10,
        opset=17,
        cuts=(
            CutCard(
                id=CUT,
                boundary=(TensorSpec(name=boundary, dtype="FP32", shape=(1, 1000)),),
                head_inputs=(x,),
                head_outputs=(),
                tail_inputs=(),
                shown_inputs=(),
                tail_outputs=("y",),
                nodes=3,
                compute_share=0.3,
                node_bitmap="07",
            ),
        ),
    )
