"""Our policy: the daemon's own planner over simulated time, told what `agent/serve.py` and `agent/uplink.py` would tell
it, and nothing else. Not a copy: what is changed in the planner is changed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agent.planner import Planner
from agent.replay.known import Known
from agent.replay.world import Arrival, Fate, Outcome, Policy, Stages, View
from split.plan.plan import LOCAL, Decision, Placement, Plan, RequestFacts

MESSAGE_BYTES_MAX: Final = 256 << 20
"""What the companion takes."""
BUDGET_MAX_MS: Final = 30_000.0
"""`limits.default_deadline_ms`: the budget of a request without a deadline."""


class Ours(Policy):
    """`known`: for every model of the world, what the device knows of it.

    The companion says at each connection what its own times are (as golden runs take), without the load it has later.
    """

    name = "ours"

    def __init__(self, known: Mapping[str, Known]) -> None:
        self._known = known
        self._planner = Planner()
        self._decided: dict[int, Decision] = {}
        self._number = 0

    def begin(self, view: View) -> None:
        super().begin(view)
        self._planner = Planner(slowdown=view.world.slowdown)
        self._decided, self._number = {}, 0
        for name in view.world.models:
            known = self._known[name]
            self._planner.add_model(name, known.card, known.profile, known.contract)
        self.back(0.0)

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        decision = self._planner.decide(arrival.model, _facts(arrival), edge_queue_ms=edge_queue_ms, now_s=now_s)
        self._decided[self._number] = decision
        self._number += 1
        return decision.chosen.plan

    def observe(self, outcome: Outcome) -> None:
        decision = self._decided.pop(outcome.number)
        stages_ms, now_s = outcome.stages_ms, outcome.done_at_s
        plan = outcome.plan if "encode" in stages_ms or "up" in stages_ms else LOCAL
        for stage in ("image", "head", "encode"):
            if stage in stages_ms:
                self._learn(outcome, plan, "whole" if stage == "head" and plan == LOCAL else stage, stages_ms[stage])
        if "finish" in stages_ms:
            self._learn_finish(outcome)
        if outcome.fate is Fate.PLANNED and outcome.plan != LOCAL:
            self._answered(outcome, now_s)
        elif outcome.fate is Fate.LATE:
            expected_ms = decision.chosen.stages_ms
            there_ms = expected_ms["cloud_queue"] + expected_ms["cloud_decode"] + expected_ms["tail"]
            self._planner.observe_late(
                outcome.ahead_bytes + self._payload_bytes(outcome), outcome.waited_ms - there_ms, now_s
            )

    def silent(self, now_s: float) -> None:
        self._planner.companion_silent("the companion does not answer in time")

    def lost(self, now_s: float) -> None:
        self._planner.companion_lost("the companion is lost: nothing was heard")

    def back(self, now_s: float) -> None:
        if self._planner.snapshot(now_s)["remote_reason"] == "the companion does not answer in time":
            self._planner.companion_back()
            return
        self._planner.connected(max_message_bytes=MESSAGE_BYTES_MAX, ahead_bytes=self._view.ahead_bytes)
        for name, plans in self._view.world.models.items():
            offloads = [(plan, stages) for plan, stages in plans.items() if plan.placement is Placement.OFFLOAD]
            whole_ms = max((stages.tail_ms for _, stages in offloads), default=0.0)
            image_ms = max(
                (stages.cloud_decode_ms for plan, stages in offloads if plan.codec == "encoded"), default=0.0
            )
            self._planner.companion_ready(name, whole_ms, image_ms)
            for cut, tail_ms in {plan.cut: stages.tail_ms for plan, stages in plans.items()}.items():
                if cut is not None:
                    self._planner.segment_ready(name, cut, tail_ms)

    def probe(self, now_s: float) -> int:
        return self._planner.probe_wanted(now_s)

    def ponged(self, rtt_ms: float, padding_bytes: int, now_s: float) -> None:
        self._planner.observe_ping(rtt_ms, now_s, padding_bytes=padding_bytes)

    # -- what was measured --------------------------------------------------------------------------------------------

    def _stages(self, outcome: Outcome, plan: Plan) -> Stages:
        return self._view.world.plans(outcome.arrival)[plan]

    def _payload_bytes(self, outcome: Outcome) -> int:
        if outcome.plan.codec == "encoded" and outcome.arrival.encoded_bytes:
            return outcome.arrival.encoded_bytes
        return self._stages(outcome, outcome.plan).up_bytes

    def _learn(self, outcome: Outcome, plan: Plan, stage: str, measured_ms: float) -> None:
        model, facts = outcome.arrival.model, _facts(outcome.arrival)
        ms = self._planner.as_profiled_ms(model, facts, plan, stage, measured_ms)
        if ms is not None:
            self._planner.observe_edge(model, plan, stage, ms)

    def _learn_finish(self, outcome: Outcome) -> None:
        """Of a split the tail; of an offload the whole, and the picture that had travelled as it came."""
        finish_ms = outcome.stages_ms["finish"]
        if outcome.plan.placement is Placement.SPLIT:
            self._learn(outcome, outcome.plan, "local_tail", finish_ms)
            return
        image_share = 0.0
        if outcome.plan.codec == "encoded":
            here = self._stages(outcome, LOCAL)
            image_share = here.image_ms / (here.image_ms + here.head_ms)
            self._learn(outcome, LOCAL, "image", image_share * finish_ms)
        self._learn(outcome, LOCAL, "whole", (1.0 - image_share) * finish_ms)

    def _answered(self, outcome: Outcome, now_s: float) -> None:
        model, plan, stages_ms = outcome.arrival.model, outcome.plan, outcome.stages_ms
        up_bytes = outcome.ahead_bytes + self._payload_bytes(outcome)
        down_bytes = self._stages(outcome, plan).down_bytes
        self._planner.observe_transfer(up_bytes, down_bytes, outcome.network_ms, now_s)
        self._planner.observe_reply(
            self._known[model].profile.digest,
            str(plan.codec),
            down_bytes=down_bytes,
            decode_ms=stages_ms["decode"] / self._view.world.slowdown,
            cloud_decode_ms=stages_ms["cloud_decode"],
        )
        facts = _facts(outcome.arrival)
        tail_ms = self._planner.as_profiled_ms(model, facts, plan, "tail", stages_ms["tail"])
        self._planner.observe_cloud(model, plan, stages_ms["cloud_queue"], tail_ms)


def _facts(arrival: Arrival) -> RequestFacts:
    return RequestFacts(
        budget_ms=min(arrival.deadline_ms, BUDGET_MAX_MS), encoded_bytes=arrival.encoded_bytes, sizes=arrival.sizes
    )
