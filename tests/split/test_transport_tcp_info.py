"""The kernel's numbers, against the counts of what was really sent; and the size of frames that follows from a rate."""

from __future__ import annotations

import math
import socket
import struct
from pathlib import Path

import pytest

from split.transport.lane import frame_bytes_at, waiting_bytes_at
from split.transport.tcp_info import parse_tcp_info, read_tcp_info
from split.transport.tcp_options import restarts_after_idle


def test_what_was_sent_and_received_is_what_the_kernel_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
            sender.sendall(bytes(10_000))
            receiver.recv(10_000, socket.MSG_WAITALL)
            receiver.sendall(b"x")
            sender.recv(1)  # carries the acknowledgement of all
            sent, received = read_tcp_info(sender), read_tcp_info(receiver)
            assert sent is not None
            assert received is not None
            assert sent.sent_bytes == 10_000
            assert sent.acked_bytes in (10_000, 10_001)  # kernels count the SYN, or not
            assert received.received_bytes == 10_000
            assert sent.received_bytes == 1
            assert (sent.unsent_bytes, sent.unacked_bytes, sent.retransmits) == (0, 0, 0)
            assert sent.segments_out >= 2
            assert 0 < sent.rtt_ms < 1_000
            assert sent.cwnd_bytes > 1_000
        assert read_tcp_info(sender) is None  # closed


def test_the_field_offsets_are_those_of_the_kernel_header() -> None:
    """Offsets counted by hand from include/uapi/linux/tcp.h."""
    raw = bytearray(216)
    for offset, code, value in (
        (2, "B", 3),  # retransmits: in a row
        (7, "B", 1),  # delivery_rate_app_limited
        (8, "I", 241_500),  # rto
        (16, "I", 1_448),  # snd_mss
        (24, "I", 3),  # unacked
        (44, "I", 2_000),  # last_data_sent
        (68, "I", 41_500),  # rtt
        (72, "I", 250),  # rttvar
        (76, "I", 20),  # snd_ssthresh
        (80, "I", 10),  # snd_cwnd
        (100, "I", 7),  # total_retrans
        (104, "Q", 2_500_000),  # pacing_rate
        (120, "Q", 5_000_000_000),  # bytes_acked
        (128, "Q", 123),  # bytes_received
        (136, "I", 11),  # segs_out
        (140, "I", 12),  # segs_in
        (144, "I", 13),  # notsent_bytes
        (148, "I", 40_000),  # min_rtt
        (160, "Q", 6_250_000),  # delivery_rate
        (200, "Q", 5_000_001_448),  # bytes_sent
    ):
        struct.pack_into(code, raw, offset, value)
    info = parse_tcp_info(bytes(raw) + b"what a later kernel adds")
    assert info.app_limited
    assert (info.rtt_ms, info.rtt_var_ms, info.min_rtt_ms) == (41.5, 0.25, 40.0)
    assert (info.cwnd_bytes, info.unacked_bytes, info.unsent_bytes) == (14_480, 4_344, 13)
    assert (info.timeout_ms, info.silent_ms, info.segment_bytes, info.threshold_bytes) == (241.5, 2_000, 1_448, 28_960)
    assert (info.acked_bytes, info.sent_bytes, info.received_bytes) == (5_000_000_000, 5_000_001_448, 123)
    assert (info.segments_out, info.segments_in, info.retransmits) == (11, 12, 7)
    assert info.timeouts == 3
    assert info.delivery_rate_bytes_per_s == 6_250_000
    assert info.pacing_rate_bytes_per_s == 2_500_000


@pytest.mark.parametrize(
    ("segments", "rate", "waiting"),
    [
        (100, 6_250_000, 13),  # 144,800 bytes under way, 250,000 are what 40 ms hold
        (200, 6_250_000, 13 + 289_600 - 250_000),  # the rest waits in a router
        (200, 0, 13),  # nothing is known of the path yet
    ],
)
def test_what_waits_is_unsent_or_more_than_the_path_holds(segments: int, rate: int, waiting: int) -> None:
    raw = bytearray(216)
    values = ((16, "I", 1_448), (24, "I", segments), (144, "I", 13), (148, "I", 40_000), (160, "Q", rate))
    for offset, code, value in values:
        struct.pack_into(code, raw, offset, value)
    assert parse_tcp_info(bytes(raw)).waiting_bytes == waiting


def test_a_window_that_nothing_has_ended_yet_has_no_threshold() -> None:
    raw = bytearray(216)
    struct.pack_into("I", raw, 76, 0x7FFFFFFF)  # TCP_INFINITE_SSTHRESH
    assert parse_tcp_info(bytes(raw)).threshold_bytes is None


@pytest.mark.parametrize(
    ("congestion_control", "said", "restarts"),
    [("cubic", "1\n", True), ("cubic", "0\n", False), ("cubic", None, True), ("bbr", "1\n", False)],
)
def test_a_window_restarts_after_silence_unless_the_kernel_says_no_or_bbr_paces(
    tmp_path: Path, congestion_control: str, said: str | None, restarts: bool
) -> None:
    if said is not None:
        (tmp_path / "proc/sys/net/ipv4").mkdir(parents=True)
        (tmp_path / "proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text(said)
    assert restarts_after_idle(congestion_control, tmp_path) is restarts


def test_who_is_not_held_back_has_no_pace() -> None:
    raw = bytearray(216)
    struct.pack_into("Q", raw, 104, 2**64 - 1)  # ~0UL
    assert parse_tcp_info(bytes(raw)).pacing_rate_bytes_per_s == math.inf


def test_an_old_kernel_that_tells_less_is_read_as_zeros() -> None:
    info = parse_tcp_info(bytes(104))
    assert (info.sent_bytes, info.delivery_rate_bytes_per_s, info.segments_out) == (0, 0.0, 0)


@pytest.mark.parametrize(
    ("mbit_s", "kib"),
    [(0.1, 16), (10, 16), (50, 32), (100, 64), (200, 128), (10_000, 128)],
)
def test_a_frame_is_what_the_link_takes_in_five_milliseconds_in_whole_records(mbit_s: float, kib: int) -> None:
    assert frame_bytes_at(mbit_s * 1e6 / 8) == kib * 1024


@pytest.mark.parametrize(("frame_kib", "kib"), [(16, 16), (32, 16), (64, 32), (128, 64)])
def test_half_a_frame_may_wait_and_sixteen_kib_always(frame_kib: int, kib: int) -> None:
    assert waiting_bytes_at(frame_kib * 1024) == kib * 1024
