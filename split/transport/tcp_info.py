"""What the Linux kernel knows of a TCP connection: `getsockopt(TCP_INFO)`, taken apart. One system call, 1 µs.

The layout is `struct tcp_info` of include/uapi/linux/tcp.h, which only ever grows at its end: an older kernel returns
less, and what it does not return reads as 0 here. No TLS, no frames, no asyncio.
"""

from __future__ import annotations

import math
import socket
import struct
from dataclasses import dataclass
from typing import Final

_LAYOUT: Final = struct.Struct("=6BBB24I4Q6I4Q2I2Q")
"""Up to `tcpi_bytes_retrans` (Linux 4.19)."""
assert _LAYOUT.size == 216

_NO_PACE: Final = 0xFFFFFFFFFFFFFFFF
"""`~0UL` of `sk_pacing_rate`."""
_NO_THRESHOLD: Final = 0x7FFFFFFF
"""`TCP_INFINITE_SSTHRESH`."""

IPV4_HEADERS: Final = 20 + 20 + 12
"""Bytes of IP and TCP with time stamps, which every segment of a connection carries when both ends offer them."""
IPV6_HEADERS: Final = 40 + 20 + 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpInfo:
    """The fields that somebody here reads, in our units."""

    rtt_ms: float
    """Smoothed (RFC 6298); 0 before the first acknowledgement."""
    rtt_var_ms: float
    min_rtt_ms: float
    timeout_ms: float
    """Retransmission timeout (RFC 6298)."""
    silent_ms: int
    """Since data was last sent."""
    delivery_rate_bytes_per_s: float
    """Payload acknowledged per second over the latest round trip, or the highest before it while this side has less to
    send than the link takes (draft-cheng-iccrg-delivery-rate-estimation); 0 before the first."""
    app_limited: bool
    """The rate is what was sent, not what the link takes."""
    pacing_rate_bytes_per_s: float
    """The kernel sends no faster; inf: it does not hold back, 0: it does not tell."""
    cwnd_bytes: int
    threshold_bytes: int | None
    """Slow start ends here (RFC 5681); None: nothing has ended it yet."""
    segment_bytes: int
    unacked_bytes: int
    """Sent and not acknowledged, in whole segments."""
    unsent_bytes: int
    """In the kernel and not yet sent once."""
    acked_bytes: int
    sent_bytes: int
    """Payload, what was sent twice counted twice."""
    received_bytes: int
    retransmits: int
    """Segments sent again since the beginning."""
    segments_out: int
    segments_in: int
    timeouts: int
    """Times in a row that the retransmission timer ran out; an acknowledgement ends the row."""

    @property
    def waiting_bytes(self) -> int:
        """What must still leave before the next byte that is written: unsent here, and what more is on its way than the
        path holds (rate × least round trip), which then lies in the queue of the narrowest router."""
        path_bytes = self.delivery_rate_bytes_per_s * self.min_rtt_ms / 1000
        return self.unsent_bytes + (max(0, round(self.unacked_bytes - path_bytes)) if path_bytes else 0)


def read_tcp_info(sock: socket.socket) -> TcpInfo | None:
    """What the kernel says of this connection; None when the socket is closed or is no TCP socket."""
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAYOUT.size)
    except OSError:
        return None
    return parse_tcp_info(raw)


def parse_tcp_info(raw: bytes) -> TcpInfo:
    """`raw` as `getsockopt` returned it, of any length."""
    fields = _LAYOUT.unpack(raw[: _LAYOUT.size].ljust(_LAYOUT.size, b"\0"))
    flags, words = fields[7], fields[8:32]
    rto_us, snd_mss, unacked, silent_ms = words[0], words[2], words[4], words[9]
    rtt_us, rtt_var_us, snd_ssthresh, snd_cwnd = words[15:19]
    pacing_rate = fields[32]
    acked, received = fields[34:36]
    segments_out, segments_in, unsent, min_rtt_us = fields[36:40]
    delivery_rate = fields[42]
    sent = fields[48]
    return TcpInfo(
        rtt_ms=rtt_us / 1000,
        rtt_var_ms=rtt_var_us / 1000,
        min_rtt_ms=0.0 if min_rtt_us == 0xFFFFFFFF else min_rtt_us / 1000,
        timeout_ms=rto_us / 1000,
        silent_ms=silent_ms,
        delivery_rate_bytes_per_s=float(delivery_rate),
        app_limited=bool(flags & 1),
        pacing_rate_bytes_per_s=math.inf if pacing_rate == _NO_PACE else float(pacing_rate),
        cwnd_bytes=snd_cwnd * snd_mss,
        threshold_bytes=None if snd_ssthresh >= _NO_THRESHOLD else snd_ssthresh * snd_mss,
        segment_bytes=snd_mss,
        unacked_bytes=unacked * snd_mss,
        unsent_bytes=unsent,
        acked_bytes=acked,
        sent_bytes=sent or acked,
        received_bytes=received,
        retransmits=words[23],
        segments_out=segments_out,
        segments_in=segments_in,
        timeouts=fields[2],
    )
