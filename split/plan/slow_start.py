"""Slow start: what a transfer takes longer than rtt + bytes · rate while TCP's window is smaller than the path.

A sender may have `window` bytes unacknowledged. While that is less than what the path holds (rate · rtt), it sends a
window, waits for the rest of the round trip, and sends twice as much (RFC 5681 §3.1). Window k of w·2ᵏ bytes leaves in
w·2ᵏ·up and is answered after one rtt, so that everything behind it waits rtt − w·2ᵏ·up longer than on an open window.
With 10 segments, 50 Mbit/s and 40 ms, 400 KB take 125 ms longer: 107 become 232 (measured: 234).

It begins with a connection and, where the kernel restarts windows, after silence: one halving for each retransmission
timeout without a byte, down to ten segments (RFC 2861, `tcp_slow_start_after_idle`; bbr never). Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from split.plan.observation import Floats, SlowStart

INITIAL_SEGMENTS: Final = 10
"""RFC 6928; Linux `TCP_INIT_CWND`, and what a restart does not go below."""
ROUNDS_MAX: Final = 24
"""10 segments doubled so often are 240 GB: no window is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendWindow:
    """TCP's window on the connection that carries payloads, as the kernel told it at `seen_at_s`."""

    window_bytes: float
    """May be unacknowledged (`snd_cwnd` · segment)."""
    threshold_bytes: float
    """From here on it grows slowly (`snd_ssthresh`), and so does the rate that is learned; inf: not yet met."""
    segment_bytes: float
    timeout_s: float
    """Retransmission timeout (RFC 6298)."""
    restarts: bool
    """Whether silence makes the window smaller."""
    sent_at_s: float
    """When data was last sent there."""

    def at(self, now_s: float) -> tuple[float, float]:
        """(window, threshold) in bytes for what is sent at `now_s` (Linux `tcp_cwnd_restart`)."""
        window, threshold = self.window_bytes, self.threshold_bytes
        silent_s = now_s - self.sent_at_s
        if not self.restarts or silent_s <= self.timeout_s or self.timeout_s <= 0.0:
            return window, threshold
        least = min(INITIAL_SEGMENTS * self.segment_bytes, window)
        halvings = min(math.ceil(silent_s / self.timeout_s) - 1, ROUNDS_MAX)
        return max(window / 2.0**halvings, least), max(threshold, 0.75 * window)


OPEN: Final = (math.inf, math.inf)
"""No window to wait for: nothing is known of one."""


def slow_start(
    window: tuple[float, float], rtt_ms: float, up_ms_per_byte: float, ratio: float = 1.0
) -> SlowStart | None:
    """The waits of a transfer that is sent into `window` (`SendWindow.at`), each `ratio` times as long as the model
    says; None where it never waits."""
    size, threshold = window
    wait_ms = rtt_ms - size * up_ms_per_byte
    if wait_ms <= 0.0 or size >= threshold or size <= 0.0:
        return None
    sent, total_ms = 0.0, 0.0
    after_bytes: list[float] = []
    extra_ms = [0.0]
    while wait_ms > 0.0 and size < threshold and len(after_bytes) < ROUNDS_MAX:
        sent += size
        total_ms += wait_ms
        after_bytes.append(sent)
        extra_ms.append(total_ms)
        size *= 2.0
        wait_ms = rtt_ms - size * up_ms_per_byte
    return SlowStart(after_bytes=np.array(after_bytes), extra_ms=ratio * np.array(extra_ms))


def slow_start_ms(up_bytes: Floats, state: SlowStart) -> Floats:
    """[plan] → [plan]: the extra ms of transfers of so many bytes; 0 for what fits into the first window."""
    extra: Floats = state.extra_ms[state.after_bytes.searchsorted(up_bytes)]
    return extra
