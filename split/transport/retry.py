"""When to dial again: exponential backoff with full jitter. Pure; the caller waits and draws no luck of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import random
from typing import Final

FIRST_S: Final = 0.1
CAP_S: Final = 1.5
"""The longest pause between two dials. A term of the sum behind invariant I7, which `agent/dialler.py` writes down."""
IDENTITY_RETRY_S: Final = 60.0
"""After an IdentityError wait this long instead: a wrong certificate does not mend itself within seconds."""


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Full jitter: sleep = random_between(0, min(cap, base · 2^attempt)).

    M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015: of the schemes compared there the one
    with the least work and contention when many clients lose one server at once.
    """

    first_s: float = FIRST_S
    cap_s: float = CAP_S
    draw: Callable[[], float] = field(default=random)
    """A number in [0, 1); injected by tests."""
    failures: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.first_s <= self.cap_s, self

    def failed(self) -> float:
        """Count a failure; seconds to wait before the next attempt."""
        bound_s = min(self.cap_s, self.first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return self.draw() * bound_s

    def succeeded(self) -> None:
        """Start over: the next failure waits shortly again."""
        self.failures = 0
