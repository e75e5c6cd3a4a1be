"""A calibration that is laid beside a model while it is served is taken up without loading the model again: whatever
`isthmus calibrate` writes is in use within seconds.

Requests under way keep the one they were decided with; the companion has the last two of a model. Not for new cuts:
those that the model's card lacks must be cut and measured first, which loading does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from agent.bringing_up import Entry
from agent.calibrated import Sidecar, sidecar_beside, stamp_of
from agent.served_model import ServedModel
from split.codec.calibration import CALIBRATION_FILE

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Between two looks at the files: one `stat` for each model, all on one thread."""


class Recalibrating:
    """`entries`: of the repository; `adopt(entry, model, sidecar)`: have the entry's model served with this one."""

    def __init__(
        self, *, entries: Callable[[], Iterable[Entry]], adopt: Callable[[Entry, ServedModel, Sidecar], None]
    ) -> None:
        self._entries = entries
        self._adopt = adopt

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # a bug of ours costs a new calibration, not the daemon
                log.exception("calibrations could not be looked at")

    async def look(self) -> None:
        """Once at each model that is served and measured; its file is read where it has another stamp."""
        entries = [one for one in self._entries() if one.model is not None and one.model.profile is not None]
        paths = [entry.path.with_name(CALIBRATION_FILE) for entry in entries]
        stamps = await asyncio.to_thread(lambda: [stamp_of(path) for path in paths])
        for entry, path, stamp in zip(entries, paths, stamps, strict=True):
            model = entry.model
            if model is None or model.sidecar.stamp == stamp:
                continue
            sidecar = await asyncio.to_thread(sidecar_beside, entry.path, model.digest)
            if entry.model is not model or model.profile is None:
                continue
            if sidecar.is_as(model.sidecar):
                model.sidecar = sidecar
                continue
            self._adopt(entry, model, sidecar)
            log.info("model=%s has taken up %s", entry.name, path)
