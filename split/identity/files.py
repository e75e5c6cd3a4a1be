"""Writing identity files so that a crash at any moment leaves something that serves.

One file: written beside, synced, renamed. A pair (certificate and key, two paths) cannot be renamed at once, so both go
into one journal file first; whoever finds the journal finishes the switch. Nothing here reads what the files mean.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Final

from split.errors import IdentityError
from split.identity.contexts import Identity

_KEY: Final = re.compile(rb"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?-----END \1-----\n?", re.DOTALL)
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)

CERT_MODE: Final = 0o644
KEY_MODE: Final = 0o600


def write_whole(path: Path, data: bytes, *, mode: int) -> None:
    """`path` holds either what it held or `data`, whatever happens meanwhile; IdentityError when it cannot be."""
    try:
        descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)
                own_like_folder(descriptor, path.parent)
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.replace(beside, path)
        except BaseException:
            os.unlink(beside)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise IdentityError(f"{path} cannot be written: {error.strerror}") from error


def own_like_folder(descriptor: int, folder: Path) -> None:
    """What root makes in a folder of the daemon's user is that user's: an administrator's commands must not leave files
    that the daemon cannot read. For others nothing changes."""
    if os.geteuid() == 0:
        facts = folder.stat()
        os.fchown(descriptor, facts.st_uid, facts.st_gid)


def sync_folder(folder: Path) -> None:
    """What was renamed in the folder stays renamed after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """With all above it, for the owner alone; IdentityError when it cannot be made or written."""
    try:
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(missing, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                own_like_folder(descriptor, missing.parent)
            finally:
                os.close(descriptor)
        folder.mkdir(exist_ok=True)  # what is there and no folder is an error
    except OSError as error:
        raise IdentityError(f"the folder {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise IdentityError(f"the folder {folder} may not be written by user {os.geteuid()}: correct its owner or mode")


def switch_pair(identity: Identity, *, cert: bytes, key: bytes) -> None:
    """Put a new certificate (chain) and its key, PEM, at the paths of `identity`; their modes stay as they were.

    IdentityError when a folder cannot be written. After a crash in here `finish_switch` leaves the new pair.
    """
    write_whole(_journal(identity), key + cert, mode=KEY_MODE)
    finish_switch(identity)


def finish_switch(identity: Identity) -> bool:
    """Do what is left of a switch that was begun; whether there was one. To be called before the pair is first read."""
    journal = _journal(identity)
    try:
        data = journal.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise IdentityError(f"{journal}, a renewed certificate and key, cannot be read: {error.strerror}") from error
    key, certs = _KEY.search(data), b"".join(_CERTIFICATE.findall(data))
    if key is None or not certs:
        raise IdentityError(f"{journal} is no renewed certificate and key: remove it, what is in use stays")
    if identity.cert == identity.key:
        write_whole(identity.key, data, mode=_mode(identity.key, KEY_MODE))
    else:
        write_whole(identity.key, key[0], mode=_mode(identity.key, KEY_MODE))
        write_whole(identity.cert, certs, mode=_mode(identity.cert, CERT_MODE))
    try:
        journal.unlink(missing_ok=True)
    except OSError as error:
        raise IdentityError(f"{journal} cannot be removed: {error.strerror}") from error
    return True


def why_not_switched(identity: Identity) -> str:
    """Why this program cannot renew the pair by itself, as a sentence; "" where it can."""
    for path in (identity.cert, identity.key):
        if path.is_symlink():
            return f"{path} is a link: whoever made it renews what it leads to"
        if not os.access(path.parent, os.W_OK | os.X_OK):
            return (
                f"the folder {path.parent} may not be written by user {os.geteuid()}: renew the certificate from "
                "outside, or let `identity` lie in a folder of state_dir"
            )
    return ""


def _journal(identity: Identity) -> Path:
    return identity.cert.with_name(f"{identity.cert.name}.renewed")


def _mode(path: Path, default: int) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return default
    except OSError as error:
        raise IdentityError(f"{path} cannot be looked at: {error.strerror}") from error
