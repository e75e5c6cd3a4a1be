"""The links that a device knows: one for each way to a companion, and TCP's window on the one in use.

What was learned over one network says nothing of another; back on the first, it is a start, as uncertain as it has
become. The window belongs to a connection, so that it is forgotten with it.
"""

from __future__ import annotations

import copy
from typing import Final

from split.plan.link import Link
from split.plan.observation import LinkEstimate
from split.plan.slow_start import OPEN, SendWindow

LINKS_KEPT: Final = 16
"""Ways known at once, the ones used last: home, office, a mobile network, each with a companion or two."""


class Links:
    """Speaks for the link in use."""

    __slots__ = ("_by_way", "_link", "_window")

    def __init__(self) -> None:
        self._link = Link()
        self._by_way: dict[str, Link] = {"": self._link}
        self._window: SendWindow | None = None

    def use(self, way: str) -> bool:
        """A new connection, this way; whether it is another way than before."""
        link = self._by_way.pop(way, None) or Link()
        changed, self._link, self._window = link is not self._link, link, None
        self._by_way[way] = link
        while len(self._by_way) > LINKS_KEPT:
            del self._by_way[next(iter(self._by_way))]
        return changed

    def remembered(self) -> Link:
        """The link in use as it is known now, whatever is learned later; for `restore`."""
        return copy.deepcopy(self._link)

    def restore(self, link: Link) -> None:
        """What was learned since `remembered` was no evidence."""
        way = next(way for way, known in self._by_way.items() if known is self._link)
        self._link = self._by_way[way] = link

    def windowed(self, window: SendWindow | None) -> None:
        """What the kernel says now of the connection that carries payloads; None: nothing."""
        self._window = window

    @property
    def surprised(self) -> bool:
        """As `Link.surprised`."""
        return self._link.surprised

    @property
    def observations(self) -> int:
        """Of the link in use, ever."""
        return self._link.observations

    def estimate(self, now_s: float) -> LinkEstimate:
        """What is known of a transfer that is sent at `now_s`, what it waits for the window included."""
        return self._link.estimate(now_s, self._window_at(now_s))

    def sent_estimate(self, network_ms: float, now_s: float) -> LinkEstimate:
        """The same for one that has been on its way for `network_ms`."""
        return self._link.estimate(now_s, self._window_at(now_s - network_ms / 1000.0))

    def observe(
        self, up_bytes: float, down_bytes: float, network_ms: float, now_s: float, *, at_least: bool = False
    ) -> None:
        """As `Link.observe` (`at_least`, too), into the window that there was when it was sent."""
        window = self._window_at(now_s - network_ms / 1000.0)
        self._link.observe(up_bytes, down_bytes, network_ms, now_s, window, at_least=at_least)

    def _window_at(self, at_s: float) -> tuple[float, float]:
        return self._window.at(at_s) if self._window is not None else OPEN
