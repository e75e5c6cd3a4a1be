"""What a device knows of a model before its first request (card, profile, contract), and the stages that follow.

Both ways: a world from real measurements, and, for worlds that were made up, the card and profile a device would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from agent.replay.world import Stages
from split.graph.card import CutCard, ModelCard
from split.ids import CutId, ModelDigest
from split.plan.plan import LOCAL, LOSSLESS_CODECS, Placement, Plan
from split.plan.table import Column, PlanTable
from split.profiles.contract import Contract, Data, Fidelity, InputContract
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.tensor import TensorSpec


@dataclass(frozen=True, kw_only=True)
class Known:
    """One model. `table` has every plan that was measured; those that the contract does not allow are no stages."""

    card: ModelCard
    profile: ModelProfile
    contract: Contract
    told: Mapping[Plan, Stages] | None = None
    """The companion's own times as it tells them when it is ready; None: those of the world, without load."""

    @cached_property
    def table(self) -> PlanTable:
        return PlanTable.build(self.card, self.profile, self.contract)

    def stages(self, companion_ratio: float, sizes: tuple[int, ...] = ()) -> dict[Plan, Stages]:
        """Every allowed plan with its costs; the companion takes `companion_ratio` of this device's time for the same
        work. `sizes`: of the model's open dims."""
        table, image_ms = self.table.at(sizes), self.profile.image_ms
        found = {}
        for row, plan in enumerate(table.plans):
            if not table.allowed[0][row]:
                continue
            column = table.costs[:, row].tolist()
            encoded = plan.codec == "encoded"
            decoded_there_ms = image_ms if encoded else column[Column.CLOUD_DECODE]
            found[plan] = Stages(
                image_ms=0.0 if encoded else image_ms,
                head_ms=column[Column.HEAD],
                encode_ms=column[Column.ENCODE],
                up_bytes=round(self.profile.encoded_bytes if encoded else column[Column.UP]),
                cloud_decode_ms=companion_ratio * decoded_there_ms,
                tail_ms=companion_ratio * column[Column.TAIL],
                down_bytes=round(column[Column.DOWN]),
                decode_ms=column[Column.REPLY],
                finish_ms=column[Column.FINISH] + (image_ms if encoded else 0.0),
            )
        return found

    @staticmethod
    def of(plans: Mapping[Plan, Stages], shares: Mapping[CutId, float] | None = None) -> Known:
        """A model that costs this, as a device with slowdown 1 would know it: all plans allowed.

        `shares`: of the operations, in each cut's head; without, as its head's time to the whole's."""
        whole_ms = plans[LOCAL].head_ms
        cuts: dict[CutId, list[tuple[Plan, Stages]]] = {}
        for plan, stages in plans.items():
            if plan.cut is not None:
                cuts.setdefault(plan.cut, []).append((plan, stages))
        ordered = sorted(cuts.items(), key=lambda item: item[1][0][1].head_ms)
        down_bytes = max((stages.down_bytes for stages in plans.values()), default=0)
        offloads = {plan.codec: stages for plan, stages in plans.items() if plan.placement is Placement.OFFLOAD}
        encoded = offloads.pop("encoded", None)
        digest = ModelDigest("sha256:" + "0" * 64)
        x = TensorSpec(name="x", dtype="FP32", shape=(1, max((s.up_bytes for s in offloads.values()), default=4) // 4))
        y = TensorSpec(name="y", dtype="FP32", shape=(1, max(down_bytes // 4, 1)))
        card = ModelCard(
            digest=digest,
            path="made-up",
            files=(),
            inputs=(x,),
            outputs=(y,),
            nodes=100,
            opset=17,
            cuts=tuple(_cut(cut, kinds, whole_ms, shares or {}, y) for cut, kinds in ordered),
        )
        profile = ModelProfile(
            digest=digest,
            runtime="none",
            fingerprint="none",
            dims={},
            threads=1,
            whole_ms=whole_ms,
            image_ms=plans[LOCAL].image_ms,
            input_codecs=tuple(_codec(str(codec), stages) for codec, stages in offloads.items()),
            encoded_bytes=encoded.up_bytes if encoded is not None else 0,
            output_bytes=down_bytes,
            cuts=tuple(
                CutCosts(
                    cut=cut,
                    head_ms=kinds[0][1].head_ms,
                    tail_ms=kinds[0][1].finish_ms,
                    codecs=tuple(_codec(str(plan.codec), stages) for plan, stages in kinds),
                )
                for cut, kinds in ordered
            ),
        )
        pictures = (InputContract(name="x", encoded=ImageSpec(resize=64, crop=64)),) if encoded is not None else ()
        contract = Contract(
            data=Data(
                inputs=pictures,
                codecs=("raw", "fp16", "int8", "klt", "encoded", "jpeg", "webp"),
                fidelity=Fidelity(measure="kl", bound=1.0),
            )
        )
        return Known(card=card, profile=profile, contract=contract)


def _cut(
    cut: CutId, kinds: list[tuple[Plan, Stages]], whole_ms: float, shares: Mapping[CutId, float], output: TensorSpec
) -> CutCard:
    share = shares.get(cut, min(kinds[0][1].head_ms / whole_ms, 1.0))
    raw = next((stages.up_bytes for plan, stages in kinds if plan.codec == "raw"), kinds[0][1].up_bytes)
    return CutCard(
        id=cut,
        boundary=(TensorSpec(name=cut, dtype="FP32", shape=(1, max(raw // 4, 1))),),
        head_inputs=("x",),
        head_outputs=(),
        tail_inputs=(),
        shown_inputs=(),
        tail_outputs=(output.name,),
        nodes=round(100 * share),
        compute_share=share,
        node_bitmap="00",
    )


def _codec(codec: str, stages: Stages) -> CodecCosts:
    return CodecCosts(
        codec=codec,
        bytes=stages.up_bytes,
        encode_ms=stages.encode_ms,
        decode_ms=stages.cloud_decode_ms,
        fidelity={} if codec in LOSSLESS_CODECS else {"kl": 0.0},
    )
