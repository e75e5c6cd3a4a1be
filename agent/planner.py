"""Answers with decisions: which plan a request takes, and what it is expected to cost here, by all that is known
(`knowledge.py`: models and companion, and what is learned of them).

No I/O, no clock (`now_s` is passed in, monotonic seconds), one thread (the event loop's). It decides and remembers;
it never sends, runs or opens anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from agent.companion_view import at_rates
from agent.knowledge import Knowledge
from agent.known_model import Known, KnownModel
from split.ids import CutId
from split.plan.decide import decide
from split.plan.exploring import Explorer
from split.plan.objective import FREE, NO_BACKLOG, Prices
from split.plan.observation import Metered, Observation
from split.plan.plan import Decision, Plan, RequestFacts
from split.plan.power import NO_POWER_MODEL, Power, PowerModel

__all__ = ["Known", "Planner"]


class Planner(Knowledge):
    """Decides for all models of one daemon, with one companion at a time.

    `slowdown`: `emulation.slowdown`, what every device stage is stretched by.
    `probe_bytes_per_hour`, `probe_joules_per_hour`: what probes and pings may cost while nothing else informs about
    the link.
    `metered`: asked at each decision, what may still cross the link this month; None where nothing is metered.
    `prices`: what bytes on the link and the companion's time cost.
    `power`, `battery_low`: asked at each decision, what the device draws, and whether its battery is nearly empty.
    """

    def __init__(
        self,
        *,
        slowdown: float = 1.0,
        probe_bytes_per_hour: int = 2_000_000,
        probe_joules_per_hour: float = math.inf,
        metered: Callable[[], Metered | None] = lambda: None,
        prices: Prices = FREE,
        power: Callable[[], PowerModel] = lambda: NO_POWER_MODEL,
        battery_low: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(
            slowdown=slowdown,
            probe_bytes_per_hour=probe_bytes_per_hour,
            probe_joules_per_hour=probe_joules_per_hour,
            metered=metered,
        )
        self._prices = prices
        self._power_model = power
        self._battery_low = battery_low

    # -- decisions ----------------------------------------------------------------------------------------------------

    def decide(self, name: str, facts: RequestFacts, *, edge_queue_ms: float, now_s: float) -> Decision:
        """Choose the plan of one request. UnknownModel without `add_model`; InvalidRequest for a forced plan that may
        never run."""
        model = self._model(name)
        metered = self._companion.metered()
        observation = self._observation(model, metered, edge_queue_ms, now_s)
        decision = decide(model.costs.table, observation, facts, self._explorer(model, metered, observation))
        if facts.mode is None and facts.cut is None and facts.codec is None and not decision.tried:
            model.decided(decision, now_s)
        self._companion.decided(now_s)
        return decision

    def began(self, request_id: str, decision: Decision, *, now_s: float) -> None:
        """A request is carried out as decided; until `done` its work on link and companion counts as backlog."""
        self._companion.began(request_id, decision, now_s=now_s)

    def done(self, request_id: str) -> None:
        """It is answered or given up; unknown ids are ignored."""
        self._companion.done(request_id)

    def recent_cuts(self, name: str) -> tuple[int, Sequence[CutId]]:
        """How often was decided so far, and the cuts that were chosen or worth opening lately, the last one first.
        UnknownModel without `add_model`."""
        model = self._model(name)
        return model.decisions, model.recent_cuts

    # -- what is expected of a request ---------------------------------------------------------------------------------

    def finish_ms(self, name: str, cut: CutId | None, facts: RequestFacts) -> float:
        """Expected device time of what is missing of a request, the tail of `cut` or (None) the whole; drift and
        slowdown in, queue and picture not."""
        return self._model(name).costs.finish_ms(cut, facts)

    def finish_margin_ratio(self, name: str) -> float:
        """Of `finish_ms`, what to keep beside it by how far this model's runs scatter on this device, so that the
        quantile of its class is in time."""
        return self._model(name).finish_margin_ratio()

    def as_profiled_ms(
        self, name: str, facts: RequestFacts, plan: Plan, stage: str, measured_ms: float
    ) -> float | None:
        """What a stage that took `measured_ms` for this request would have taken at the profiled sizes: what is learned
        (`observe_edge`, `observe_cloud`) holds for those. None where the request's sizes are too far from them to tell.
        `stage`: one of `observe_edge`, or tail or cloud_decode for the companion's.
        """
        return self._model(name).costs.as_profiled_ms(facts, plan, stage, measured_ms)

    def image_ms(self, name: str) -> float:
        """Expected device time to prepare an encoded input; drift and slowdown in."""
        return self._model(name).costs.image_ms()

    def prepare_ms(self, name: str, plan: Plan, facts: RequestFacts) -> float:
        """Expected device time before a request's bytes leave: head and encoding; drift and slowdown in, queue not.
        ModelUnavailable where the model is another one by now, without such a plan."""
        return self._model(name).costs.prepare_ms(plan, facts)

    def reply_bytes(self, name: str, plan: Plan, facts: RequestFacts) -> int:
        """What the companion's reply to this plan will weigh; 0 where the model's plans are others by now."""
        return self._model(name).costs.reply_bytes(plan, facts)

    # -- what may be done now -----------------------------------------------------------------------------------------

    def local_only_reason(self, name: str) -> str:
        """Why this model runs on the device only at this moment; "" when the companion may be used."""
        return self._companion.why_not(self._model(name), self._companion.metered())

    def metered_why_not(self, crossing_bytes: float) -> str:
        """Why so many bytes may not cross the link now; "" when they may."""
        return self._companion.metered_why_not(crossing_bytes)

    @property
    def slowdown(self) -> float:
        """`emulation.slowdown`; 1.0: none."""
        return self._slowdown

    @property
    def battery_low(self) -> bool:
        """Whether no energy is to be spent on being faster."""
        return self._battery_low()

    def probe_wanted(self, now_s: float) -> int:
        """Bytes of padding of a ping that would be worth its cost now; 0: none. What is returned counts as sent."""
        return self._companion.probe_wanted(self._power_model(), now_s) if self._models else 0

    def looks_again_s(self, now_s: float) -> float:
        """In so many seconds `probe_wanted` will want what it does not want yet; `inf`: it is asked often enough."""
        return self._companion.looks_again_s(now_s)

    def pong_wanted(self, now_s: float) -> int:
        """Bytes of padding that a ping is to ask for in its pong; 0: none. What is returned counts as sent. Asked
        before `probe_wanted` where the companion answers so. Only for models that stay here for what a reply takes."""
        if not any(model.stays_for_reply(now_s) for model in self._models.values()):
            return 0
        return self._companion.pong_wanted(self._power_model(), now_s)

    def rtt_ms(self, now_s: float) -> float:
        """Round trip to the companion as estimated now."""
        return self._companion.link(now_s).rtt_ms

    def power(self, now_s: float, name: str | None = None) -> Power:
        """What the device draws above idle while this model runs (None or unknown: on all threads), at the link's
        rates as estimated now."""
        model = self._models.get(name) if name is not None else None
        threads = 0 if model is None else model.costs.profile.threads
        return at_rates(self._power_model(), self._companion.link(now_s), threads)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _explorer(self, model: KnownModel, metered: Metered | None, observation: Observation) -> Explorer | None:
        """None where nothing is tried now: the model's never are, nearly no metered bytes or battery are left."""
        scarce = observation.battery_low or (metered is not None and not metered.may_probe)
        if scarce or model.explorer is None:
            return None
        model.explorer.device_doubted = model.costs.edge.is_slow
        return model.explorer

    def _observation(
        self, model: KnownModel, metered: Metered | None, edge_queue_ms: float, now_s: float
    ) -> Observation:
        why_not = self._companion.why_not(model, metered)
        costs = model.costs
        costs.rest(now_s)
        remote, power = None if why_not else self._companion.remote(model, metered, now_s), self._power_model()
        return Observation(
            edge_queue_ms=edge_queue_ms,
            slowdown=self._slowdown,
            alpha=costs.edge.ratio,
            alpha_sigma=costs.edge.sigma,
            image_ms=costs.profile.image_ms,
            image_ratio=costs.image.ratio,
            remote=remote,
            remote_why_not=why_not,
            rest_ms=costs.requests.here_ms,
            incumbent=model.incumbent,
            opening=model.opening(),
            power=at_rates(power, None if remote is None else remote.link, costs.profile.threads),
            prices=self._prices,
            battery_low=self._battery_low(),
            backlog=NO_BACKLOG if remote is None else self._companion.backlog(remote, edge_queue_ms, now_s),
        )
