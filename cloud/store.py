"""Models on the companion's disk, by digest: what is held, what is coming in, what fits. Blocking (call it off the
loop) and thread-safe; it knows files and bytes, not ONNX.

    <folder>/<64 hex>/files/…       a whole model, every file's SHA-256 checked
    <folder>/<64 hex>/incoming/…    a model on its way: as far as it came, whoever sends goes on from there
    <folder>/<64 hex>/manifest.json the files it consists of

Invariant: `files/` appears by one rename, after every hash was right. Several devices may send one model at once:
whoever is ahead extends the file, what is already there is skipped.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from split.errors import CompanionRefused, InvalidRequest, UnknownModel
from split.graph.card import digest_of_files
from split.ids import ModelDigest
from split.transport.channel import Buffer

Files = tuple[tuple[str, int, str], ...]
"""(plain name, bytes, sha256 hex), the model file first: as a device offers it."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PLAIN_NAME = re.compile(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]{0,199}")
"""No path, no control character, no leading dot; 200 bytes and more are left of a file system's 255 for suffixes."""
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
    lock: threading.Lock = field(default_factory=threading.Lock)


class ModelStore:
    """Holds models up to `budget_bytes`; a model that some session uses (`offer` … `release`) is never removed."""

    def __init__(self, folder: Path, *, budget_bytes: int) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()
        self._uploads: dict[str, _Upload] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def held(self) -> tuple[ModelDigest, ...]:
        """Digests of the models that are whole."""
        return tuple(ModelDigest(f"sha256:{path.parent.name}") for path in sorted(self._folder.glob("*/files")))

    def path(self, digest: str) -> Path:
        """The model file of a whole model; UnknownModel when it is not held."""
        base = self._folder / digest_hex(digest)
        files = _read_manifest(base)
        if files is None or not (base / "files").is_dir():
            raise UnknownModel(f"model {digest} is not held here; offer it and send its files")
        return base / "files" / files[0][0]

    def offer(self, digest: str, files: Files) -> tuple[tuple[int, int], ...]:
        """Take a device's offer: reserve room and say what to send, as (index in `files`, offset); empty when all is
        here.

        The caller owes one `release(digest)` for each offer taken. Refused with BUDGET_EXCEEDED when it does not fit
        beside the models in use, DISK_FULL when the disk has less room than that, DIGEST_MISMATCH when the files are
        not the digest's or are known with other sizes; InvalidRequest for an offer that is none.
        """
        base = self._folder / digest_hex(digest)
        check_files(digest, files)
        with self._lock:
            known = _read_manifest(base)
            if known is not None and not _same_files(known, files):
                if (base / "files").is_dir() or self._users[base.name]:
                    raise CompanionRefused(
                        "DIGEST_MISMATCH", f"the files of {digest} have other sizes here than offered"
                    )
                known = None
            if known is None:
                shutil.rmtree(base, ignore_errors=True)
            known = known or files
            if not (base / "files").is_dir():
                self._make_room(base, known)
                (base / "incoming").mkdir(parents=True, exist_ok=True)
                self._uploads.setdefault(base.name, _Upload(files=known))
            _write_manifest(base, known)  # again for a held model: its time says when it was last used
            self._users[base.name] += 1
            return _missing(base, known)

    def release(self, digest: str) -> None:
        """One session less uses this model; what came of it so far stays for a later offer."""
        name = digest_hex(digest)
        with self._lock:
            self._users[name] -= 1
            if self._users[name] <= 0:
                del self._users[name]
                self._uploads.pop(name, None)

    def write(self, digest: str, index: int, offset: int, data: Buffer) -> bool:
        """Add `data` at `offset` of the file with this index in the offer; True when all bytes are here (`finish` it).

        What is held already is skipped. InvalidRequest for a model that was not offered, a gap, or bytes over the
        offered size; refused with DISK_FULL when it is.
        """
        base = self._folder / digest_hex(digest)
        with self._lock:
            upload = self._uploads.get(base.name)
        if upload is None:
            if (base / "files").is_dir():
                return True
            raise InvalidRequest(f"model {digest} was not offered; offer it before sending its files")
        with upload.lock:
            return _append(base, upload, index, offset, memoryview(data))

    def finish(self, digest: str) -> bool:
        """Check the hashes and put the model in its place; False when bytes are missing still.

        Refused with DIGEST_MISMATCH when a file's hash is wrong: all that came is removed. Reads every byte.
        """
        base = self._folder / digest_hex(digest)
        with self._lock:
            upload = self._uploads.get(base.name)
        if upload is None:
            return (base / "files").is_dir()
        with upload.lock:
            try:
                return self._finish(base, upload)
            except FileNotFoundError:  # another session finished it, or it made room for another model
                return (base / "files").is_dir()

    def remove(self, digest: str) -> None:
        """Delete a model, whole or not."""
        base = self._folder / digest_hex(digest)
        with self._lock:
            self._uploads.pop(base.name, None)
            shutil.rmtree(base, ignore_errors=True)

    def used_bytes(self) -> int:
        """Bytes on disk, whole and incoming."""
        return sum(_bytes_below(path) for path in self._folder.iterdir())

    def _finish(self, base: Path, upload: _Upload) -> bool:
        if (base / "files").is_dir():
            return True
        incoming = base / "incoming"
        for name, size, sha256 in upload.files:
            target = incoming / name
            if size == 0:
                target.touch()
            if _size(target) < size:
                return False
            with target.open("rb") as source:
                found = hashlib.file_digest(source, "sha256").hexdigest()
            if found != sha256:
                self.remove(f"sha256:{base.name}")
                raise CompanionRefused(
                    "DIGEST_MISMATCH",
                    f"{name!r} has SHA-256 {found}, offered was {sha256}; what came was removed, offer the model again",
                )
        with self._lock:
            self._uploads.pop(base.name, None)
            if not (base / "files").is_dir():
                incoming.rename(base / "files")
        return True

    def _make_room(self, base: Path, files: Files) -> None:
        """Remove what nobody uses, oldest first, until `files` fit; refuse before anything is removed in vain."""
        wanted = sum(size for _, size, _ in files)
        others = {path: self._claimed_bytes(path) for path in self._folder.iterdir() if path != base}
        idle = sorted((p for p in others if not self._users[p.name]), key=lambda p: p.stat().st_mtime)
        in_use = sum(size for path, size in others.items() if path not in idle)
        if in_use + wanted > self._budget_bytes:
            raise CompanionRefused(
                "BUDGET_EXCEEDED",
                f"the model has {wanted} bytes, the models in use {in_use}; together they are over the companion's "
                f"budget_bytes of {self._budget_bytes}",
            )
        free = shutil.disk_usage(self._folder).free + _bytes_below(base) + sum(others[path] for path in idle)
        if free < wanted:
            raise CompanionRefused("DISK_FULL", f"the model has {wanted} bytes, the companion's disk only {free} left")
        total = wanted + sum(others.values())
        for path in idle:
            if total <= self._budget_bytes and shutil.disk_usage(self._folder).free + _bytes_below(base) >= wanted:
                break
            shutil.rmtree(path, ignore_errors=True)
            total -= others[path]

    def _claimed_bytes(self, base: Path) -> int:
        """What a model will take: all of its files while it is whole or coming in, else what lies there."""
        upload = self._uploads.get(base.name)
        return sum(size for _, size, _ in upload.files) if upload else _bytes_below(base)


def _append(base: Path, upload: _Upload, index: int, offset: int, data: memoryview) -> bool:
    file, size, _ = upload.files[index]
    target = base / "incoming" / file
    if (base / "files").is_dir():
        return True
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
    return not _missing(base, upload.files)


def _same_files(known: Files, files: Files) -> bool:
    """The model file may be called otherwise on each device; the names of data files are part of the model."""
    return known[0][1:] == files[0][1:] and known[1:] == files[1:]


def _missing(base: Path, files: Files) -> tuple[tuple[int, int], ...]:
    """What must still come; empty also when all bytes are there and only the hashes are unchecked (see `finish`)."""
    if (base / "files").is_dir():
        return ()
    held = ((index, _size(base / "incoming" / name), size) for index, (name, size, _) in enumerate(files))
    return tuple((index, have) for index, have, size in held if have < size)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _read_manifest(base: Path) -> Files | None:
    try:
        return msgspec.json.decode((base / "manifest.json").read_bytes(), type=Files)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _write_manifest(base: Path, files: Files) -> None:
    fresh = base / "manifest.json.new"
    fresh.write_bytes(msgspec.json.encode(files))
    fresh.replace(base / "manifest.json")
