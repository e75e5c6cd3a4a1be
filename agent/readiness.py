"""What of one model may be used at the companion: what it holds ready, and what is barred, each with the reason. No
times (`learned_costs.py`), and nothing of the connection (`companion_view.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.learned_costs import Alike
from split.ids import CutId
from split.plan.observation import Flags
from split.plan.plan import NEEDS_CALIBRATION, WITH_LEVELS
from split.plan.table import PlanTable

DISTRUSTED_MAX: Final = 16
"""Companions of a model whose answers were found wrong; the first is forgotten for one more. Each is enrolled with the
user's own authority, so that there are a few."""

NO_CALIBRATION_YET: Final = "the companion has no calibration yet"


@dataclass(slots=True, kw_only=True)
class Readiness:
    """Made by `of`."""

    opened: Flags
    """[plan]: whether all that it runs there is open; local is."""
    ready: bool = False
    """It runs the model, compared and found equal."""
    not_ready_why: str = ""
    """Why it is not ready yet, where that is known."""
    forbidden: str = ""
    """Why it may not be shared on this connection, whoever answers."""
    peer: str = ""
    """The companion's name, by its certificate."""
    distrusted: dict[str, str] = field(default_factory=dict)
    """Companions whose answers were found to be others than this device's, and how; as long as this is the model."""
    encoded_why_not: str = ""
    """Why inputs may not travel encoded."""
    cuts_not_open: dict[CutId, str] = field(default_factory=dict)
    """Cuts that the companion does not hold open, and why."""
    codecs_not_there: dict[str, str] = field(default_factory=dict)
    """Codecs that the companion cannot read yet, and why."""
    codecs_broken: dict[str, str] = field(default_factory=dict)
    """Codecs that were found to break the bound of fidelity, and how: until the model is loaded anew."""
    _nothing_opened: Flags
    _awaited: Mapping[str, str]
    """What `opened` and `codecs_not_there` are on a new connection."""

    @classmethod
    def of(cls, table: PlanTable) -> Readiness:
        """Nothing is ready, nothing barred."""
        awaited = _awaited(table)
        here = ~(table.splits | table.offloads)
        return cls(opened=here, codecs_not_there=dict(awaited), _nothing_opened=here, _awaited=awaited)

    def recalibrated(self, now: PlanTable, alike: Alike) -> None:
        """The model has another calibration: its plans are `now`'s, the segments the same."""
        for codec in WITH_LEVELS:
            self.codecs_broken.pop(codec, None)
        self.distrusted.clear()  # it may have been the calibration
        for codec in NEEDS_CALIBRATION:
            self.codecs_not_there.pop(codec, None)
        self._awaited, self._nothing_opened = _awaited(now), ~(now.splits | now.offloads)
        self.codecs_not_there |= self._awaited
        self.opened = alike.taken(self.opened, self._nothing_opened)

    def another_connection(self) -> None:
        """Nothing that an earlier one said holds."""
        self._forget()
        self.codecs_not_there = dict(self._awaited)

    def model_ready(self, offloads: Flags | None) -> None:
        """As `Planner.companion_ready`; `offloads`: the plans that need nothing else."""
        self._forget()
        self.ready = True
        if offloads is not None:
            self.opened = self.opened | offloads

    def _forget(self) -> None:
        self.ready, self.not_ready_why, self.forbidden = False, "", ""
        self.opened = self._nothing_opened
        self.cuts_not_open.clear()

    def segment_ready(self, cut: CutId, rows: Flags | None) -> None:
        """As `Planner.segment_ready`; `rows`: its plans."""
        self.cuts_not_open.pop(cut, None)
        if rows is not None:
            self.opened = self.opened | rows

    def distrust(self, peer: str, why: str) -> None:
        """As `Planner.distrust`."""
        self.distrusted.pop(peer, None)
        self.distrusted[peer] = why
        while len(self.distrusted) > DISTRUSTED_MAX:
            del self.distrusted[next(iter(self.distrusted))]

    @property
    def barred(self) -> str:
        """Why the model may not be shared with this companion at all; "" when it may."""
        return self.forbidden or self.distrusted.get(self.peer, "")

    @property
    def awaited(self) -> str:
        """Why it is not ready yet; "" when it is."""
        return "" if self.ready else self.not_ready_why or "the companion is not ready for this model yet"

    @property
    def codecs_why_not(self) -> Mapping[str, str]:
        """Codec → why it may not be used now, of those that may not; the lasting reason first."""
        if not self.codecs_broken:
            return self.codecs_not_there
        return self.codecs_not_there | self.codecs_broken


def _awaited(table: PlanTable) -> dict[str, str]:
    return dict.fromkeys(table.with_codec.keys() & NEEDS_CALIBRATION, NO_CALIBRATION_YET)
