"""May this request enter? Pure bookkeeping over bytes and estimates: no clock, no task, no socket.

Invariant: what was entered is left exactly once, so the ledger is empty when nothing is in flight.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from split.errors import DeadlineExceeded, Overloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much one companion holds at once."""

    inflight_bytes: int
    """Bytes of requests received and not yet answered, as decoded where that is more, over all devices."""
    device_bytes: int
    """The same of one device: none takes all the room."""
    inflight_requests: int = 1024
    """1024 waiting requests of 5 ms are 5 s of work: later than any deadline this design serves."""
    device_requests: int = 256
    """Of one device: four that flood still leave the others room in `inflight_requests` as answers go out."""


class Admission:
    """The ledger of what is in flight; one per companion, used from the event loop only."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.inflight_bytes = 0
        self.inflight_requests = 0
        self._device_bytes: Counter[str] = Counter()
        self._device_requests: Counter[str] = Counter()

    def enter(self, device: str, payload_bytes: int, *, wait_ms: float, budget_ms: float) -> None:
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
        own_requests, own_bytes = self._device_requests[device], self._device_bytes[device]
        if own_requests >= self._bounds.device_requests:
            raise Overloaded(
                f"{own_requests} requests of {device} are in flight here, the bound for one device; wait for answers"
            )
        if own_requests and own_bytes + payload_bytes > self._bounds.device_bytes:
            raise Overloaded(
                f"{own_bytes} bytes of {device} are in flight here and {payload_bytes} more are over the bound of "
                f"{self._bounds.device_bytes} for one device (limits.device_bytes); wait for answers or run locally"
            )
        self.inflight_requests += 1
        self.inflight_bytes += payload_bytes
        self._device_requests[device] += 1
        self._device_bytes[device] += payload_bytes

    def leave(self, device: str, payload_bytes: int) -> None:
        """Count out what `enter` counted in."""
        self._device_requests[device] -= 1
        self._device_bytes[device] -= payload_bytes
        if not self._device_requests[device]:
            assert not self._device_bytes[device], "the last one left with other bytes than it entered with"
            del self._device_requests[device], self._device_bytes[device]
        self.inflight_requests -= 1
        self.inflight_bytes -= payload_bytes
        assert self.inflight_requests >= 0, "left more often than entered"
        assert self.inflight_bytes >= 0, "left with more bytes than entered"
