"""Certificates renewed: those of devices, when they ask over their channel, and the companion's own.

A device gets a new certificate for the name and role it is authenticated with, whatever its request says, and only
while the one it shows is not revoked. Without the authority's key here (certificates from elsewhere) none is renewed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from cloud.register import Register
from split.errors import IdentityError
from split.identity.credentials import Credentials
from split.identity.files import why_not_switched
from split.transport.channel import PeerIdentity
from split.wire.messages import Renewed

log = logging.getLogger(__name__)

OWN_LOOK_S: Final = 3600.0
"""How often the companion looks at its own certificate, which lives for weeks."""
AGAIN_S: Final = 30.0
"""A device that asks sooner again is refused: a broken one must not fill the register."""
REMEMBERED: Final = 10_000
"""Names with the time they last asked; beyond, the oldest is forgotten."""


class Renewals:
    """`days`: how long a renewed certificate is good."""

    def __init__(self, register: Register, credentials: Credentials, *, days: float) -> None:
        self._register = register
        self._credentials = credentials
        self._days = days
        self._asked_at_s: dict[str, float] = {}

    async def answer(self, peer: PeerIdentity, request: str) -> Renewed:
        """What a device's request becomes; refusals are answers, too."""
        now_s = time.monotonic()
        if now_s - self._asked_at_s.pop(peer.name, -AGAIN_S) < AGAIN_S:
            self._asked_at_s[peer.name] = now_s
            return Renewed(message=f"{peer.name} asked less than {AGAIN_S:g} s ago: ask later")
        self._asked_at_s[peer.name] = now_s
        if len(self._asked_at_s) > REMEMBERED:
            del self._asked_at_s[next(iter(self._asked_at_s))]
        try:
            chain = await asyncio.to_thread(self._sign, request, peer)
        except IdentityError as error:
            log.warning("not renewed device=%s: %s", peer.name, error)
            return Renewed(message=str(error)[:1000])
        log.info("renewed device=%s", peer.name)
        return Renewed(chain=chain.decode())

    def _sign(self, request: str, peer: PeerIdentity) -> bytes:
        self._require_authority()
        return self._register.sign(
            request,
            peer.name,
            "device",
            days=self._days,
            now_s=self._credentials.known_time.now_s(),
            replaces=peer.serial,
        )

    async def keep_own(self) -> None:
        """Renew the companion's certificate two thirds through its life, until cancelled."""
        said = ""
        while True:
            try:
                if await asyncio.to_thread(self.renew_own):
                    log.info("the companion's own certificate is renewed, new connections use it")
            except IdentityError as error:
                if str(error) != said:
                    log.warning("the companion's own certificate is due for renewal: %s", error)
                said = str(error)
            except Exception:
                log.exception("renewing the companion's own certificate failed")
            await asyncio.sleep(OWN_LOOK_S)

    def renew_own(self) -> bool:
        """Whether it was due and is renewed; IdentityError says why it is due and was not."""
        from split.identity.certificates import make_request

        credentials = self._credentials
        now_s = credentials.known_time.now_s()
        if now_s < credentials.validity().renew_at_s:
            return False
        if why := why_not_switched(credentials.identity):
            raise IdentityError(why)
        self._require_authority()
        key, request = make_request()
        chain = self._register.sign(request, credentials.name(), "companion", days=self._days, now_s=now_s)
        credentials.switch(cert=chain, key=key)
        return True

    def _require_authority(self) -> None:
        """Our authority must be one that we trust ourselves, or what it issues would be refused here."""
        ours, trusted = self._register.authority, self._credentials.identity.ca
        try:
            if ours.read_text().strip() in trusted.read_text():
                return
        except OSError as error:
            raise IdentityError(
                f"{error.filename} cannot be read ({error.strerror}): certificates are to be renewed where they were "
                "issued"
            ) from error
        raise IdentityError(f"the authority {ours} is not in identity.ca ({trusted}): what it issues is refused here")
