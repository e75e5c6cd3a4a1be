"""The link, learned from what it really carried: network time = rtt + up_bytes · up + down_bytes · down, with its
uncertainty. A Kalman filter over (rtt, up, down); pings are transfers without bytes, probes are transfers like others.

Not a speed test: one number too many transfers of different sizes tell rtt and rate apart. Sums of milliseconds and
bytes only; who sent what, over which transport, is not known here (one `Link` per transport).
"""

from __future__ import annotations

import math
from typing import Final

from split.plan.estimate import ChangeDetector
from split.plan.observation import LinkEstimate

_PING_LIKE_BYTES: Final = 2048
"""Up to here the rate hardly shows: 1.6 ms at 10 Mbit/s."""
_Covariance = tuple[float, float, float, float, float, float]


class Link:
    """Learns one link. Before the first observation it is probably usable and very uncertain."""

    PRIOR_RTT_MS: Final = 50.0
    PRIOR_RTT_SIGMA_MS: Final = 100.0
    PRIOR_MS_PER_BYTE: Final = 0.008 / 20.0
    """20 Mbit/s, between a bad mobile link and a LAN."""
    PRIOR_MS_PER_BYTE_SIGMA: Final = 0.008 / 5.0
    SAME_BOTH_WAYS: Final = 0.9
    """Correlation of the two rates before they are known: replies are small, so that up must inform down."""

    JITTER_MS: Final = 0.5
    JITTER_RATIO: Final = 0.04
    """Scatter of one transfer, relative to its time: 20 × 400 KB through the lab link scatter by 1–4 %."""
    SCATTER_GAIN: Final = 0.05
    SCATTER_MAX: Final = 100.0
    """The link's own jitter, as a factor on the variance above: learned from how surprising its transfers are."""
    WALK_RTT: Final = 0.05
    WALK_RATE: Final = 0.08
    """Relative change per square root of a second: after a minute of silence 40 % and 60 %."""

    FASTEST_MS_PER_BYTE: Final = 0.008 / 40_000.0
    """40 Gbit/s: above any link; keeps the estimate positive."""

    __slots__ = ("_covariance", "_detector", "_down", "_rtt", "_scatter", "_seen_at_s", "_up", "observations")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: another network, another companion."""
        rr = self.PRIOR_RTT_SIGMA_MS**2
        ss = self.PRIOR_MS_PER_BYTE_SIGMA**2
        self._rtt = self.PRIOR_RTT_MS
        self._up = self._down = self.PRIOR_MS_PER_BYTE
        self._covariance: _Covariance = (rr, 0.0, 0.0, ss, self.SAME_BOTH_WAYS * ss, ss)
        self._scatter = 1.0
        self._detector = ChangeDetector()
        self._seen_at_s = -math.inf
        self.observations = 0

    @property
    def surprised(self) -> bool:
        """The last observations did not fit; the next one tells a stall from a change."""
        return self._detector.surprised

    def estimate(self, now_s: float) -> LinkEstimate:
        """What is known at `now_s`: its covariance is that of the next transfer (not knowing the link, grown since the
        last observation, and the link's own jitter)."""
        rr, ru, rd, uu, ud, dd = self._grown(now_s)
        r, u, d = self._rtt, self._up, self._down
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
        )

    def observe(self, up_bytes: float, down_bytes: float, network_ms: float, now_s: float) -> None:
        """One exchange: `up_bytes` went, `down_bytes` came back, the network took `network_ms` of it.

        `network_ms` is the time from send to reply less all that the companion says it spent itself.
        """
        u, d = up_bytes, down_bytes
        covariance = self._grown(now_s)
        expected = self._rtt + u * self._up + d * self._down
        innovation = max(network_ms, 0.0) - expected
        jitter_ms = self.JITTER_MS + self.JITTER_RATIO * max(min(expected, network_ms), 0.0)
        noise = self._scatter * jitter_ms * jitter_ms
        pr, pu, pd, total = _gains(covariance, u, d, noise)
        # The first two observations meet the prior, not the link: surprise about it is no change of the link.
        if self.observations >= 2:
            normalised = innovation / math.sqrt(total)
            if self._detector.changed(normalised):
                covariance = self._widened(covariance, innovation, u + d)
                pr, pu, pd, total = _gains(covariance, u, d, noise)
            else:
                clipped = min(max(normalised, -ChangeDetector.CLIP), ChangeDetector.CLIP)
                innovation = clipped * math.sqrt(total)
                grown = self._scatter * (1.0 + self.SCATTER_GAIN * (clipped * clipped - 1.0))
                self._scatter = min(max(grown, 1.0), self.SCATTER_MAX)
        step = innovation / total
        self._rtt = max(self._rtt + pr * step, 0.01)
        self._up = max(self._up + pu * step, self.FASTEST_MS_PER_BYTE)
        self._down = max(self._down + pd * step, self.FASTEST_MS_PER_BYTE)
        rr, ru, rd, uu, ud, dd = covariance
        self._covariance = (
            rr - pr * pr / total,
            ru - pr * pu / total,
            rd - pr * pd / total,
            uu - pu * pu / total,
            ud - pu * pd / total,
            dd - pd * pd / total,
        )
        self._seen_at_s = now_s
        self.observations += 1

    def _grown(self, now_s: float) -> _Covariance:
        if not self.observations:
            return self._covariance
        seconds = min(max(now_s - self._seen_at_s, 0.0), 3600.0)
        rr, ru, rd, uu, ud, dd = self._covariance
        rr += seconds * (self.WALK_RTT * self._rtt + 0.1) ** 2
        # Both directions wander together (the same radio, the same queue), hence ud grows with them.
        uu += seconds * (self.WALK_RATE * self._up) ** 2
        dd += seconds * (self.WALK_RATE * self._down) ** 2
        ud += seconds * self.SAME_BOTH_WAYS * self.WALK_RATE**2 * self._up * self._down
        return rr, ru, rd, uu, ud, dd

    def _widened(self, covariance: _Covariance, innovation: float, size: float) -> _Covariance:
        """After a change: as uncertain as the surprise is large.

        Slower than expected on a large transfer is mostly put down to the rate (rtt gets half the surprise as sigma,
        the rate all of it), on a ping to the rtt. Faster than expected: neither can have fallen by more than itself.
        The next ping or transfer of another size sets the rest right.
        """
        rr, _, _, uu, _, dd = covariance
        surprise = abs(innovation)
        rtt, up = (0.5 * surprise, surprise / size) if size > _PING_LIKE_BYTES else (surprise, 0.0)
        down = up
        if innovation < 0.0:
            rtt, up, down = min(surprise, self._rtt), min(up, self._up), min(down, self._down)
        rr, uu, dd = max(rr, rtt * rtt), max(uu, up * up), max(dd, down * down)
        return rr, 0.0, 0.0, uu, self.SAME_BOTH_WAYS * math.sqrt(uu * dd), dd


def _gains(covariance: _Covariance, u: float, d: float, noise: float) -> tuple[float, float, float, float]:
    """P·h and h·P·h + noise for h = (1, u, d)."""
    rr, ru, rd, uu, ud, dd = covariance
    pr = rr + u * ru + d * rd
    pu = ru + u * uu + d * ud
    pd = rd + u * ud + d * dd
    return pr, pu, pd, pr + u * pu + d * pd + noise
