"""May this request enter? Pure bookkeeping over bytes and estimates: no clock, no task, no socket.

Invariant: what was entered is left exactly once, so the ledger is empty when nothing is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from split.errors import DeadlineExceeded, Overloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much one companion holds at once, over all devices."""

    inflight_bytes: int
    """Payload bytes of requests received and not yet answered."""
    inflight_requests: int = 1024
    """1024 waiting requests of 5 ms are 5 s of work: later than any deadline this design serves."""


class Admission:
    """The ledger of what is in flight; one per companion, used from the event loop only."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.inflight_bytes = 0
        self.inflight_requests = 0

    def enter(self, payload_bytes: int, *, wait_ms: float, budget_ms: float) -> None:
        """Count a request in, or say why not.

        `wait_ms`: expected time in the queue before it would run; `budget_ms`: what is left of its deadline.
        DeadlineExceeded when it would not even start in time; Overloaded when a bound is reached. A request larger
        than the byte bound is let in when nothing else is there: refused for ever is no answer.
        """
        if budget_ms <= 0 or wait_ms >= budget_ms:
            raise DeadlineExceeded(
                f"the request has {budget_ms:.0f} ms left and would wait {wait_ms:.0f} ms here; it was not started"
            )
        if self.inflight_requests >= self._bounds.inflight_requests:
            raise Overloaded(
                f"{self.inflight_requests} requests are in flight here, the bound; try again or run locally"
            )
        if self.inflight_requests and self.inflight_bytes + payload_bytes > self._bounds.inflight_bytes:
            raise Overloaded(
                f"{self.inflight_bytes} bytes are in flight here and {payload_bytes} more are over the bound of "
                f"{self._bounds.inflight_bytes} (limits.inflight_bytes); try again or run locally"
            )
        self.inflight_requests += 1
        self.inflight_bytes += payload_bytes

    def leave(self, payload_bytes: int) -> None:
        """Count out what `enter` counted in."""
        self.inflight_requests -= 1
        self.inflight_bytes -= payload_bytes
        assert self.inflight_requests >= 0, "left more often than entered"
        assert self.inflight_bytes >= 0, "left with more bytes than entered"
