"""What the daemon knows for deciding: its models (`known_model.py`) and the companion (`companion_view.py`), as
`serve`, `uplink` and `openings` tell it. It remembers and learns; what to do with it is the planner's (`planner.py`).

No I/O, no clock (`now_s` is passed in, monotonic seconds), one thread (the event loop's).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from agent.companion_view import CompanionView
from agent.known_model import Known, KnownModel, OpeningMs
from split.errors import UnknownModel
from split.graph.card import ModelCard
from split.ids import CutId
from split.plan.observation import Metered
from split.plan.plan import Plan, RequestFacts
from split.plan.slow_start import SendWindow
from split.profiles.contract import Contract
from split.profiles.measured import ModelProfile

CLOCK_CHANGE: Final = 0.05
"""A clock that changed by less (relative) shows no more than runs scatter."""

_ALL_OPEN: Final[OpeningMs] = {}


class Knowledge:
    """All models of one daemon and one companion at a time. The arguments are the planner's."""

    def __init__(
        self,
        *,
        slowdown: float,
        probe_bytes_per_hour: int,
        probe_joules_per_hour: float,
        metered: Callable[[], Metered | None],
    ) -> None:
        self._slowdown = slowdown
        self._throttled: bool | None = None
        self._clock_ratio: float | None = None
        """What the clock may rise to / its highest, as of the last change that counted."""
        self._models: dict[str, KnownModel] = {}
        self._peer = ""
        """The companion that was connected last."""
        self._companion = CompanionView(
            probe_bytes_per_hour=probe_bytes_per_hour, probe_joules_per_hour=probe_joules_per_hour, metered=metered
        )

    # -- models -------------------------------------------------------------------------------------------------------

    def add_model(
        self,
        name: str,
        card: ModelCard,
        profile: ModelProfile,
        contract: Contract,
        opening_ms: Callable[[], OpeningMs] = lambda: _ALL_OPEN,
    ) -> None:
        """Know this model from now on (again: from scratch, the companion must be ready anew).

        `opening_ms`: asked at each decision, what is not open here and what opening it takes.
        """
        known = KnownModel.of(card, profile, contract, opening_ms=opening_ms, slowdown=self._slowdown)
        known.there.peer = self._peer
        self._models[name] = known

    def recalibrated(
        self,
        name: str,
        card: ModelCard,
        profile: ModelProfile,
        contract: Contract,
        opening_ms: Callable[[], OpeningMs] = lambda: _ALL_OPEN,
    ) -> None:
        """The same model with another calibration: what was learned of it stays, and what the companion holds open. Of
        codecs with settings nothing was learned yet, and the companion must have the calibration (`codec_ready`).
        UnknownModel without `add_model`."""
        self._model(name).recalibrated(card, profile, contract, opening_ms)

    def plans_with(self, name: str, profile: ModelProfile | None) -> bool:
        """Whether this very profile is the model's now: what was found of a codec before a new calibration says nothing
        of it. False for unknown names."""
        model = self._models.get(name)
        return model is not None and model.costs.profile is profile

    def remove_model(self, name: str) -> None:
        """Forget it; unknown names are ignored."""
        self._models.pop(name, None)

    # -- the companion ------------------------------------------------------------------------------------------------

    def connected(
        self, *, max_message_bytes: int, ahead_bytes: Callable[[], int] = lambda: 0, way: str = "", peer: str = ""
    ) -> None:
        """A new connection, to a companion that takes messages of this size: it must make every model ready anew.

        `ahead_bytes`: asked at each decision, what other requests have still to send before a new one's turn.
        `way`: what tells this link from others (both ends' addresses); what was learned there stays, as uncertain as
        it has become. Its rate is worth a look. `peer`: the companion's name, by its certificate.
        """
        another_way = self._companion.connected(max_message_bytes=max_message_bytes, ahead_bytes=ahead_bytes, way=way)
        self._peer = peer
        for model in self._models.values():
            model.connected(peer, another_way=another_way)

    def companion_lost(self, why: str) -> None:
        """The connection is gone, or takes no new request (a sentence says why): local plans only until the next."""
        self._companion.lost(why)

    def companion_silent(self, why: str) -> None:
        """Nothing is heard on the connection (a sentence says why): local plans only, what is ready stays so."""
        self._companion.silent(why)

    def companion_back(self, now_s: float) -> None:
        """The silent connection speaks again: its rate is worth a look."""
        self._companion.back(now_s)

    def companion_ready(self, name: str, whole_ms: float, image_ms: float) -> None:
        """The companion runs this model, compared and found equal: offload may be used; an earlier ban is lifted."""
        self._model(name).companion_ready(whole_ms, image_ms, self._companion.pace)

    def companion_paced(self, work_ms: float, since_s: float, now_s: float) -> None:
        """The companion says that a piece of work of its own takes it so long now, and that `since_s` ago it still took
        what it had said before. What it said last before it was ready with a model is what the times hold for that it
        gave then; where it had said nothing on this connection, what it says first."""
        pace = self._companion.paced(work_ms)
        for model in self._models.values():
            model.companion_paced(pace, now_s - since_s)

    def companion_not_ready(self, name: str, why: str) -> None:
        """This model could not be made ready so far (a sentence says why). Unknown names are ignored."""
        if (model := self._models.get(name)) is not None:
            model.there.not_ready_why = why

    def segment_ready(self, name: str, cut: CutId, tail_ms: float) -> None:
        """The companion holds this cut's tail open, compared and found equal: its splits may be used."""
        self._model(name).segment_ready(cut, tail_ms)

    def segment_not_ready(self, name: str, cut: CutId, why: str) -> None:
        """This cut is not open there (a sentence says why), the model's others may be. Unknown names are ignored."""
        if (model := self._models.get(name)) is not None:
            model.there.cuts_not_open[cut] = why

    def forbid_remote(self, name: str, why: str | None) -> None:
        """This model may not be shared with the companion, or (None) may again. Unknown names are ignored."""
        if (model := self._models.get(name)) is not None:
            model.there.forbidden = why or ""

    def distrust(self, name: str, peer: str, why: str) -> None:
        """This model is not shared any more with the companion of this name, however often it connects (a sentence
        says why), until the model is known anew or calibrated anew. Unknown names are ignored."""
        if (model := self._models.get(name)) is not None:
            model.there.distrust(peer, why)

    def forbid_encoded(self, name: str, why: str | None) -> None:
        """Encoded inputs of this model may not travel to this companion, or (None) may again; as above."""
        if (model := self._models.get(name)) is not None:
            model.there.encoded_why_not = why or ""

    def codec_ready(self, name: str, codec: str) -> None:
        """The companion can read this codec's payloads of the model: it has the calibration. Unknown names are
        ignored."""
        if (model := self._models.get(name)) is not None:
            model.there.codecs_not_there.pop(codec, None)

    def codec_not_ready(self, name: str, codec: str, why: str) -> None:
        """The companion cannot read this codec's payloads of the model (a sentence says why); as above."""
        if (model := self._models.get(name)) is not None:
            model.there.codecs_not_there[codec] = why

    def codec_broken(self, name: str, codec: str, why: str) -> None:
        """This codec of the model was found to break the bound of fidelity (a sentence says how): it is not used again
        until the model is known anew or calibrated anew. As above."""
        if (model := self._models.get(name)) is not None:
            model.there.codecs_broken[codec] = why

    # -- learning -----------------------------------------------------------------------------------------------------

    def observe_ping(self, rtt_ms: float, now_s: float, *, padding_bytes: int = 0, pong_bytes: int = 0) -> None:
        """A ping came back; `padding_bytes`: the weight that it carried up, `pong_bytes`: that came down with its pong.
        One that was out during a silence says how long that was, not what the link is like: nothing is learned."""
        self._companion.observe_ping(rtt_ms, now_s, padding_bytes=padding_bytes, pong_bytes=pong_bytes)

    def observe_transfer(
        self, up_bytes: int, down_bytes: int, network_ms: float, now_s: float, *, up_bytes_max: int = 0
    ) -> None:
        """A request and its reply crossed the link; `network_ms` is without the companion's own time.

        `up_bytes`: its payload and what is known to have been before it; `up_bytes_max`: what may have been, where
        others were under way. What any number in between explains teaches nothing.
        """
        self._companion.observe_transfer(up_bytes, down_bytes, network_ms, now_s, up_bytes_max=up_bytes_max)

    def observe_window(self, window: SendWindow | None) -> None:
        """What the kernel says of TCP's window where payloads travel; None: nothing."""
        self._companion.observe_window(window)

    def observe_late(self, up_bytes: int, down_bytes: int, network_ms: float, now_s: float) -> None:
        """A request was given up: the link took at least `network_ms` for it and the reply that was to come, what the
        companion was expected to need taken off. Without it a link that became too slow to answer in time would never
        teach anything; without the reply's bytes, what they take would be put down to the round trip.

        While nothing at all is heard it was no slow link that kept it, but one that is away: when that is back, it is
        as it was. After two silences in a row without a reply between them it was the link."""
        self._companion.observe_late(up_bytes, down_bytes, network_ms, now_s)

    def observe_sent(self, name: str, facts: RequestFacts, plan: Plan, level: int | None, sent_bytes: int) -> bool:
        """A request's payload has so many bytes; `level`: its codec's setting (None: it has none, nothing is learned).
        Whether it has become another answer whether the live inputs fit the calibration (`misfit`)."""
        model = self._models.get(name)
        return model is not None and model.costs.observe_sent(facts, plan, level, sent_bytes)

    def misfit(self, name: str, codec: str) -> float | None:
        """What this codec sends over what its curve says, where that is far too much; None where it is not."""
        model = self._models.get(name)
        rate = None if model is None else model.costs.messages.rates.get(codec)
        return rate.ratio if rate is not None and rate.misfit else None

    def rates(self) -> dict[tuple[str, str], float]:
        """(Model, codec) → what it sends over what its curve says, of codecs with settings that have been used."""
        return {
            (name, codec): rate.ratio
            for name, model in self._models.items()
            for codec, rate in model.costs.messages.rates.items()
        }

    def observe_reply(self, digest: str, *, down_bytes: int, decode_ms: float) -> None:
        """A reply of `down_bytes` was decoded here in `decode_ms` (slowdown not in)."""
        for model in self._models.values():
            if model.costs.profile.digest == digest:
                model.costs.observe_reply(down_bytes=down_bytes, decode_ms=decode_ms)

    def observe_reply_bytes(self, name: str, facts: RequestFacts, plan: Plan, down_bytes: int) -> None:
        """The companion's reply to a request of this plan had so many bytes: how many the next one's will have, of any
        sizes and plan, is told in proportion."""
        if (model := self._models.get(name)) is not None:
            model.costs.observe_reply_bytes(facts, plan, down_bytes)

    def observe_cloud(
        self, name: str, plan: Plan, queue_ms: float | None, tail_ms: float | None, decode_ms: float | None = None
    ) -> None:
        """A reply told how long this plan's rest waited (None: for earlier parts of its own request) and computed at
        the companion, and what decoding its payload took (with codec `encoded` the picture; None: at sizes that tell
        nothing); it was observed as a transfer just before, which says when."""
        if queue_ms is not None:
            self._companion.observe_queue(queue_ms)
        if (model := self._models.get(name)) is not None:
            model.costs.observe_cloud(plan, tail_ms, decode_ms, self._companion.heard_at_s)

    def observe_edge(self, name: str, plan: Plan, stage: str, measured_ms: float) -> None:
        """A device stage took `measured_ms` (slowdown in).

        `stage`: head, whole (plan LOCAL), local_tail (the finish of a split on the device), image, encode.
        """
        if (model := self._models.get(name)) is not None:
            model.costs.observe_edge(plan, stage, measured_ms)

    def observe_sensors(self, *, throttled: bool | None, frequency_ratio: float | None) -> None:
        """What the device's sensors say now, as `Sensors` has it. None: not known here.

        A throttle that begins or ends, or another clock, means that the device's speed is another one: the next two
        runs teach it. (The temperature says nothing by itself: what is hot and not throttled runs as before.)
        """
        flipped = None not in (throttled, self._throttled) and throttled != self._throttled
        factor = self._clock_ratio / frequency_ratio if frequency_ratio and self._clock_ratio else 1.0
        self._throttled = throttled
        counts = flipped or abs(math.log(factor)) > CLOCK_CHANGE
        if frequency_ratio and (counts or self._clock_ratio is None):
            self._clock_ratio = frequency_ratio
        if counts:
            for model in self._models.values():
                model.costs.unsettle(factor)

    def observe_rest(self, name: str, plan: Plan, measured_ms: float) -> None:
        """A request that ran as this plan, and waited for no other, took so much longer than its stages (slowdown
        in)."""
        if (model := self._models.get(name)) is not None:
            model.costs.observe_rest(plan, measured_ms)

    def observe_total(self, name: str, plan: Plan, measured_ms: float, predicted_ms: float) -> None:
        """A request that ran as this plan took so long since it was decided."""
        if (model := self._models.get(name)) is not None:
            model.observe_total(plan, measured_ms, predicted_ms)

    # -- status -------------------------------------------------------------------------------------------------------

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """For `isthmus status`: the link, why there is no companion, and each model's drifts."""
        metered, models = self._companion.metered(), self._models.items()
        return {
            "link": self._companion.link_mapping(now_s),
            "remote_reason": self._companion.remote_reason,
            "models": {name: model.snapshot(self._companion.why_not(model, metered)) for name, model in models},
        }

    def known(self, name: str, now_s: float) -> Known | None:
        """What a record says of a model beside a request; None without `add_model`."""
        model = self._models.get(name)
        return None if model is None else model.known(self._companion.queue_ms(now_s))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _model(self, name: str) -> KnownModel:
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"the planner does not know model {name!r}; it is not ready")
        return model
