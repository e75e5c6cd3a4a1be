"""The seam between the programs and any transport: messages go in, messages come out. `tls.py` and `memory.py` are two
implementations; agent and cloud know only this Protocol. A channel is open from birth (the Hellos are exchanged by
whoever made it) and dies once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from split.wire.messages import Hello, Message, Priority

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIdentity:
    """Who is at the other end, from its verified certificate."""

    name: str
    role: str
    """`device` or `companion`."""
    serial: int = 0
    """Of the certificate, by which it can be revoked; 0: shown none (the channel in memory)."""
    bulk_serial: int = 0
    """Of the certificate on the session's second connection, another where a renewal fell between the two; 0: there is
    no second one."""

    @property
    def serials(self) -> frozenset[int]:
        """Of every certificate shown: the session is over when any of them is revoked."""
        return frozenset({self.serial, self.bulk_serial} - {0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """One whole message as received."""

    message: Message
    payload: memoryview
    """Empty for messages without one; owned by the receiver."""
    received_at_s: float
    """Monotonic seconds when its last byte came."""
    bulk: bool = False
    """It came over the second connection of its session."""
    priority: Priority = Priority.NORMAL
    """With which it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One connection as the kernel that sends on it sees it, now. A number that this kernel does not tell is 0."""

    lane: str
    """`urgent` or `bulk`; empty for the only connection of its session."""
    congestion_control: str
    """What the kernel uses to send here: `bbr` where it is allowed, else its default."""
    rtt_ms: float
    """Smoothed by TCP: of the path, without the work of either program."""
    rtt_var_ms: float
    min_rtt_ms: float
    rate_bytes_per_s: float
    """At which the peer acknowledged: over the latest round trip, or the highest before it while little was sent."""
    app_limited: bool
    """The rate is what was sent, not what the link takes."""
    cwnd_bytes: int
    unacked_bytes: int
    unsent_bytes: int
    """In the kernel and not yet sent once."""
    acked_bytes: int
    retransmits: int
    """Segments sent again since the connection began."""
    frame_bytes: int
    """Size of the frames now sent, which follows the rate."""
    threshold_bytes: int | None = None
    """Slow start ends here; None: nothing has ended it yet."""
    segment_bytes: int = 0
    timeout_ms: float = 0.0
    """Retransmission timeout."""
    timeouts: int = 0
    """Times in a row that it ran out without an acknowledgement."""
    silent_ms: int = 0
    """Since data was last sent."""
    restarts: bool = False
    """Whether the kernel makes the window small again after such silence (`tcp_slow_start_after_idle`; bbr never)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A channel's link now, `Channel.observe`."""

    sent_bytes: int
    received_bytes: int
    queued_bytes: int
    connections: tuple[LinkFacts, ...]
    """One or two, the first one first; none where no kernel carries the bytes."""


class Channel(Protocol):
    """Owned by one task for receiving; `send` may be called from any task of the same loop."""

    @property
    def peer(self) -> PeerIdentity:
        """Who the other side is, by its certificate."""

    @property
    def peer_hello(self) -> Hello:
        """What it said first."""

    @property
    def closed_because(self) -> str | None:
        """None while open; afterwards the reason, as a sentence."""

    @property
    def ends(self) -> tuple[str, str] | None:
        """IP addresses of this side and of the peer, for who watches the way between; None where there are none."""

    @property
    def lanes(self) -> int:
        """Connections that this session has now: one, or two."""

    @property
    def queued_bytes(self) -> int:
        """Bytes accepted by `send` and not yet taken by the link (beyond it the transport holds a frame or two)."""

    @property
    def ahead_bytes(self) -> int:
        """What must leave before a message of data sent now, none of it more urgent: `queued_bytes`, what the transport
        and the kernel hold, and what TCP knows to wait in a router's queue. A system call or two."""

    @property
    def invalid_messages(self) -> int:
        """Messages that were dropped since their metadata makes no sense (PROTOCOL.md §3)."""

    @property
    def sent_bytes(self) -> int:
        """Bytes put on the link since the channel opened, as metered links count them: by the kernel's counters, with
        handshake, TLS, headers of TCP and IP (52 bytes a segment, 72 with IPv6) and what was sent twice. In memory:
        frames alone. Never falls, and stays readable when the channel is closed (as of its end, or just before)."""

    @property
    def received_bytes(self) -> int:
        """The same of what came; what the network delivered twice is counted once, but for its headers."""

    def observe(self) -> Observation:
        """What the kernel knows of the link. A system call per connection: for a tick, not for every frame."""

    def look_afresh(self, rtt_ms: float) -> None:
        """What is sent next shall show what the link takes, not what the kernel remembers of it (`pacing.py`): before a
        ping that asks for the rate. `rtt_ms`: as known now. Nothing happens where that would change nothing."""

    def send(self, message: Message, payload: Sequence[Buffer] = (), *, priority: Priority = Priority.NORMAL) -> None:
        """Queue a message; never blocks. The payload buffers must not change until they are out.

        ConnectionLost when the channel is closed; Overloaded when its byte bound is reached; TooLarge when the peer's
        Hello says that it takes no message of that size.
        """

    def forget(self, request_id: str, attempt: int) -> None:
        """Drop what is still unsent of that request's Infer or Reply (a Cancel message is the caller's to send)."""

    async def drain(self, below_bytes: int) -> None:
        """Wait until `queued_bytes` < below_bytes; ConnectionLost when the channel closes meanwhile."""

    async def receive(self) -> Incoming:
        """The next message. ConnectionLost (with the reason) once the channel is closed and all was received."""

    async def close(self, reason: str) -> None:
        """Send what is queued (bounded time), then close. May be called twice."""
