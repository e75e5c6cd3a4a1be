"""Models on the companion's disk, by digest: what is held, what is coming in, what fits. Blocking (call it off the
loop) and thread-safe; it knows files and bytes, not ONNX.

    <folder>/<64 hex>/files/…             a whole model, every file's SHA-256 checked
    <folder>/<64 hex>/manifest.json       the files it consists of
    <folder>/<64 hex>/incoming/<device>/… a model on its way from that device: it goes on there, after any interruption

Invariants: `files/` appears by one rename, after every hash was right; what one device sends never touches what another
sends (a broken one harms only itself). Who is first with all of it has brought it for everybody.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from split.errors import CompanionRefused, InvalidRequest, UnknownModel
from split.graph.card import digest_of_files, file_is
from split.ids import ModelDigest
from split.transport.channel import Buffer

log = logging.getLogger(__name__)

Files = tuple[tuple[str, int, str], ...]
"""(plain name, bytes, sha256 hex), the model file first: as a device offers it."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PLAIN_NAME = re.compile(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]{0,199}")
"""No path, no control character, no leading dot; 200 bytes and more are left of a file system's 255 for suffixes."""
RESERVED_S = 60.0
"""How long room is kept for a model of which nothing comes: longer than a link is usually gone. Then others may have
it; the bytes that came count on, and where room is left the upload goes on."""
MAX_FILES = 256
"""Files of one model: exporters write one external file per model or one per tensor group; more is no model of ours."""


def digest_hex(digest: str) -> str:
    """The 64 hex digits of a model digest; InvalidRequest for anything else (it becomes a folder name)."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise InvalidRequest(f"model digest {digest[:80]!r} must be 'sha256:' and 64 hex digits")
    return match[1]


def check_files(digest: str, files: Files) -> None:
    """InvalidRequest unless these can be the files of one model; refused with DIGEST_MISMATCH unless of this one."""
    if not 1 <= len(files) <= MAX_FILES:
        raise InvalidRequest(f"a model has 1 to {MAX_FILES} files, {len(files)} were offered")
    for name, size, sha256 in files:
        if not _PLAIN_NAME.fullmatch(name) or len(name.encode()) > 200:
            raise InvalidRequest(f"file name {name[:80]!r} must be a plain name without a path or a leading dot")
        if size < 0 or not _SHA256.fullmatch(sha256):
            raise InvalidRequest(f"file {name!r}: {size} bytes with SHA-256 {sha256[:80]!r} cannot be")
    if len({name for name, _, _ in files}) != len(files):
        raise InvalidRequest("a model's files must have different names")
    if (found := digest_of_files(files)) != digest:
        raise CompanionRefused("DIGEST_MISMATCH", f"the files offered as {digest} are {found}; offer them as that")


@dataclass(slots=True)
class _Upload:
    files: Files
    place: Path
    moved_at_s: float
    """When bytes came last."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class ModelStore:
    """Holds models up to `budget_bytes`; a model that some session uses (`offer` … `release`) is never removed.

    `device` is the name of the peer's certificate: `[a-z0-9-]{1,64}`, good as a folder's name.
    """

    def __init__(self, folder: Path, *, budget_bytes: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._now_s = now_s
        self._budget_bytes = budget_bytes
        self._disk = threading.Lock()
        """For whoever changes or hashes what lies there: held for seconds."""
        self._books = threading.Lock()
        """For the two tables below: never held while a file is touched, since `release` is called on the event loop."""
        self._users: Counter[tuple[str, str]] = Counter()
        """(Model, device) → sessions that use it: for a moment a device may have its old session and its new one."""
        self._uploads: dict[tuple[str, str], _Upload] = {}
        """(Model, device) → what is on its way; by the model's hex digits, here and above."""
        self._silent_since_s: dict[str, float] = {}
        """Device → its first offer since it sent anything: offering again and again reserves nothing anew."""
        self._sound: set[str] = set()
        """Models whose bytes were checked since this process started or came to it whole."""
        folder.mkdir(parents=True, exist_ok=True)

    def _is_sound(self, base: Path) -> bool:
        """Whether the model lies there with the bytes it was sent with. A damaged copy is removed: it is sent anew."""
        if not _is_whole(base):
            return False
        if base.name in self._sound:
            return True
        files = _read_manifest(base)
        if files is not None and all(file_is(base / "files" / name, size, sha256) for name, size, sha256 in files):
            self._sound.add(base.name)
            return True
        log.warning("the stored model %s is damaged and removed; devices send it again", base.name)
        shutil.rmtree(base / "files", ignore_errors=True)
        (base / "manifest.json").unlink(missing_ok=True)
        return False

    def held(self) -> tuple[ModelDigest, ...]:
        """Digests of the models that are whole."""
        return tuple(ModelDigest(f"sha256:{path.parent.name}") for path in sorted(self._folder.glob("*/files")))

    def path(self, digest: str) -> Path:
        """The model file of a whole model; UnknownModel when it is not held."""
        base = self._folder / digest_hex(digest)
        files = _read_manifest(base)
        if files is None or not _is_whole(base):
            raise UnknownModel(f"model {digest} is not held here; offer it and send its files")
        return base / "files" / files[0][0]

    def offer(self, digest: str, device: str, files: Files) -> tuple[tuple[int, int], ...]:
        """Take a device's offer: reserve room and say what to send, as (index in `files`, offset); empty when all is
        here (then `finish`).

        The caller owes one `release(digest, device)` for each offer taken. Refused with BUDGET_EXCEEDED when it does
        not fit beside the models in use, DISK_FULL when the disk has less room than that, DIGEST_MISMATCH when the
        files are not the digest's or are known with other sizes; InvalidRequest for an offer that is none.
        """
        base = self._folder / digest_hex(digest)
        check_files(digest, files)
        with self._disk:
            if self._is_sound(base):
                known = _read_manifest(base)
                if known is not None and not _same_files(known, files):
                    raise CompanionRefused(
                        "DIGEST_MISMATCH", f"the files of {digest} have other sizes here than offered"
                    )
                base.touch()  # its time says when it was last used
                with self._books:
                    self._users[base.name, device] += 1
                return ()
            upload = self._uploads.get((base.name, device))
            if upload is None or upload.files != files:
                since_s = self._silent_since_s.setdefault(device, self._now_s())
                upload = _Upload(files, base / "incoming" / device, moved_at_s=since_s)
            self._make_room(base, device, files)
            upload.place.mkdir(parents=True, exist_ok=True)
            _keep_only(upload)
            base.touch()
            with self._books:
                self._uploads[base.name, device] = upload
                self._users[base.name, device] += 1
            return _missing(upload)

    def release(self, digest: str, device: str) -> None:
        """One session less uses this model; what came of it so far stays for a later offer."""
        user = digest_hex(digest), device
        with self._books:
            self._users[user] -= 1
            if self._users[user] <= 0:
                del self._users[user]
                self._uploads.pop(user, None)

    def write(self, digest: str, device: str, index: int, offset: int, data: Buffer) -> bool:
        """Add `data` at `offset` of the file with this index in the offer; True when all bytes are here (`finish` it).

        What is held already is skipped. InvalidRequest for a model that was not offered, a gap, or bytes over the
        offered size; refused with DISK_FULL when it is, with BUDGET_EXCEEDED when nothing came for `RESERVED_S` and
        others have taken the room since.
        """
        base = self._folder / digest_hex(digest)
        upload = self._uploads.get((base.name, device))
        if _is_whole(base):
            return True
        if upload is None:
            raise InvalidRequest(f"model {digest} was not offered; offer it before sending its files")
        with upload.lock:
            # Another device may be first at any moment: then the place of this upload is gone, and the model is whole.
            try:
                if not self._is_reserved(upload):
                    with self._disk:
                        self._make_room(base, device, upload.files)
                whole = _append(upload, index, offset, memoryview(data)) or _is_whole(base)
                upload.moved_at_s = self._now_s()
                self._silent_since_s.pop(device, None)
                return whole
            except (FileNotFoundError, InvalidRequest):
                if _is_whole(base):
                    return True
                raise

    def finish(self, digest: str, device: str) -> bool:
        """Check the hashes and put the model in its place; False when bytes are missing still.

        Refused with DIGEST_MISMATCH when a file's hash is wrong: what this device sent is removed. Reads every byte.
        """
        base = self._folder / digest_hex(digest)
        upload = self._uploads.get((base.name, device))
        if upload is None or _is_whole(base):
            return _is_whole(base)
        with upload.lock:
            try:
                if _missing(upload):
                    return _is_whole(base)
                _check_hashes(upload)
                with self._disk:
                    if not _is_whole(base):
                        _write_manifest(base, upload.files)
                        upload.place.rename(base / "files")
                        self._sound.add(base.name)
                    shutil.rmtree(base / "incoming", ignore_errors=True)
            except FileNotFoundError:  # another device was first, or the model was removed
                pass
            return _is_whole(base)

    def remove(self, digest: str) -> None:
        """Delete a model, whole or not."""
        with self._disk:
            shutil.rmtree(self._folder / digest_hex(digest), ignore_errors=True)

    def used_bytes(self) -> int:
        """Bytes on disk, whole and incoming."""
        return sum(_bytes_below(path) for path in self._folder.iterdir())

    def _is_reserved(self, upload: _Upload) -> bool:
        return self._now_s() - upload.moved_at_s <= RESERVED_S

    def _make_room(self, base: Path, device: str, files: Files) -> None:
        """Remove what nobody uses, oldest first, until `files` fit; refuse before anything is removed in vain."""
        with self._books:
            used = {name for name, _ in self._users}
            uploads = {user: upload for user, upload in self._uploads.items() if self._is_reserved(upload)}
        wanted = sum(size for _, size, _ in files)
        here = _bytes_below(base / "incoming" / device)
        claims = {path: _claimed_bytes(path, uploads) for path in self._folder.iterdir() if path != base}
        in_use = _claimed_bytes(base, uploads, without=device)
        in_use += sum(size for path, size in claims.items() if path.name in used)
        if in_use + wanted > self._budget_bytes:
            raise CompanionRefused(
                "BUDGET_EXCEEDED",
                f"the model has {wanted} bytes, the models in use {in_use}; together they are over the companion's "
                f"models_bytes of {self._budget_bytes}",
            )
        idle = sorted((path for path in claims if path.name not in used), key=lambda path: path.stat().st_mtime)
        free = shutil.disk_usage(self._folder).free + here
        if free + sum(claims[path] for path in idle) < wanted:
            raise CompanionRefused("DISK_FULL", f"the model has {wanted} bytes, the companion's disk only {free} left")
        total = in_use + wanted + sum(claims[path] for path in idle)
        for path in idle:
            if total <= self._budget_bytes and free >= wanted:
                break
            shutil.rmtree(path, ignore_errors=True)
            total -= claims[path]
            free += claims[path]


def _claimed_bytes(base: Path, uploads: Mapping[tuple[str, str], _Upload], *, without: str = "") -> int:
    """What a model takes or will take: what is being sent (`uploads`) counts in full, the rest as it lies there."""
    sent = {device: upload for (name, device), upload in uploads.items() if name == base.name}
    promised = sum(sum(size for _, size, _ in upload.files) for device, upload in sent.items() if device != without)
    partial = (place for place in (base / "incoming").glob("*") if place.name not in sent and place.name != without)
    return promised + _bytes_below(base / "files") + sum(_bytes_below(place) for place in partial)


def _append(upload: _Upload, index: int, offset: int, data: memoryview) -> bool:
    file, size, _ = upload.files[index]
    target = upload.place / file
    held = _size(target)
    if offset > held or offset < 0:
        raise InvalidRequest(f"{file!r} is held up to byte {held}, a chunk at {offset} would leave a gap")
    if offset + len(data) > size:
        raise InvalidRequest(f"{file!r} was offered with {size} bytes, a chunk reaches byte {offset + len(data)}")
    try:
        with target.open("ab") as out:
            out.write(data[held - offset :])
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CompanionRefused("DISK_FULL", f"the companion's disk is full at byte {held} of {file!r}") from error
    return not _missing(upload)


def _check_hashes(upload: _Upload) -> None:
    for name, size, sha256 in upload.files:
        target = upload.place / name
        if size == 0:
            target.touch()
        with target.open("rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
        if found != sha256:
            shutil.rmtree(upload.place, ignore_errors=True)
            raise CompanionRefused(
                "DIGEST_MISMATCH",
                f"{name!r} has SHA-256 {found}, offered was {sha256}; what came was removed, offer the model again",
            )


def _same_files(known: Files, files: Files) -> bool:
    """The model file may be called otherwise on each device; the names of data files are part of the model."""
    return known[0][1:] == files[0][1:] and known[1:] == files[1:]


def _missing(upload: _Upload) -> tuple[tuple[int, int], ...]:
    """What must still come of each file, by index and offset."""
    held = ((index, _size(upload.place / name), size) for index, (name, size, _) in enumerate(upload.files))
    return tuple((index, have) for index, have, size in held if have < size)


def _keep_only(upload: _Upload) -> None:
    """Remove what an earlier offer left under other names or with more bytes."""
    sizes = {name: size for name, size, _ in upload.files}
    for path in upload.place.iterdir():
        if path.stat().st_size > sizes.get(path.name, -1):
            path.unlink()


def _is_whole(base: Path) -> bool:
    return (base / "files").is_dir()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _read_manifest(base: Path) -> Files | None:
    """None where there is none, or where it is not that of this model: then no name in it is looked at."""
    try:
        files = msgspec.json.decode((base / "manifest.json").read_bytes(), type=Files)
        check_files(f"sha256:{base.name}", files)
    except (FileNotFoundError, msgspec.MsgspecError, InvalidRequest, CompanionRefused):
        return None
    return files


def _write_manifest(base: Path, files: Files) -> None:
    fresh = base / "manifest.json.new"
    fresh.write_bytes(msgspec.json.encode(files))
    fresh.replace(base / "manifest.json")
