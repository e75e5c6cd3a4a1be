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
    WALK_RTT: Final = 0.05
    WALK_RATE: Final = 0.08
    """Relative change per square root of a second: after a minute of silence 40 % and 60 %."""

    FASTEST_MS_PER_BYTE: Final = 0.008 / 40_000.0
    """40 Gbit/s: above any link; keeps the estimate positive."""

    __slots__ = ("_covariance", "_detector", "_down", "_rtt", "_seen_at_s", "_up", "observations")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: another network, another companion."""
        rr = self.PRIOR_RTT_SIGMA_MS**2
        ss = self.PRIOR_MS_PER_BYTE_SIGMA**2
        self._rtt = self.PRIOR_RTT_MS
        self._up = self._down = self.PRIOR_MS_PER_BYTE
        self._covariance: _Covariance = (rr, 0.0, 0.0, ss, self.SAME_BOTH_WAYS * ss, ss)
        self._detector = ChangeDetector()
        self._seen_at_s = -math.inf
        self.observations = 0

    def estimate(self, now_s: float) -> LinkEstimate:
        """What is known at `now_s`; the uncertainty has grown since the last observation."""
        return LinkEstimate(
            rtt_ms=self._rtt,
            up_ms_per_byte=self._up,
            down_ms_per_byte=self._down,
            covariance=self._grown(now_s),
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
        noise = self.JITTER_MS + self.JITTER_RATIO * max(min(expected, network_ms), 0.0)
        pr, pu, pd, total = _gains(covariance, u, d, noise * noise)
        # The first two observations meet the prior, not the link: surprise about it is no change of the link.
        settled = self.observations >= 2
        if settled and self._detector.changed(innovation / math.sqrt(total)):
            covariance = self._widened(covariance, innovation, u + d)
            pr, pu, pd, total = _gains(covariance, u, d, noise * noise)
        elif settled:
            limit = ChangeDetector.CLIP * math.sqrt(total)
            innovation = min(max(innovation, -limit), limit)
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

        A change seen on a large transfer is mostly put down to the rate (rtt gets half the surprise as sigma, rate all
        of it), one seen on a ping to the rtt; the next ping or transfer of another size sets the rest right.
        """
        rr, _, _, uu, _, dd = covariance
        rr = max(rr, (0.5 * innovation) ** 2 if size > 2048 else innovation**2)
        per_byte = (innovation / size) ** 2 if size > 2048 else 0.0
        uu, dd = max(uu, per_byte), max(dd, per_byte)
        return rr, 0.0, 0.0, uu, self.SAME_BOTH_WAYS * math.sqrt(uu * dd), dd


def _gains(covariance: _Covariance, u: float, d: float, noise: float) -> tuple[float, float, float, float]:
    """P·h and h·P·h + noise for h = (1, u, d)."""
    rr, ru, rd, uu, ud, dd = covariance
    pr = rr + u * ru + d * rd
    pu = ru + u * uu + d * ud
    pd = rd + u * ud + d * dd
    return pr, pu, pd, pr + u * pu + d * pd + noise
