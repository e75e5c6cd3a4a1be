"""Models on the companion's disk, by digest: what is held, what is coming in, what fits. Blocking (call it off the
loop) and thread-safe; it knows files and bytes, not ONNX.

    <folder>/<64 hex>/files/…             a whole model, every file's SHA-256 checked
    <folder>/<64 hex>/manifest.json       the files it consists of
    <folder>/<64 hex>/chunks              and the pieces, which other models may have too
    <folder>/<64 hex>/incoming/<device>/… a model on its way from that device (`uploads.py`): it goes on there, after
                                          any interruption

Invariants: `files/` appears by one rename, after every hash was right; what one device sends never touches what another
sends (a broken one harms only itself). Who is first with all of it has brought it for everybody. Chunks are shared on
the link, not on the disk: a runtime wants each model's files whole.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from cloud.uploads import RESERVED_S, Files, Source, Upload, Wanted
from split.errors import CompanionRefused, InvalidRequest, UnknownModel
from split.graph.card import digest_of_files, file_is
from split.graph.chunks import read_chunks
from split.ids import ModelDigest
from split.transport.channel import Buffer

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PLAIN_NAME = re.compile(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]{0,199}")
"""No path, no control character, no leading dot; 200 bytes and more are left of a file system's 255 for suffixes."""
STEP_BYTES = 16 << 20
"""Room is made as bytes come, this much at a time: an offer alone removes no model."""
PARTIAL_KEPT = 256
"""Models that began to come and that no session uses, the latest of them: what lies there is looked at for each offer,
and an offer without a byte makes a folder."""
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
        self._uploads: dict[tuple[str, str], Upload] = {}
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
        (base / "chunks").unlink(missing_ok=True)
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

    def offer(self, digest: str, device: str, files: Files, chunks: bytes = b"") -> Wanted | None:
        """Take a device's offer: reserve room and say what to send; None when all is here (`path`).

        `chunks`: the pieces that the files are made of, as in `model-offer`; without, whole files are asked for, or
        what an earlier offer with chunks has left to send. Nothing wanted: `finish` it.

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
                return None
            upload = self._uploads.get((base.name, device))
            if upload is None or upload.files != files:
                since_s = self._silent_since_s.setdefault(device, self._now_s())
                upload = Upload(files, base / "incoming" / device, moved_at_s=since_s)
            self._require_room(base, device, files)
            upload.place.mkdir(parents=True, exist_ok=True)
            base.touch()
            with self._books:
                self._uploads[base.name, device] = upload
                self._users[base.name, device] += 1
        try:
            with upload.lock:
                upload.chunks = chunks
                return upload.take_up(self._known_chunks)
        except BaseException:
            self.release(digest, device)
            raise

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
        offered size; refused with DISK_FULL when it is, with BUDGET_EXCEEDED when too little came for `RESERVED_S` and
        others have taken the room since.
        """
        base = self._folder / digest_hex(digest)
        upload = self._uploads.get((base.name, device))
        if _is_whole(base):
            return True
        if upload is None:
            raise InvalidRequest(f"model {digest} was not offered; offer it before sending its files")
        view = memoryview(data)
        with upload.lock:
            # Another device may be first at any moment: then the place of this upload is gone, and the model is whole.
            try:
                self._grant(base, device, upload, view.nbytes)
                before = upload.missing_bytes
                whole = upload.append(index, offset, view) or _is_whole(base)
                if upload.moved(before - upload.missing_bytes, self._now_s()):
                    self._silent_since_s.pop(device, None)
                return whole
            except (FileNotFoundError, InvalidRequest):
                if _is_whole(base):
                    return True
                raise

    def finish(self, digest: str, device: str) -> bool:
        """Check the hashes and put the model in its place; False when bytes are missing still.

        Refused with DIGEST_MISMATCH when a file's hash is wrong: what this device sent is removed. Refused with
        MODEL_UNAVAILABLE when a part that another model had is gone meanwhile. Reads every byte.
        """
        base = self._folder / digest_hex(digest)
        upload = self._uploads.get((base.name, device))
        if upload is None or _is_whole(base):
            return _is_whole(base)
        with upload.lock:
            try:
                if upload.missing_bytes:
                    return _is_whole(base)
                if upload.shared_bytes:
                    with self._disk:
                        self._require_room(base, device, upload.files, now_bytes=upload.shared_bytes)
                upload.assemble()
                with self._disk:
                    if not _is_whole(base):
                        _write_whole(base / "chunks", upload.chunks)
                        _write_whole(base / "manifest.json", msgspec.json.encode(upload.files))
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

    def _known_chunks(self) -> Mapping[bytes, Source]:
        """Where the chunks of the models held lie, by hash; looked at before they are used."""
        known: dict[bytes, Source] = {}
        for place in self._folder.glob("*/files"):
            files = _read_manifest(place.parent)
            if files is None:
                continue
            try:
                chunks = read_chunks((place.parent / "chunks").read_bytes(), [size for _, size, _ in files])
            except (FileNotFoundError, InvalidRequest):  # it came as whole files, or is damaged: nothing to share
                continue
            known.update((chunk.sha256, Source(place / files[chunk.file][0], chunk.offset)) for chunk in chunks)
        return known

    def _is_reserved(self, upload: Upload) -> bool:
        return self._now_s() - upload.moved_at_s <= RESERVED_S

    def _grant(self, base: Path, device: str, upload: Upload, count: int) -> None:
        """See to it that `count` bytes more of this upload have room."""
        if self._is_reserved(upload) and count <= upload.granted_bytes:
            return
        step = max(min(upload.missing_bytes, STEP_BYTES), count)
        with self._disk:
            self._require_room(base, device, upload.files, now_bytes=step)
        upload.granted_bytes = step

    def _require_room(self, base: Path, device: str, files: Files, *, now_bytes: int = 0) -> None:
        """Refuse what does not fit beside what is in use. Then remove what nobody uses, oldest first, until `now_bytes`
        more have room; never before they come."""
        with self._books:
            used = {name for name, _ in self._users}
            uploads = {user: upload for user, upload in self._uploads.items() if self._is_reserved(upload)}
            used |= {path.parent.parent.name for upload in uploads.values() for path in upload.sources}
        wanted = sum(size for _, size, _ in files)
        here = _bytes_below(base / "incoming" / device)
        others = [path for path in self._folder.iterdir() if path != base]
        claims = {path: _claimed_bytes(path, uploads) for path in others}
        in_use = _claimed_bytes(base, uploads, without=device)
        in_use += sum(size for path, size in claims.items() if path.name in used)
        if in_use + wanted > self._budget_bytes:
            raise CompanionRefused(
                "BUDGET_EXCEEDED",
                f"the model has {wanted} bytes, the models in use {in_use}; together they are over the companion's "
                f"models_bytes of {self._budget_bytes}",
            )
        idle = sorted((path for path in claims if path.name not in used), key=lambda path: path.stat().st_mtime)
        for path in [path for path in idle if not _is_whole(path)][:-PARTIAL_KEPT]:
            shutil.rmtree(path, ignore_errors=True)
            idle.remove(path)
        free = shutil.disk_usage(self._folder).free
        if free + here + sum(claims[path] for path in idle) < wanted:
            raise CompanionRefused(
                "DISK_FULL", f"the model has {wanted} bytes, the companion's disk only {free + here} left"
            )
        total = in_use + here + now_bytes + sum(claims[path] for path in idle)
        for path in idle if now_bytes else ():
            if total <= self._budget_bytes and free >= now_bytes:
                break
            shutil.rmtree(path, ignore_errors=True)
            total -= claims[path]
            free += claims[path]


def _claimed_bytes(base: Path, uploads: Mapping[tuple[str, str], Upload], *, without: str = "") -> int:
    """What a model takes or will take: what is being sent (`uploads`) counts in full, the rest as it lies there. Of a
    model that is whole nothing more will come."""
    if _is_whole(base):
        return _bytes_below(base / "files")
    sent = {device: upload for (name, device), upload in uploads.items() if name == base.name}
    promised = sum(upload.total_bytes for device, upload in sent.items() if device != without)
    partial = (place for place in (base / "incoming").glob("*") if place.name not in sent and place.name != without)
    return promised + sum(_bytes_below(place) for place in partial)


def _same_files(known: Files, files: Files) -> bool:
    """The model file may be called otherwise on each device; the names of data files are part of the model."""
    return known[0][1:] == files[0][1:] and known[1:] == files[1:]


def _is_whole(base: Path) -> bool:
    return (base / "files").is_dir()


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


def _write_whole(path: Path, data: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(data)
    fresh.replace(path)
