"""Every bound of the wire protocol and of a channel, in bytes or seconds, in one place; their relations are asserted.

Bounds of the protocol (what any implementation must refuse) are constants; bounds of one side (what it is willing to
hold) are in `Limits`, whose defaults serve both programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

FRAME_HEADER_BYTES: Final = 20
MAX_FRAME_BYTES: Final = 256 * KIB
"""Header and body. Larger chunks gain nothing (1148 against 942 MB/s at 1 MiB on loopback) and block what is urgent."""

MAX_METADATA_BYTES: Final = 1 * MIB
MAX_HELLO_BYTES: Final = 64 * KIB
"""Metadata of the first message: read from a peer about which nothing is known yet but its certificate."""

MAX_MESSAGE_BYTES: Final = 2**32 - 1
"""Metadata and payload, by the width of the header's fields; the receiver's Hello says what it takes of that."""

MIN_WINDOW_BYTES: Final = 64 * KIB
"""Of credit: less would make one frame wait for the other."""

EARLY_BYTES: Final = 64 * KIB
"""What a device may send before it has the companion's Hello, counted as credit is, CONTROL not excepted: no Hello says
less, neither as the largest message nor as credit, so that what went early fits whatever comes."""

MAX_WAITING_PONGS: Final = 64
"""A peer that pings without reading the answers is cut off here."""

MAX_PONG_BYTES: Final = 32 * KIB
"""Of padding that a ping may ask for in its pong: what a probe up weighs at most, too; 52 ms at 5 Mbit/s. More would
tell a rate no better, and a companion sends it for a ping of 30 bytes."""

MAX_WAITING_PONG_BYTES: Final = 4 * MAX_PONG_BYTES
"""Of that in pongs that wait to be sent: what a device may have asked for that has no more than four pings out."""

MAX_INVALID_MESSAGES: Final = 4_096
"""Messages of a connection whose metadata makes no sense: each is dropped and counted, one more ends the connection."""

MAX_REASON_CHARACTERS: Final = 1_000
"""Of the message in a last Refused: what is wrong may be as long as what the peer sent."""

HELLO_TIMEOUT_S: Final = 5.0
"""From the accepted socket to the peer's whole Hello: handshake and Hello are small; slower is an attack or no link."""

CLOSE_FLUSH_S: Final = 2.0
"""What a closing side gives its queue to leave."""

MESSAGE_OVERHEAD_BYTES: Final = 512
"""What a message counts beyond its own bytes, queued and as credit, so that a flood of empty ones is bounded too."""

CONTROL_QUEUE_BYTES: Final = 2 * MIB
"""Unsent messages of priority CONTROL, apart from the queue of data: however full that is, it holds up no Cancel and no
Ping. Room for the largest one (a probe with padding) and a thousand small ones beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one side of a connection sends at once and is willing to hold.

    A session has at most two connections, each with queues and credit of its own, and so at most twice of all this. Not
    halves: the first must do alone until the second is there, and a bulk queue that is full must not hold up what is
    urgent, nor take from its credit.
    """

    frame_bytes: int = 64 * KIB
    """Largest frame sent at first, header and body: 4 full TLS records; 52 ms at 10 Mbit/s, 10 ms at 50. Whoever
    measures the link sets it anew (`WireConnection.frame_bytes`)."""
    max_message_bytes: int = 256 * MIB
    """Largest message taken, metadata and payload; announced in the Hello."""
    queue_bytes: int = 8 * MIB
    """Unsent bytes of data accepted before `send` says Overloaded; a larger message is taken when no other data waits.
    CONTROL has a queue of its own."""
    unread_bytes: int = 16 * MIB
    """Received and not yet taken by the program before the peer has to stop: as credit, announced in the Hello. Of what
    costs no credit (CONTROL, and all that a peer of 1.0 sends): before reading stops and TCP holds the peer back."""

    def __post_init__(self) -> None:
        assert FRAME_HEADER_BYTES < self.frame_bytes <= MAX_FRAME_BYTES, self
        assert MAX_HELLO_BYTES <= self.max_message_bytes <= MAX_MESSAGE_BYTES, self
        assert self.queue_bytes > 0, self
        assert 0 < self.unread_bytes <= MAX_MESSAGE_BYTES, self


DEFAULT_LIMITS: Final = Limits()

assert min(MIN_WINDOW_BYTES, MAX_HELLO_BYTES) >= EARLY_BYTES
assert MAX_HELLO_BYTES <= MAX_METADATA_BYTES <= CONTROL_QUEUE_BYTES
assert MAX_PONG_BYTES < MAX_WAITING_PONG_BYTES < CONTROL_QUEUE_BYTES
assert MAX_METADATA_BYTES + 1000 * 2 * MESSAGE_OVERHEAD_BYTES <= CONTROL_QUEUE_BYTES
