"""Records of traffic on disk: one file an hour, `record/2026-11-30T14.zst`, readable by the owner alone.

What is appended is on disk whole or not at all: what a crash or a full disk has torn off is cut away before the next
bytes follow. Blocking; nothing is raised for a disk that does not take it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from agent.record import whole_frames

HOUR_S: Final = 3600.0
HOUR_BYTES: Final = 1_000_000
"""Of one file: a week has 168 MB at most."""
NAME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d\.zst")


class RecordFiles:
    """The records of one daemon in `folder`, as many hours as `days` have."""

    def __init__(self, folder: Path, *, days: int) -> None:
        self._folder = folder
        self._hours = 24 * days
        self._lock = threading.Lock()
        """A daemon that ends writes while its last append may still be under way."""
        self._sound: dict[Path, int] = {}
        """Length of the file that is written, as far as it is sound."""

    def size_bytes(self, hour: int) -> int:
        """What this hour (since the epoch) has already."""
        try:
            return self._path(hour).stat().st_size
        except OSError:
            return 0

    def append(self, hour: int, frames: Iterable[bytes], opening: Sequence[bytes] = ()) -> str:
        """Add to this hour's file. Why nothing was added, as a clause; "" when all was.

        `opening`: the frames that the others refer to, written already or among them; they come first where what was
        written is gone."""
        with self._lock:
            return self._append(self._path(hour), list(frames), opening)

    def _append(self, path: Path, frames: Sequence[bytes], opening: Sequence[bytes]) -> str:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                sound = self._sound.get(path)
                if sound is None:
                    sound = _sound_bytes(file)
                    self._sound = {path: sound}
                    self._forget_old()
                elif os.fstat(file).st_size < sound:  # somebody has removed or cut it
                    sound = _sound_bytes(file)
                    frames = [*opening, *(frame for frame in frames if frame not in opening)]
                data = b"".join(frames)
                if sound + len(data) > HOUR_BYTES:
                    return f"an hour has {HOUR_BYTES} bytes, and {path.name} has {sound} of them already"
                os.ftruncate(file, sound)
                try:
                    _write(file, data, sound)
                except OSError:
                    with contextlib.suppress(OSError):  # else the next append does it
                        os.ftruncate(file, sound)
                    raise
                self._sound[path] = sound + len(data)
            finally:
                os.close(file)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _path(self, hour: int) -> Path:
        return self._folder / time.strftime("%Y-%m-%dT%H.zst", time.gmtime(hour * HOUR_S))

    def _forget_old(self) -> None:
        """Keep the newest hours; their names sort as they follow each other."""
        kept = sorted(name for name in os.listdir(self._folder) if NAME.fullmatch(name))
        for name in kept[: -self._hours]:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()


def _sound_bytes(file: int) -> int:
    """Up to where an earlier process has left whole frames."""
    data = os.pread(file, HOUR_BYTES, 0)
    return max((end for end, _ in whole_frames(data)), default=0)


def _write(file: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
