"""The time that certificates are judged by: this host's clock, but never earlier than what is known to be past.

A board without a battery-backed clock boots in 1970, when no certificate was valid yet. What an authority has signed
says better: it is later now than the "not before" of whatever it issued. The latest that was seen is kept in a file,
and time goes on from there by the monotonic clock. Only signed times count, never this host's own clock: one that was
once set too late would otherwise stay so.

It is a lower bound: it can tell that a certificate has expired, and it cannot tell that one is not valid yet.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from split.errors import IdentityError
from split.identity.files import write_whole

_log = logging.getLogger("isthmus.identity")

_MAX_FILE_BYTES: Final = 64
_LAST_S: Final = 253_402_300_800
"""The year 10000, which X.509 cannot write."""


class KnownTime:
    """`path`: where it survives a restart; None: nowhere. `wall_s` and `monotonic_s` are clocks, for tests."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._floor_s = _read(path) if path is not None else 0.0
        self._since_s = monotonic_s()

    def now_s(self) -> float:
        """Seconds since 1970, UTC."""
        return max(self._wall_s(), self._past_s())

    @property
    def clock_is_behind(self) -> bool:
        """This host's clock shows a time that is known to be past: it was not set yet, and is not to be believed."""
        return self._wall_s() < self._past_s()

    def at_least(self, signed_s: float) -> None:
        """Our own certificate says that it is not older than this. Not kept: it is there at the next start, too."""
        if signed_s > self._past_s():
            self._floor_s, self._since_s = signed_s, self._monotonic_s()

    def learn(self, signed_s: float) -> None:
        """The certificate of a verified peer says that it is not older than this; kept. Never goes back.

        What this host's clock does not agree with is not learnt: an authority whose clock was once years ahead would
        make everything look expired for ever.
        """
        if not self._past_s() < signed_s <= self._wall_s():
            return
        self.at_least(signed_s)
        if self._path is not None:
            try:
                write_whole(self._path, f"{math.floor(signed_s)}\n".encode(), mode=0o644)
            except IdentityError as error:
                _log.warning("the last known good time is not kept: %s", error)

    def _past_s(self) -> float:
        return self._floor_s + (self._monotonic_s() - self._since_s) if self._floor_s else 0.0


def _read(path: Path) -> float:
    """What the file says; nothing known where it is missing or damaged."""
    try:
        with path.open("rb") as file:
            said = int(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError):
        return 0.0
    return float(said) if 0 < said < _LAST_S else 0.0
