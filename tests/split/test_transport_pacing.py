"""When a connection is taken up afresh so that a probe shows what the link takes, and what the kernel makes of it."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from split.transport.pacing import begin_afresh, is_worth_it
from split.transport.tcp_info import TcpInfo, parse_tcp_info, read_tcp_info

SEGMENT = 1_448

SETTLED = replace(
    parse_tcp_info(b""),
    rtt_ms=20.0,
    min_rtt_ms=20.0,
    segment_bytes=SEGMENT,
    cwnd_bytes=35 * SEGMENT,
    pacing_rate_bytes_per_s=1_250_000.0,
)
"""bbr on a link of 10 Mbit/s that is 20 ms long: twice the path of 25 kB under way, as fast as the link. Begun afresh
it would send 2.885 · 50.7 kB in 20 ms: 58 Mbit/s."""


@pytest.mark.parametrize(
    ("info", "rtt_ms", "worth"),
    [
        (SETTLED, 20.0, True),
        (replace(SETTLED, pacing_rate_bytes_per_s=4_800_000.0), 20.0, True),  # 7.31 MB/s are 1.52 times that
        (replace(SETTLED, pacing_rate_bytes_per_s=4_900_000.0), 20.0, False),  # 1.49 times
        (replace(SETTLED, pacing_rate_bytes_per_s=7_310_000.0), 20.0, False),  # it has been begun afresh
        (SETTLED, 44.0, True),
        (SETTLED, 45.0, False),  # longer than 2.2 times what the kernel takes it for
        (SETTLED, 2.0, True),
        (replace(SETTLED, unacked_bytes=SEGMENT), 20.0, False),  # something is under way
        (replace(SETTLED, unsent_bytes=1), 20.0, False),
        (replace(SETTLED, cwnd_bytes=4 * SEGMENT), 20.0, False),  # bbr looks at the round trip just now
        (replace(SETTLED, rtt_ms=0.0), 20.0, False),  # nothing was ever answered
        (replace(SETTLED, pacing_rate_bytes_per_s=0.0), 20.0, False),  # a kernel that does not tell
        (replace(SETTLED, pacing_rate_bytes_per_s=float("inf")), 20.0, False),  # nothing holds it back
    ],
)
def test_it_is_worth_it_where_an_idle_connection_would_send_half_as_fast_again(
    info: TcpInfo, rtt_ms: float, worth: bool
) -> None:
    assert is_worth_it(info, rtt_ms) is worth


def test_the_congestion_control_in_use_is_named_after_another_one() -> None:
    class Recorded:
        def __init__(self) -> None:
            self.named: list[bytes] = []

        def setsockopt(self, level: int, name: int, value: bytes, /) -> None:
            assert (level, name) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
            self.named.append(value)

    recorded = Recorded()
    begin_afresh(recorded, "bbr")
    assert recorded.named == [b"reno", b"bbr"]


def test_the_kernel_goes_on_with_bbr_and_loses_nothing_of_the_stream() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        try:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            pytest.skip("this kernel has no bbr for users")
        for byte in b"abcd":
            sender.sendall(bytes([byte]) * 50_000)
            assert receiver.recv(50_000, socket.MSG_WAITALL) == bytes([byte]) * 50_000
            begin_afresh(sender, "bbr")
            assert sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr"
        info = read_tcp_info(sender)
        assert info is not None
        assert info.pacing_rate_bytes_per_s > 0.0
