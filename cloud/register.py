"""What the companion's authority has issued, and what of it was taken back: every certificate is signed here.

Beside the authority lie `issued.jsonl`, one line for each certificate, until a year after its end, and `crl.pem`, the
revocation list. Issuing and revoking hold one lock, across processes: what is issued while somebody revokes the same
name is either in the register, and revoked with it, or refused. Nothing here talks to anybody.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec

from split.errors import IdentityError, Revoked
from split.identity.contexts import NAME, Identity, Role
from split.identity.files import own_like_folder, write_whole

COMPACT_BYTES: Final = 1 << 20
"""From here on lines of long expired certificates are thrown out with the next one: some seven thousand lines."""
KEPT: Final = timedelta(days=366)
"""How long an expired certificate stays on record: a connection made with it may still be open, and is to be ended."""
_SERIAL_HEX: Final = 40
"""Digits of the largest serial (RFC 5280 §4.1.2.2: 20 bytes)."""
_OLD_SERIAL_HEX: Final = 16
"""A serial that is not on record must have so many digits: less is a name that nobody has."""


class Issued(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    serial: str
    """Hex."""
    name: str
    role: str
    until: datetime


_decoder: Final = msgspec.json.Decoder(Issued)


class Register:
    """The authority in `folder`, as `isthmus-cloud init` made it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str, role: Role, out: Path, *, days: float) -> Identity:
        """Key and certificate as files in `out`; IdentityError, see `split.identity.certificates.issue`."""
        from split.identity.certificates import issue

        with self._locked():
            identity = issue(self.folder, name, role, out, days=days)
            self._record(identity.cert.read_bytes(), name, role, datetime.now(UTC) + timedelta(days=days))
        return identity

    def sign(
        self, request: str, name: str, role: Role, *, days: float, now_s: float, replaces: int | None = None
    ) -> bytes:
        """The certificate, PEM, for the key of `request` (PKCS#10, PEM) under that name.

        `replaces`: serial of the certificate that is renewed; Revoked when that was taken back. IdentityError for a
        request that is none and an authority that cannot issue.
        """
        from split.identity.certificates import request_key, sign

        key = request_key(request)
        now = datetime.fromtimestamp(int(now_s), UTC)
        with self._locked():
            if replaces is not None and replaces in self.revoked():
                raise Revoked(f"the certificate {replaces:x} of {name} was revoked: enrol anew, with a new token")
            certificate = sign(self.folder, key, name, role, days=days, now=now)
            self._record(certificate, name, role, now + timedelta(days=days))
        return certificate

    def revoke(self, who: str, *, now_s: float) -> list[str]:
        """Take back every device certificate of that name, or the one of that serial (hex); the serials.

        IdentityError when there is none. Revoking again what is revoked changes nothing.
        """
        from split.identity.revocation import write_revocations

        now = datetime.fromtimestamp(int(now_s), UTC)
        wanted = who.lower().removeprefix("0x").replace(":", "")
        with self._locked():
            issued = [one for one in self._lines() if one.role == "device"]
            serials = [one.serial for one in issued if one.name == who]
            if not serials:
                digits = wanted if wanted.strip("0123456789abcdef") == "" else ""
                known = any(int(one.serial, 16) == int(digits, 16) for one in issued) if digits else False
                if not known and not _OLD_SERIAL_HEX <= len(digits) <= _SERIAL_HEX:
                    raise IdentityError(
                        f"no certificate of a device {who!r} is on record in {self.folder}, and it is no serial; "
                        "`openssl x509 -noout -serial -in cert.pem` shows that of a certificate"
                    )
                serials = [f"{int(digits, 16):x}"]
            revoked = self.revoked()
            write_revocations(self.folder, {int(serial, 16): now for serial in serials} | revoked, now=now)
        return serials

    def revoked(self) -> dict[int, datetime]:
        """Serial → when; IdentityError when the list is damaged."""
        from split.identity.revocation import read_revocations, revocation_list

        path = revocation_list(self.folder)
        return read_revocations(path, self.authority) if path.exists() else {}

    def _record(self, certificate: bytes, name: str, role: Role, until: datetime) -> None:
        from split.identity.certificates import serial_of

        assert NAME.fullmatch(name), name
        line = Issued(serial=f"{serial_of(certificate):x}", name=name, role=role, until=until)
        path = self._path
        try:
            if path.exists() and path.stat().st_size > COMPACT_BYTES:
                now = datetime.now(UTC)
                write_whole(path, _lines(one for one in self._lines() if one.until + KEPT > now), mode=0o600)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                own_like_folder(descriptor, self.folder)
                file.write(_lines([line]))
                file.flush()
                os.fsync(descriptor)
        except OSError as error:
            raise IdentityError(f"{path} cannot be written, so nothing is issued: {error.strerror}") from error

    def _lines(self) -> Iterator[Issued]:
        """A line that a crash cut off is skipped: its certificate never left this process."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise IdentityError(f"{self._path} cannot be read: {error.strerror}") from error
        for line in text.splitlines():
            try:
                yield _decoder.decode(line)
            except msgspec.DecodeError:
                continue

    @property
    def _path(self) -> Path:
        return self.folder / "issued.jsonl"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as error:
            raise IdentityError(
                f"{self.authority} does not exist: make the authority first (isthmus-cloud init)"
            ) from error
        except OSError as error:
            raise IdentityError(f"{self.folder} cannot be locked: {error.strerror}") from error
        try:
            own_like_folder(descriptor, self.folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _lines(issued: Iterable[Issued]) -> bytes:
    return b"".join(b"\n" * (number == 0) + msgspec.json.encode(one) + b"\n" for number, one in enumerate(issued))
