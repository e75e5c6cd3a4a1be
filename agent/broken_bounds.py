"""Which codecs were found to break a model's bound of fidelity (`spot_checks.py`), kept over restarts and reloads: else
each start would let more than a thousand answers go that way before it was found again.

It was found of one model file with one calibration, held to one bound; with another of these it says nothing any more.
A file that cannot be read or written costs what it would have told, never the daemon.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.served_model import ServedModel
from split.files import write_whole

log = logging.getLogger(__name__)

KEPT_MAX: Final = 256
"""Models with their calibrations: those found last."""
FILE_BYTES_MAX: Final = 1 << 20
"""As many, with a sentence for each codec, take a fifth of it."""

_Found = dict[str, dict[str, str]]
"""What it was found of → codec → why it may not be used, a sentence."""


class BrokenBounds:
    """In the file `path`, which is read when this is made (blocking); used from the event loop after that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = _read(path)
        self._latest = b""
        self._writing = threading.Lock()

    def of(self, model: ServedModel) -> Mapping[str, str]:
        """Codec → why it may not be used for the model as it is now."""
        return self._found.get(_basis(model), {})

    def keep(self, model: ServedModel, codec: str, why: str) -> None:
        """It was found just now; the file is written beside what the loop does."""
        basis = _basis(model)
        self._found[basis] = self._found.pop(basis, {}) | {codec: why}
        while len(self._found) > KEPT_MAX:
            del self._found[next(iter(self._found))]
        self._latest = msgspec.json.encode(self._found)
        asyncio.get_running_loop().run_in_executor(None, self._write)

    def _write(self) -> None:
        """On some thread: whichever comes last writes what was found last."""
        with self._writing:
            _write(self._path, self._latest)


def _basis(model: ServedModel) -> str:
    calibration = model.sidecar.calibration
    basis = [model.digest, calibration.digest if calibration is not None else "", model.contract.data.fidelity]
    return hashlib.sha256(msgspec.json.encode(basis)).hexdigest()


def _read(path: Path) -> _Found:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=_Found)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s cannot be read (%s): broken bounds of fidelity must be found again", path, error)
        return {}


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        log.warning("%s cannot be written (%s): the next start will not know of it", path, error.strerror or error)
