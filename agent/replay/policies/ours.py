"""Our policy: the daemon's own planner over simulated time, told what `agent/serve.py` and `agent/uplink.py` would tell
it, and nothing else; it hedges as `serve` does. Not a copy: what is changed in the planner is changed here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.hedges import NEXT_MARGIN_MS
from agent.planner import Planner
from agent.replay.known import Known
from agent.replay.world import Arrival, Fate, Outcome, Policy, Stages, View
from split.plan.hedging import HEDGING, Replies, expected_reply_ms, hedge_after_ms, turn_ms
from split.plan.plan import LOCAL, Decision, Placement, Plan, RequestFacts
from split.plan.power import Power, PowerModel
from split.plan.probing import PING_BYTES
from split.plan.score import spreads
from split.plan.slack import MARGIN_MS
from split.plan.slow_start import INITIAL_SEGMENTS, SendWindow

MESSAGE_BYTES_MAX: Final = 256 << 20
"""What the companion takes."""
BUDGET_MAX_MS: Final = 30_000.0
"""`limits.default_deadline_ms`: the budget of a request without a deadline."""

_PROBE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Same(PowerModel):
    """The world's power, which does not change with rates and threads."""

    power: Power

    def at(self, up_mbit_s: float, down_mbit_s: float, *, threads: int = 0) -> Power:
        return self.power

    @staticmethod
    def of(power: Power) -> _Same:
        return _Same(compute_w=power.compute_w, radio=None, measured=power.measured, source=power.source, power=power)


class Ours(Policy):
    """`known`: for every model of the world, what the device knows of it. Prices and power are the world's.

    The companion says at each connection what its own times are (as golden runs take), without the load it has later.
    Without `hedges` a finish here begins when it must and not before, as it does for every other policy: what is left
    of the difference is the choice of plans.
    """

    def __init__(self, known: Mapping[str, Known], *, hedges: bool = True) -> None:
        self.name = "ours" if hedges else "ours, without hedges"
        self._known, self._hedges = known, hedges
        self._planner = Planner()
        self._replies = Replies()
        self._decided: dict[int, Decision] = {}
        self._expected: dict[int, tuple[float, float]] = {}
        """Of the requests that wait for the companion: mean and deviation of the reply's time, ms."""
        self._turns_ms: dict[int, float] = {}
        """By the same: how much longer one behind it waits."""
        self._number = 0
        self._is_silent = False
        """Nothing is heard on a connection that is not lost."""
        self._sent_at_s = -math.inf
        """When the last payload was on its way."""
        self._windows: dict[int, SendWindow | None] = {}
        """By the same requests: what TCP's window was when they were sent; `_PROBE`: of the last probe."""

    @property
    def planner(self) -> Planner:
        """Of the run that was begun last."""
        return self._planner

    def begin(self, view: View) -> None:
        super().begin(view)
        power = _Same.of(view.world.power)
        self._planner = Planner(slowdown=view.world.slowdown, prices=view.world.prices, power=lambda: power)
        self._replies, self._number = Replies(), 0
        for known in (self._decided, self._expected, self._turns_ms, self._windows):
            known.clear()
        self._sent_at_s, self._is_silent = -math.inf, False
        for name in view.world.models:
            model = self._known[name]
            self._planner.add_model(name, model.card, model.profile, model.contract)
        self.back(0.0)

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        self._planner.observe_window(self._window(now_s))
        decision = self._planner.decide(arrival.model, _facts(arrival), edge_queue_ms=edge_queue_ms, now_s=now_s)
        self._decided[self._number] = decision
        self._planner.began(str(self._number), decision, now_s=now_s)
        self._number += 1
        return decision.chosen.plan

    def expected_ms(self, arrival: Arrival, plan: Plan, *, finishes: bool) -> float:
        planner, model, facts = self._planner, arrival.model, _facts(arrival)
        is_picture = bool(arrival.encoded_bytes) and (plan.codec == "encoded") == finishes
        image_ms = planner.image_ms(model) if is_picture else 0.0
        if finishes:
            return image_ms + planner.finish_ms(model, plan.cut, facts)
        return image_ms + planner.prepare_ms(model, plan, facts)

    def sent(self, number: int, plan: Plan, now_s: float, finish_ms: float) -> float:
        """As `Policy.sent`: when a hedge is worth it, as the daemon decides it."""
        decision, arrival = self._decided[number], self._view.world.arrivals[number]
        behaviour = self._known[arrival.model].contract.behaviour
        stages_ms, sigma_ms = decision.chosen.stages_ms, decision.chosen.sigma_ms
        expected_ms = expected_reply_ms(stages_ms, self._turns_ms.values())
        self._turns_ms[number] = turn_ms(stages_ms, decision.link["rtt_ms"])
        self._expected[number] = expected_ms, sigma_ms
        self._windows[number] = self._window(now_s)
        self._sent_at_s = now_s + stages_ms["up"] / 1000.0
        budget_ms = _facts(arrival).budget_ms
        next_ms = self.expected_ms(arrival, LOCAL, finishes=False) + NEXT_MARGIN_MS
        if not self._hedges or finish_ms + next_ms > budget_ms:
            return math.inf
        return hedge_after_ms(
            self._replies,
            HEDGING[behaviour.service_class],
            expected_ms=expected_ms,
            sigma_ms=sigma_ms,
            finish_ms=finish_ms,
            late_after_ms=budget_ms - (now_s - arrival.at_s) * 1000.0 - MARGIN_MS,
            may_gain_time=behaviour.weights.energy <= behaviour.weights.latency,
        )

    def observe(self, outcome: Outcome) -> None:
        """As `Policy.observe`: the planner is told what the daemon would tell it of this request."""
        if (expected := self._expected.pop(outcome.number, None)) is not None:
            del self._turns_ms[outcome.number]
            replied = self._replies.came if outcome.fate is Fate.PLANNED else self._replies.overtaken
            replied(outcome.waited_ms, *expected)
        window = self._windows.pop(outcome.number, None)
        decision = self._decided.pop(outcome.number)
        self._planner.done(str(outcome.number))
        stages_ms, now_s = outcome.stages_ms, outcome.done_at_s
        plan = outcome.plan if "encode" in stages_ms or "up" in stages_ms else LOCAL
        for stage in ("image", "head", "encode"):
            if stage in stages_ms:
                self._learn(outcome, plan, "whole" if stage == "head" and plan == LOCAL else stage, stages_ms[stage])
        if "finish" in stages_ms:
            self._learn_finish(outcome)
        if outcome.fate is Fate.PLANNED and not spreads(decision.objective.get("throughput", 0.0)):
            predicted_ms = decision.chosen.predicted_ms
            self._planner.observe_total(outcome.arrival.model, outcome.plan, outcome.total_ms, predicted_ms)
        if outcome.fate is Fate.PLANNED and outcome.plan != LOCAL:
            self._answered(outcome, window, now_s)
        elif outcome.fate in (Fate.LATE, Fate.HEDGED, Fate.GIVEN_UP) and outcome.waited_ms > 0.0:
            expected_ms = decision.chosen.stages_ms
            there_ms = expected_ms["cloud_queue"] + expected_ms["cloud_decode"] + expected_ms["tail"]
            self._planner.observe_late(
                outcome.ahead_bytes + self._payload_bytes(outcome),
                self._stages(outcome, outcome.plan).down_bytes,
                outcome.waited_ms - there_ms,
                now_s,
            )

    def silent(self, now_s: float) -> None:
        self._is_silent = True
        self._planner.companion_silent("the companion does not answer in time")

    def lost(self, now_s: float) -> None:
        self._is_silent = False
        self._planner.companion_lost("the companion is lost: nothing was heard")

    def back(self, now_s: float) -> None:
        """As `Policy.back`: after a silence the same connection, else a new one whose models are made ready."""
        if self._is_silent:
            self._is_silent = False
            self._planner.companion_back(now_s)
            return
        self._planner.connected(max_message_bytes=MESSAGE_BYTES_MAX, ahead_bytes=self._view.ahead_bytes)
        for name, world_plans in self._view.world.models.items():
            plans = self._known[name].told or world_plans
            offloads = [(plan, stages) for plan, stages in plans.items() if plan.placement is Placement.OFFLOAD]
            whole_ms = max((stages.tail_ms for _, stages in offloads), default=0.0)
            image_ms = max(
                (stages.cloud_decode_ms for plan, stages in offloads if plan.codec == "encoded"), default=0.0
            )
            self._planner.companion_ready(name, whole_ms, image_ms)
            for cut, tail_ms in {plan.cut: stages.tail_ms for plan, stages in plans.items()}.items():
                if cut is not None:
                    self._planner.segment_ready(name, cut, tail_ms)

    def paced(self, cloud_ratio: float, since_s: float, now_s: float) -> None:
        self._planner.companion_paced(cloud_ratio, since_s, now_s)

    def probe(self, now_s: float) -> int:
        padding_bytes = self._planner.probe_wanted(now_s)
        if padding_bytes > PING_BYTES:
            self._windows[_PROBE], self._sent_at_s = self._window(now_s), now_s
        return padding_bytes

    def looks_again_s(self, now_s: float) -> float:
        return self._planner.looks_again_s(now_s)

    def pong(self, now_s: float) -> int:
        return self._planner.pong_wanted(now_s)

    def ponged(self, rtt_ms: float, padding_bytes: int, pong_bytes: int, now_s: float) -> None:
        self._planner.observe_window(self._windows.get(_PROBE))
        self._planner.observe_ping(rtt_ms, now_s, padding_bytes=padding_bytes, pong_bytes=pong_bytes)

    def _window(self, now_s: float) -> SendWindow | None:
        """What the kernel would say of the connection; None: its window is open."""
        start = self._view.world.slow_start
        if start is None or now_s - self._sent_at_s <= start.idle_s:
            return None
        return SendWindow(
            window_bytes=start.window_bytes,
            threshold_bytes=math.inf,
            segment_bytes=start.window_bytes / INITIAL_SEGMENTS,
            timeout_s=start.idle_s,
            restarts=False,
            sent_at_s=self._sent_at_s,
        )

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
            known = self._known[outcome.arrival.model]
            image_ms, whole_ms = known.profile.image_ms, known.table.at(outcome.arrival.sizes).whole_ms
            image_share = image_ms / (image_ms + whole_ms)
            self._learn(outcome, LOCAL, "image", image_share * finish_ms)
        self._learn(outcome, LOCAL, "whole", (1.0 - image_share) * finish_ms)

    def _answered(self, outcome: Outcome, window: SendWindow | None, now_s: float) -> None:
        model, plan, stages_ms = outcome.arrival.model, outcome.plan, outcome.stages_ms
        up_bytes = outcome.ahead_bytes + self._payload_bytes(outcome)
        down_bytes = self._stages(outcome, plan).down_bytes
        self._planner.observe_window(window)
        self._planner.observe_transfer(up_bytes, down_bytes, outcome.network_ms, now_s)
        self._planner.observe_reply(
            self._known[model].profile.digest,
            down_bytes=down_bytes,
            decode_ms=stages_ms["decode"] / self._view.world.slowdown,
        )
        facts = _facts(outcome.arrival)
        self._planner.observe_reply_bytes(model, facts, plan, down_bytes)
        tail_ms = self._planner.as_profiled_ms(model, facts, plan, "tail", stages_ms["tail"])
        decode_ms = self._planner.as_profiled_ms(model, facts, plan, "cloud_decode", stages_ms["cloud_decode"])
        self._planner.observe_cloud(model, plan, stages_ms["cloud_queue"], tail_ms, decode_ms)


def _facts(arrival: Arrival) -> RequestFacts:
    return RequestFacts(
        budget_ms=min(arrival.deadline_ms, BUDGET_MAX_MS), encoded_bytes=arrival.encoded_bytes, sizes=arrival.sizes
    )
