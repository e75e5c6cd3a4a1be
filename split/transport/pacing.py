"""Letting the kernel forget how fast it used to send, where a probe is to show what the link takes now.

bbr sends no faster than it found the path to be, and finds out only from bulk: by a quarter more in every eighth round
trip. What is sent now and then never shows it that a path has become faster, since it counts what little was there to
be sent. So the ping that asks for a rate is spread over as long as the old rate would take, answers with that rate, and
on a link that went from 10 to 50 Mbit/s a model stays on the device for good. Taken up afresh, bbr begins as on a new
connection, from the window and the round trip that it has (Linux `bbr_init_pacing_rate_from_rtt`).
"""

from __future__ import annotations

import socket
from typing import Final, Protocol

from split.transport.tcp_info import TcpInfo

STARTUP_GAIN: Final = 2.885
"""bbr's pace in its first phase, times window / round trip: 2 / ln 2 (Cardwell et al. 2016, BBR, ACM Queue 14(5))."""
WORTH: Final = 1.5
"""It is done where the pace becomes so many times what it is: not again and again."""
STALE_RTT: Final = 2.2
"""Nor where the path is so many times longer than the shortest round trip that the kernel remembers, which is of the
last five minutes (`tcp_min_rtt_wlen`). bbr would take that for the path and have twice it under way at most, for ten
seconds: a path longer than that would never be full, and be found slower each time that it is measured."""
BESIDE: Final = "reno"
"""Every Linux has it and every user may use it. To name the one in use would change nothing."""
PROBING_SEGMENTS: Final = 4
"""bbr sends with no more for 0.2 s of every 10 s, to see the round trip without its own queue; then as before."""


class TcpSocket(Protocol):
    """As of `socket.socket`."""

    def setsockopt(self, level: int, name: int, value: bytes, /) -> None: ...


def is_worth_it(info: TcpInfo, rtt_ms: float) -> bool:
    """Whether a connection that has nothing under way would send so much faster were its congestion control a new one.
    `rtt_ms`: of the path, as known now (the kernel's own is an average that lags behind)."""
    idle = info.unacked_bytes == info.unsent_bytes == 0 and info.cwnd_bytes > PROBING_SEGMENTS * info.segment_bytes
    if not idle or info.rtt_ms <= 0.0 or info.pacing_rate_bytes_per_s <= 0.0:
        return False
    if rtt_ms > STALE_RTT * info.min_rtt_ms:
        return False
    afresh_bytes_per_s = STARTUP_GAIN * info.cwnd_bytes / (info.rtt_ms / 1000.0)
    return afresh_bytes_per_s > WORTH * info.pacing_rate_bytes_per_s


def begin_afresh(sock: TcpSocket, congestion_control: str) -> None:
    """Have the kernel take up this bbr as for a new connection, in the middle of the one that there is. OSError where
    the kernel takes it away from users meanwhile: then it is `BESIDE`."""
    for name in (BESIDE, congestion_control):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
