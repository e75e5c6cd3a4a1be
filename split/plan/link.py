"""The link, learned from what it really carried: network time = rtt + up_bytes · up + down_bytes · down, with its
uncertainty. A Kalman filter over (rtt, up, down); pings are transfers without bytes, probes are transfers like others;
what waited for TCP's window passed the round trip more than once (`slow_start.py`).

Not a speed test: one number too many transfers of different sizes tell rtt and rate apart. Sums of milliseconds and
bytes only; who sent what, over which transport, is not known here (one `Link` per transport).

One surprising transfer is a stall, two that agree are a change. What surprised is kept aside: if the next one fits what
was believed before, it was a stall and leaves no trace; if not, all that was kept aside is explained anew from before
the first surprise, by another rate, another round trip, or both, whichever makes it likeliest.
"""

from __future__ import annotations

import math
from typing import Final

from split.plan.belief import (
    FASTEST_MS_PER_BYTE,
    HARDLY_SHOWS_BYTES,
    LARGEST_BYTES,
    LONGEST_MS,
    Belief,
    Measured,
    Surprise,
)
from split.plan.change import AGREE_SIGMAS, explain, shows_down
from split.plan.estimate import ChangeDetector
from split.plan.observation import LinkEstimate, SlowStart
from split.plan.slow_start import OPEN, slow_start

_WINDOW_ROUNDS: Final = 3
"""So often a measurement is asked at most how often it waited; it ends when two answers agree."""


class Link:
    """Learns one link. Before the first observation it is probably usable and very uncertain."""

    PRIOR_RTT_MS: Final = 50.0
    PRIOR_RTT_SIGMA_MS: Final = 100.0
    PRIOR_MS_PER_BYTE: Final = 0.008 / 20.0
    """20 Mbit/s, between a bad mobile link and a LAN."""
    PRIOR_MS_PER_BYTE_SIGMA: Final = 0.008 / 5.0
    SAME_BOTH_WAYS: Final = 0.9
    """Correlation of the two rates before they are known: replies are small, so that up must inform down."""

    AS_UP_RATIO: Final = 0.5
    """Until something of weight has come down, a byte is told to take as long as up, give or take so much of it. The
    first reply is learned from with the wide prior all the same; but told so, a megabyte's reply would seem too risky
    on any link, and what is not used is never learned."""

    DOWN_SHOWS_MS: Final = 3.0
    DOWN_SHOWS_RATIO: Final = 0.1
    """A reply of such weight, at the rate up, and as a share of what went up. What is less cannot be told from jitter:
    on a link with stalls 4 KB would pass for what comes down ten times more slowly than its request went up, and once
    that link is another one, for as slow there."""

    JITTER_MS: Final = 0.5
    JITTER_RATIO: Final = 0.04
    """Scatter of one transfer, relative to its time: 20 × 400 KB through the lab link scatter by 1–4 %."""
    SCATTER_GAIN: Final = 0.05
    SCATTER_MAX: Final = 100.0
    SCATTER_CLIP: Final = 2.0
    """The link's own jitter, as a factor on the variance above: learned from how surprising its transfers are. A stall
    counts no more than a surprise of two sigmas, or a link with stalls would pass for one that knows no rate."""
    WALK_RTT: Final = 0.05
    WALK_RATE: Final = 0.08
    """Relative change per square root of a second: after a minute of silence 40 % and 60 %."""
    WALK_GAIN: Final = 0.1
    WALK_MAX: Final = 16.0
    """The link's own wandering, as a factor on that variance: surprises in one direction after another ask for more,
    surprises that alternate for less (Mehra 1970: a filter is right when its innovations are white)."""

    DOUBTED_MAX: Final = 4
    """So many surprises are believed, whether they agree or not."""
    SETTLING_MAX: Final = 6
    """Measurements, those of the change included, after which it counts as understood."""
    JOINS_SIGMAS: Final = 1.5
    """After one surprise so much is another."""
    SLOW_START_NOISE: Final = 0.15
    """How wrong the model of a wait for the window may be, relative to it."""
    SLOW_START_GAIN: Final = 0.3
    SLOW_START_RATIO_MAX: Final = 1.5
    SLOW_START_KNOWN: Final = 0.25
    """What a wait takes is learned where the rest is known better than this share of it."""

    __slots__ = (
        "_belief",
        "_beside",
        "_detector",
        "_doubted",
        "_doubted_sigmas",
        "_down_seen",
        "_down_shown",
        "_last_sigmas",
        "_one_way",
        "_scatter",
        "_seen_at_s",
        "_settling",
        "_slow_start_ratio",
        "_waits_known",
        "_waits_of",
        "_walk",
        "changes",
        "observations",
    )

    def __init__(self) -> None:
        rr = self.PRIOR_RTT_SIGMA_MS**2
        ss = self.PRIOR_MS_PER_BYTE_SIGMA**2
        rate = self.PRIOR_MS_PER_BYTE
        self._belief = Belief(self.PRIOR_RTT_MS, rate, rate, (rr, 0.0, 0.0, ss, self.SAME_BOTH_WAYS * ss, ss))
        self._scatter = self._walk = 1.0
        self._last_sigmas = 0.0
        self._down_seen = False
        self._down_shown = False
        """A reply had weight."""
        self._slow_start_ratio = 1.0
        self._waits_of: tuple[tuple[float, float], float, float, float] | None = None
        self._waits_known: SlowStart | None = None
        self._detector = ChangeDetector()
        self._doubted: list[Measured] = []
        """Surprises of which nothing was learned so far."""
        self._settling: list[Measured] = []
        """What the last change was explained by, and what fitted since; empty once it has held long enough."""
        self._doubted_sigmas = 0.0
        """The last of them."""
        self._one_way = False
        """The last two of them spoke for a slower link, or for a faster one."""
        self._beside: list[Measured] = []
        """What came with them, fits, and says little about what they say; of two the one that weighs more both ways."""
        self._seen_at_s = -math.inf
        self.observations = 0
        self.changes = 0
        """Times that it was found to have become another link."""

    @property
    def surprised(self) -> bool:
        """The last observations did not fit; the next one tells a stall from a change."""
        return bool(self._doubted) or self._detector.surprised

    def estimate(self, now_s: float, window: tuple[float, float] = OPEN) -> LinkEstimate:
        """What is known at `now_s`: its covariance is that of the next transfer (not knowing the link, grown since the
        last observation, and the link's own jitter). `window`: TCP's, `SendWindow.at`."""
        belief = self._grown(now_s)
        if self.observations and not self._down_seen:
            belief = self._as_up(belief)
        r, u, d, (rr, ru, rd, uu, ud, dd) = belief
        # (ratio · (r + bytes · u + bytes · d))², expanded.
        jitter = self._scatter * self.JITTER_RATIO**2
        rr += self._scatter * self.JITTER_MS**2 + jitter * r * r
        return LinkEstimate(
            rtt_ms=r,
            up_ms_per_byte=u,
            down_ms_per_byte=d,
            covariance=(
                rr,
                ru + jitter * r * u,
                rd + jitter * r * d,
                uu + jitter * u * u,
                ud + jitter * u * d,
                dd + jitter * d * d,
            ),
            age_s=max(now_s - self._seen_at_s, 0.0),
            slow_start=self._waits(window, r, u),
        )

    def observe(
        self,
        up_bytes: float,
        down_bytes: float,
        network_ms: float,
        now_s: float,
        window: tuple[float, float] = OPEN,
        *,
        at_least: bool = False,
    ) -> None:
        """One exchange: `up_bytes` went, `down_bytes` came back, the network took `network_ms` of it.

        `network_ms` is the time from send to reply less all that the companion says it spent itself; `window`: TCP's
        when it was sent; `at_least`: it was given up then. What no link can have done is none: nothing is learned of
        it. Nor does time go back.
        """
        if not (0.0 <= up_bytes <= LARGEST_BYTES and 0.0 <= down_bytes <= LARGEST_BYTES and network_ms <= LONGEST_MS):
            return
        now_s = max(now_s, self._seen_at_s)
        network_ms = max(
            network_ms, (up_bytes + down_bytes) * FASTEST_MS_PER_BYTE
        )  # the companion's share told wrongly
        belief = self._grown(now_s)
        measured = self._measured(belief, up_bytes, down_bytes, network_ms, window)._replace(at_least=at_least)
        noise = self._noise(belief, measured)
        surprise = belief.surprise(measured, noise)
        sigmas, doubts = surprise.sigmas, self._doubted
        if self.observations < 2:
            # The first two observations meet the prior, not the link: surprise about it is no change of the link.
            belief = belief.updated(measured, noise, surprise.ms)
            self._settling.append(measured)
        elif measured.rounds > 1.0 and sigmas < -ChangeDetector.CLIP:
            pass  # the window was wider than was said: nothing is learned but that
        elif abs(sigmas) > ChangeDetector.CLIP or (doubts and self._agrees(sigmas)):
            self._one_way = sigmas * self._doubted_sigmas > 0.0 and bool(doubts)
            doubts.append(measured)
            self._doubted_sigmas = sigmas
            belief = self._explained(belief)
        elif doubts and self._says_little(belief, measured, surprise):
            self._put_beside(measured)
            belief = belief.updated(measured, noise, surprise.ms)
        else:
            self._forget_doubts()  # it was a stall
            self._settle(measured)
            if self._detector.changed(sigmas):
                belief = _widened(belief, measured)
            elif measured.size > HARDLY_SHOWS_BYTES:
                self._learn_noise(sigmas)
            belief = belief.updated(measured, noise, surprise.ms)
        if window[0] < up_bytes:
            self._learn_slow_start(belief, up_bytes, down_bytes, measured.ms, window)
        self._down_seen = self._down_seen or down_bytes > HARDLY_SHOWS_BYTES
        weighs = down_bytes * belief.up > self.DOWN_SHOWS_MS and down_bytes > self.DOWN_SHOWS_RATIO * up_bytes
        self._down_shown = self._down_shown or weighs
        self._belief = belief
        self._seen_at_s = now_s
        self.observations += 1

    def _waits(self, window: tuple[float, float], rtt_ms: float, up_ms_per_byte: float) -> SlowStart | None:
        """As `slow_start`, worked out when the link or the window is another one (3 µs of each decision otherwise)."""
        asked = window, rtt_ms, up_ms_per_byte, self._slow_start_ratio
        if asked != self._waits_of:
            self._waits_of, self._waits_known = asked, slow_start(*asked)
        return self._waits_known

    def _as_up(self, belief: Belief) -> Belief:
        """down = up · (1 ± AS_UP_RATIO), independent of all that is known."""
        rr, ru, _, uu, _, _ = belief.covariance
        asymmetry = self.AS_UP_RATIO * belief.up
        return belief._replace(down=belief.up, covariance=(rr, ru, ru, uu, uu, uu + asymmetry * asymmetry))

    def _measured(
        self, belief: Belief, up_bytes: float, down_bytes: float, ms: float, window: tuple[float, float]
    ) -> Measured:
        """What waited for the window n times before it had sent `bytes` took (1 + n) · rtt + (up_bytes − bytes) · up.

        How often depends on the rate that is to be learned: asked again with what this measurement makes of it.
        """
        measured = Measured(1.0, up_bytes, down_bytes, ms)
        if window[0] >= up_bytes:
            return measured
        seen = belief
        for _ in range(_WINDOW_ROUNDS):
            waits = slow_start(window, seen.rtt, seen.up, self._slow_start_ratio)
            count, waited_bytes = waits.waits(up_bytes) if waits is not None else (0, 0.0)
            ratio = self._slow_start_ratio
            left_bytes = max(up_bytes - ratio * waited_bytes, 0.0)  # of waits longer than the model's (ratio > 1)
            again = Measured(1.0 + ratio * count, left_bytes, down_bytes, ms)
            if again == measured:
                break
            measured = again
            noise = self._noise(belief, measured)
            seen = belief.updated(measured, noise, belief.surprise(measured, noise).ms)
        return measured

    def _noise(self, belief: Belief, measured: Measured) -> float:
        """Variance of one measurement, ms²: the link's jitter, and how well a wait for the window is known."""
        jitter_ms = self.JITTER_MS + self.JITTER_RATIO * max(min(belief.expected_ms(measured), measured.ms), 0.0)
        waits_ms = self.SLOW_START_NOISE * (measured.rounds - 1.0) * belief.rtt
        return self._scatter * jitter_ms * jitter_ms + waits_ms * waits_ms

    def _learn_slow_start(
        self, belief: Belief, up_bytes: float, down_bytes: float, ms: float, window: tuple[float, float]
    ) -> None:
        """What such waits take on this link as a multiple of the model, where the rest of the time is well known."""
        waits_ms = waits.ms(up_bytes) if (waits := slow_start(window, belief.rtt, belief.up)) is not None else 0.0
        plain = Measured(1.0, up_bytes, down_bytes, ms)
        rest = belief.surprise(plain, self._noise(belief, plain))
        if math.sqrt(rest.variance) < self.SLOW_START_KNOWN * waits_ms:
            seen = min(max(rest.ms / waits_ms, 0.0), self.SLOW_START_RATIO_MAX)
            self._slow_start_ratio += self.SLOW_START_GAIN * (seen - self._slow_start_ratio)

    def _learn_noise(self, sigmas: float) -> None:
        clipped = min(max(sigmas, -self.SCATTER_CLIP), self.SCATTER_CLIP)
        scatter = self._scatter * (1.0 + self.SCATTER_GAIN * (clipped * clipped - 1.0))
        self._scatter = min(max(scatter, 1.0), self.SCATTER_MAX)
        walk = self._walk * (1.0 + self.WALK_GAIN * min(max(clipped * self._last_sigmas, -1.0), 2.0))
        self._walk = min(max(walk, 1.0), self.WALK_MAX)
        self._last_sigmas = clipped

    def _forget_doubts(self) -> None:
        self._doubted.clear()
        self._beside.clear()

    def _put_beside(self, measured: Measured) -> None:
        lighter = [
            one for one in self._beside if measured.up_bytes >= one.up_bytes and measured.down_bytes >= one.down_bytes
        ]
        self._beside = [one for one in self._beside if one not in lighter] + [measured]

    def _settle(self, measured: Measured) -> None:
        """One more that fits what a change was explained by; after a few the explanation has held."""
        if self._settling:
            self._settling.append(measured)
            if len(self._settling) > self.SETTLING_MAX:
                self._settling.clear()

    def _agrees(self, sigmas: float) -> bool:
        """Whether this one, which is not surprising by itself, speaks for what the last surprise spoke for."""
        return sigmas * self._doubted_sigmas > 0.0 and abs(sigmas) > self.JOINS_SIGMAS

    def _says_little(self, belief: Belief, measured: Measured, surprise: Surprise) -> bool:
        """Whether this one, which fits what was believed, would also fit what the doubted ones speak for: a ping knows
        nothing of the rate, a large transfer on a slow link little of the round trip, and what went up nothing of the
        way down, where that may be what they speak for; unless another one has fitted that knows it."""
        fits = [measured, *self._beside]
        up_bytes, down_bytes = max(one.up_bytes for one in fits), max(one.down_bytes for one in fits)
        other_ms = max(
            abs(one.ms - belief.expected_ms(one)) * _share_seen(one, measured, up_bytes, down_bytes)
            for one in self._doubted
        )
        return other_ms < ChangeDetector.CLIP * math.sqrt(surprise.variance)

    def _explained(self, belief: Belief) -> Belief:
        """What is believed once all that was doubted is; as before while one surprise stands alone, or a few have
        nothing in common. Many that have not: so noisy the link is."""
        doubts = self._doubted
        before = belief if self._down_shown else belief._replace(down=belief.up)
        if self._settling:
            # Two changes so soon are less likely than that the first was explained wrongly.
            found = explain(before, self._with_sigmas([*self._settling, *doubts]))
            if found.holds:
                return self._changed(found.belief, [*self._settling, *doubts])
        if len(doubts) < 2:
            return belief
        evidence = [*doubts, *self._beside]
        found = explain(before, self._with_sigmas(evidence))
        if not found.holds and self._one_way:
            if found.worst > AGREE_SIGMAS:
                # A change that began with a stall, which is likelier than two stalls: the last is the better guess.
                evidence = doubts[-1:]
                found = explain(before, self._with_sigmas(evidence))
        elif not found.holds:
            if len(doubts) < self.DOUBTED_MAX:
                return belief
            scatter = self._scatter * (found.worst / AGREE_SIGMAS) ** 2
            self._scatter = min(max(scatter, self._scatter), self.SCATTER_MAX)
            found = explain(before, self._with_sigmas(evidence))
        return self._changed(found.belief, evidence)

    def _changed(self, belief: Belief, evidence: list[Measured]) -> Belief:
        self.changes += 1
        self._settling = evidence[-self.SETTLING_MAX + 1 :]
        self._forget_doubts()
        self._detector = ChangeDetector()
        return belief

    def _with_sigmas(self, evidence: list[Measured]) -> list[tuple[Measured, float]]:
        jitter = math.sqrt(self._scatter)
        return [(one, jitter * (self.JITTER_RATIO + self.JITTER_MS / max(one.ms, 0.1))) for one in evidence]

    def _grown(self, now_s: float) -> Belief:
        if not self.observations:
            return self._belief
        rtt, up, down, (rr, ru, rd, uu, ud, dd) = self._belief
        seconds = min(max(now_s - self._seen_at_s, 0.0), 3600.0) * self._walk
        rr += seconds * (self.WALK_RTT * rtt + 0.1) ** 2
        # Both directions wander together (the same radio, the same queue), hence ud grows with them.
        walked = seconds * self.WALK_RATE**2
        uu += walked * up * up
        dd += walked * down * down
        ud += walked * self.SAME_BOTH_WAYS * up * down
        return Belief(rtt, up, down, (rr, ru, rd, uu, ud, dd))


def _share_seen(doubted: Measured, measured: Measured, up_bytes: float, down_bytes: float) -> float:
    """How much of what a doubted one speaks for `measured` would show, at least, if its bytes are what took so long:
    those of one direction alone where they tell it from the other. `up_bytes`, `down_bytes`: the most that fitted."""
    share = min(measured.size / max(doubted.size, 1.0), 1.0)
    if shows_down(doubted):
        share = min(share, down_bytes / doubted.down_bytes)
        if doubted.up_bytes > HARDLY_SHOWS_BYTES:
            share = min(share, up_bytes / doubted.up_bytes)
    return share


def _widened(belief: Belief, measured: Measured) -> Belief:
    """After many small surprises in one direction: as uncertain as the last one is large.

    On a large transfer it is mostly put down to the rate (rtt gets half the surprise as sigma, the rate all of it), on
    a ping to the rtt. The next ping or transfer of another size sets the rest right.
    """
    ms, size = abs(measured.ms - belief.expected_ms(measured)), measured.size
    rtt, up = (0.5 * ms, ms / size) if size > HARDLY_SHOWS_BYTES else (ms, 0.0)
    rr, _, _, uu, _, dd = belief.covariance
    rr, uu, dd = max(rr, rtt * rtt), max(uu, up * up), max(dd, up * up)
    return belief._replace(covariance=(rr, 0.0, 0.0, uu, Link.SAME_BOTH_WAYS * math.sqrt(uu * dd), dd))
