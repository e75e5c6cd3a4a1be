"""What answers a ping, and how much that may weigh: a few bytes must not make this side send many."""

from __future__ import annotations

from split.errors import RemoteProtocolError
from split.wire.limits import MAX_PONG_BYTES
from split.wire.messages import Ping, Pong


def answer_to(ping: Ping) -> Pong:
    """The pong, with the padding that the ping asks for. RemoteProtocolError where that is more than any may, or less
    than none."""
    if not 0 <= ping.pong_bytes <= MAX_PONG_BYTES:
        raise RemoteProtocolError(
            f"a ping may ask for 0 to {MAX_PONG_BYTES} bytes of padding in its pong, one asks for {ping.pong_bytes}"
        )
    return Pong(nonce=ping.nonce, padding=bytes(ping.pong_bytes))
