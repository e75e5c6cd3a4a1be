"""The device's certificate is renewed two thirds through its life, over the channel that it authenticates.

The new key is made here and never leaves. Key and certificate are switched together (`split/identity/files.py`); new
connections show them, the running one goes on. A companion that renews nothing, or files that somebody else renews, are
named once in the log and asked again later: a third of the certificate's life is left for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

from split.errors import IdentityError, IsthmusError
from split.identity.credentials import Credentials
from split.identity.files import why_not_switched
from split.wire.messages import Renewed

log = logging.getLogger(__name__)

FIRST_LOOK_S: Final = 5.0
"""After the start: by then a companion that is there is connected."""
LOOK_S: Final = 60.0
"""How often the time is looked at: certificates live for days."""
ANSWER_S: Final = 30.0
"""Signing takes milliseconds; behind a model's weights on a slow link the question and the answer wait."""
RETRY_S: Final = (60.0, 3600.0)
"""The first pause after a failure; it doubles up to the second."""


class Renewal:
    """`ask` sends a request (PKCS#10, PEM) to the companion, False when none is there; `answered` takes its answer."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        ask: Callable[[str], bool],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._credentials = credentials
        self._ask = ask
        self._sleep = sleep
        self._answer: asyncio.Future[Renewed] | None = None
        self._said = ""
        self.renewed = 0
        """Certificates taken since the start."""

    def answered(self, renewed: Renewed) -> None:
        """What the companion sent. One that nobody waits for is dropped: its key is gone."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(renewed)

    async def run(self) -> None:
        """Until cancelled."""
        retry_s = RETRY_S[0]
        await self._sleep(FIRST_LOOK_S)
        while True:
            pause_s = LOOK_S
            try:
                if self._due():
                    await self._renew()
                    self._said, retry_s = "", RETRY_S[0]
            except IsthmusError as error:
                self._say(str(error))
                pause_s, retry_s = retry_s, min(2 * retry_s, RETRY_S[1])
            except Exception:
                log.exception("renewing the certificate failed")
                pause_s, retry_s = retry_s, min(2 * retry_s, RETRY_S[1])
            await self._sleep(pause_s)

    @property
    def until_s(self) -> float:
        """When the certificate ends, seconds since 1970; 0 while its files cannot be read."""
        try:
            return self._credentials.validity().until_s
        except IdentityError:
            return 0.0

    def status(self) -> dict[str, object]:
        """For `isthmus status`: who this device is, until when, and what stands in the way of a renewal."""
        try:
            validity = self._credentials.validity()
            known = {
                "name": self._credentials.name(),
                "until": _utc(validity.until_s),
                "renewed_from": _utc(validity.renew_at_s),
            }
        except IdentityError as error:
            return {"note": str(error)}
        clock = "this host's clock is not set" if self._credentials.known_time.clock_is_behind else ""
        return {**known, "note": self._said or clock}

    def _due(self) -> bool:
        return self._credentials.known_time.now_s() >= self._credentials.validity().renew_at_s

    async def _renew(self) -> None:
        """One try; IdentityError says why it came to nothing."""
        if why := why_not_switched(self._credentials.identity):
            raise IdentityError(why)
        key, request = await asyncio.to_thread(_make_request)
        self._answer = asyncio.get_running_loop().create_future()
        try:
            if not self._ask(request):
                raise IdentityError("no companion is connected that renews certificates")
            async with asyncio.timeout(ANSWER_S):
                renewed = await self._answer
        except TimeoutError:
            raise IdentityError(f"the companion did not answer within {ANSWER_S:g} s") from None
        finally:
            self._answer = None
        if not renewed.chain:
            raise IdentityError(f"the companion does not renew it: {renewed.message}")
        await asyncio.to_thread(self._credentials.switch, cert=renewed.chain.encode(), key=key)
        self.renewed += 1
        log.info("the certificate is renewed, new connections use it")

    def _say(self, why: str) -> None:
        if why != self._said:
            log.warning("the certificate %s is due for renewal: %s", self._credentials.identity.cert, why)
        self._said = why


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _make_request() -> tuple[bytes, str]:
    from split.identity.certificates import make_request  # 10 MB of memory, from the first renewal on

    return make_request()
