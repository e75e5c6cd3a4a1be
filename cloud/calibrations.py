"""The calibrations that one session has brought: what codec `klt` is read with. Each is a file in the store, under its
own SHA-256. Of a model those stay that the device said it uses (it may serve one file under several names), and the one
that was used before them, since payloads made with it may still be on their way.

Invariant: a payload names its calibration and is read with that one, or not at all (I6).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from split.codec.calibration import FILE_BYTES_MAX, Calibration, decode_calibration
from split.codec.klt import BoundaryTables, calibration_key, klt_key
from split.errors import CompanionRefused, InvalidRequest
from split.ids import CutId, ModelDigest
from split.tensor import Array
from split.wire.messages import NO_CALIBRATION, ModelOffer

SESSION_BYTES: Final = 512 << 20
"""Tables of one session. Those of eight cuts of 512 channels take 17 MB, those of a mobile CNN one."""
ALL_BYTES: Final = 2 << 30
"""Of all sessions together, each once; what levels make of them is bounded apart (`split/codec/levels.py`)."""
CALIBRATIONS_MAX: Final = 512
"""Of one session: of every model that it may have the one in use and the one before."""


class _Held:
    """One calibration in memory, whoever has brought it."""

    def __init__(self, calibration: Calibration) -> None:
        self.tables = {cut: BoundaryTables(found, calibration.digest) for cut, found in calibration.tables.items()}
        self.bytes = sum(array.nbytes for array in _arrays(calibration))


_in_memory: Final[weakref.WeakValueDictionary[tuple[str, str], _Held]] = weakref.WeakValueDictionary()
"""By digest and model: the sessions of a fleet share them."""


class Calibrations:
    """Of one session; used from the event loop. `let_go` is told the digest of one that is replaced."""

    def __init__(self, let_go: Callable[[str], None]) -> None:
        self._let_go = let_go
        self._of_model: dict[str, dict[str, _Held]] = {}
        """Model → digest → what is held, the latest last."""

    def adopt(self, offer: ModelOffer, held: _Held) -> None:
        """It is whole here: from now on payloads may name it. BUDGET_EXCEEDED, and nothing is changed, when there
        would be too many bytes of them in the session, or in all."""
        known = self._of_model.get(offer.calibrates, {})
        others = {digest: one for digest, one in known.items() if digest != offer.digest}
        used = frozenset(offer.keeps)
        unused = [digest for digest in others if digest not in used]
        kept = {digest: one for digest, one in others.items() if digest not in unused[:-1]}
        of_others = [
            one for model, several in self._of_model.items() if model != offer.calibrates for one in several.values()
        ]
        self._require_bytes({*of_others, *kept.values()}, held, SESSION_BYTES, "this session")
        self._require_bytes(set(_in_memory.values()), held, ALL_BYTES, "this companion")
        self._of_model[offer.calibrates] = {**kept, offer.digest: held}
        for digest in unused[:-1]:
            self._let_go(digest)

    @staticmethod
    def _require_bytes(others: set[_Held], held: _Held, bytes_max: int, whose: str) -> None:
        taken = sum(one.bytes for one in others if one is not held)
        if taken + held.bytes > bytes_max:
            raise CompanionRefused(
                "BUDGET_EXCEEDED",
                f"this calibration takes {held.bytes} bytes, the others of {whose} {taken}; together they are over "
                f"{bytes_max}",
            )

    def forget(self, digest: str) -> None:
        """The file of this digest is not this session's any more."""
        for known in self._of_model.values():
            known.pop(digest, None)

    def find(self, model: str, cut: str, payload: memoryview) -> BoundaryTables:
        """What a payload of codec klt is read with. NO_CALIBRATION when this session has not brought it for `model`,
        PLAN_MISMATCH when it is not of this cut; CodecError for a payload that is none."""
        key = klt_key(payload)
        for digest, held in self._of_model.get(model, {}).items():
            if calibration_key(digest.removeprefix("sha256:")) != key:
                continue
            if (tables := held.tables.get(CutId(cut))) is None:
                raise CompanionRefused("PLAN_MISMATCH", f"calibration {key.hex()}… has no tables of {cut}")
            return tables
        raise CompanionRefused(
            NO_CALIBRATION,
            f"the payload was made with calibration {key.hex()}…, which this session has not brought for the model; "
            "offer it first",
        )


def check_offer(offer: ModelOffer) -> None:
    """InvalidRequest unless it can be that of a calibration."""
    if len(offer.files) != 1 or offer.files[0][1] > FILE_BYTES_MAX or offer.golden or offer.dims:
        raise InvalidRequest(
            f"a calibration is one file of at most {FILE_BYTES_MAX >> 20} MiB, offered without golden inputs"
        )


def read_offered(path: Path, offer: ModelOffer) -> _Held:
    """The calibration in the file that was offered; InvalidCalibration. Blocking."""
    key = offer.digest, offer.calibrates
    held = _in_memory.get(key)
    if held is None:
        held = _in_memory[key] = _Held(decode_calibration(path.read_bytes(), ModelDigest(offer.calibrates)))
    return held


def _arrays(calibration: Calibration) -> Iterator[Array]:
    for cut in calibration.tables.values():
        for tensor in cut.tensors:
            if (klt := tensor.klt) is not None:
                yield from (klt.transform, klt.inverse, klt.mean, klt.scales)
