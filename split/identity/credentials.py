"""An identity in use: its files as they are now, and the judgement of peers beyond what OpenSSL checks.

Files may change at any time (renewal, cert-manager, a person). Each new connection takes them as they are; files that
do not serve, as half of a new pair does not, are not taken, and those before them stay in use.

Time is OpenSSL's to judge, by the system's clock, unless that clock shows a time that is known to be past
(`known_time.py`): then it is judged here, right after the handshake and before a byte is sent or taken, by the time
known. What is lost then is only "not valid yet", which a lower bound of the time cannot say.
"""

from __future__ import annotations

import logging
import shutil
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from split.errors import ConfigError, IdentityError, IsthmusError, Revoked
from split.identity.contexts import (
    NO_CHECK_TIME,
    Identity,
    Role,
    Validity,
    client_context,
    peer_of,
    server_context,
    validity_of,
)
from split.identity.files import CERT_MODE, KEY_MODE, finish_switch, make_folder, switch_pair, write_whole
from split.identity.known_time import KnownTime
from split.identity.readiness import own_certificate, require_identity

_log = logging.getLogger("isthmus.identity")

_Stamp = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who a verified certificate names."""

    name: str
    serial: int


class Credentials:
    """One program's identity, in its `role`. `revoked`: serials of certificates that are not taken any more."""

    def __init__(
        self,
        identity: Identity,
        role: Role,
        *,
        known_time: KnownTime | None = None,
        revoked: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.identity = identity
        self.role = role
        self.known_time = known_time or KnownTime()
        self._revoked = revoked
        self._context: ssl.SSLContext | None = None
        self._shown: tuple[_Stamp, Mapping[str, Any]] | None = None
        """Our own certificate as peers see it."""
        self._loaded: _Stamp = ()
        """What the files were when the context was made."""
        self._looked_at: _Stamp = ()
        """What they were when they were last looked into, whether they could serve or not."""

    def context(self) -> ssl.SSLContext:
        """For the next connection. IdentityError when the files cannot serve and never did."""
        stamp = self.stamp()
        if self._context is None:
            self._context, self._loaded = self._make(), stamp
        elif stamp not in (self._loaded, self._looked_at):
            try:
                warning = require_identity(self.identity, self.role)
                self._context, self._loaded = self._make(), stamp
            except IsthmusError as error:
                _log.warning("the identity files have changed and are not taken, those before stay in use: %s", error)
            else:
                _log.info("the identity files have changed and are in use from now on %s", warning)
        self._looked_at = stamp
        self._judge_time_here(self._context, self.known_time.clock_is_behind)
        return self._context

    def judge(self, certificate: Any, der: bytes | None) -> Peer:
        """Who the peer is, from the certificate that OpenSSL has verified (`getpeercert`, and in DER).

        IdentityError: not one that this side may talk to. To be called before anything is sent or taken.
        """
        wanted: Role = "companion" if self.role == "device" else "device"
        name = peer_of(certificate, role=wanted, der=der or b"")
        serial = int(certificate["serialNumber"], 16)
        if self.is_revoked(serial):
            raise Revoked(f"the certificate {serial:x} of {name} was revoked: enrol anew, with a new token")
        self._judge_time(name, certificate)
        return Peer(name=name, serial=serial)

    def is_revoked(self, serial: int) -> bool:
        """Whether a certificate of that serial is not taken any more, now."""
        return serial in self._revoked()

    def _judge_time(self, name: str, certificate: Any) -> None:
        """Also where OpenSSL has asked: a clock that was set during the handshake must not let anything through."""
        validity, known_s = validity_of(certificate), self.known_time.now_s()
        until_s = min(validity.until_s, self._issuer_until_s(certificate))
        behind = self.known_time.clock_is_behind
        if known_s > until_s:
            why = " or later (this host's clock says less, and is not set)" if behind else ""
            raise IdentityError(
                f"the certificate of {name} has expired: good until {_day(until_s)}, and it is {_day(known_s)}{why}"
            )
        if not behind and known_s < validity.from_s:
            raise IdentityError(
                f"the certificate of {name} is not valid yet: good from {_day(validity.from_s)}, it is {_day(known_s)}"
            )
        self.known_time.learn(validity.from_s)

    def validity(self) -> Validity:
        """Of our own certificate as it lies there now; IdentityError when the files cannot serve."""
        return validity_of(self._own())

    def name(self) -> str:
        """Ours, from our own certificate as it lies there now; IdentityError when the files cannot serve."""
        return peer_of(self._own(), role=self.role)

    def switch(self, *, cert: bytes, key: bytes) -> None:
        """Put a renewed certificate (chain) and its key, PEM, in place of ours, if every peer would take it.

        IdentityError: it would not be taken, is for another name, or cannot be written; then ours stays.
        """
        folder = self.identity.cert.parent / ".renewing"
        make_folder(folder)
        try:
            fresh = Identity(cert=folder / "cert.pem", key=folder / "key.pem", ca=self.identity.ca)
            write_whole(fresh.cert, cert, mode=CERT_MODE)
            write_whole(fresh.key, key, mode=KEY_MODE)
            name = peer_of(own_certificate(fresh, self.role), role=self.role)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if name != self.name():
            raise IdentityError(f"the renewed certificate is for {name!r}, ours is for {self.name()!r}: not taken")
        switch_pair(self.identity, cert=cert, key=key)

    def require(self) -> str:
        """At the start: finish a renewal that a crash cut short, hold the files against each other, learn the time.

        A sentence about what is wrong only for now, or "". ConfigError when the files cannot serve.
        """
        try:
            finish_switch(self.identity)
            warning = require_identity(self.identity, self.role)
            self.known_time.at_least(self.validity().from_s)
        except IdentityError as error:
            raise ConfigError(f"identity: {error}") from error
        return "" if self.known_time.clock_is_behind else warning

    def _own(self) -> Mapping[str, Any]:
        stamp = self.stamp()
        if self._shown is None or self._shown[0] != stamp:
            self._shown = stamp, own_certificate(self.identity, self.role)
        return self._shown[1]

    def _make(self) -> ssl.SSLContext:
        make = client_context if self.role == "device" else server_context
        return make(self.identity)

    def stamp(self) -> _Stamp:
        """Another value once any of the files has changed; links are followed, as into a Kubernetes secret."""
        found: list[object] = []
        for path in (self.identity.cert, self.identity.key, self.identity.ca):
            try:
                facts = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size))
        return tuple(found)

    @staticmethod
    def _judge_time_here(context: ssl.SSLContext, here: bool) -> None:
        flags = int(context.verify_flags)
        wanted = flags | NO_CHECK_TIME if here else flags & ~NO_CHECK_TIME
        if wanted != flags:
            context.verify_flags = ssl.VerifyFlags(wanted)

    def _issuer_until_s(self, certificate: Any) -> float:
        """When the authority's own certificate ends: the latest, where the file holds several of one name."""
        assert self._context is not None, "a peer was verified with it"
        ends = [
            validity_of(authority).until_s
            for authority in self._context.get_ca_certs()
            if authority["subject"] == certificate["issuer"]
        ]
        return max(ends, default=float("inf"))


def credentials_of(identity: Identity | Credentials, role: Role) -> Credentials:
    """Files alone become credentials with nothing known about time or revocation."""
    return identity if isinstance(identity, Credentials) else Credentials(identity, role)


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
