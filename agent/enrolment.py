"""The device's side of enrolment: a one-time token becomes a key that never left and a certificate for it.

Two connections, as `split/identity/enrolment.py` says: nothing secret is sent before the companion has proved that its
certificate comes from the authority that the token pins.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from split.errors import ConnectionLost, IdentityError, TokenRefused
from split.identity.certificates import make_request
from split.identity.contexts import enrolment_client_context, explain, peer_of
from split.identity.enrolment import (
    CONVERSATION_S,
    MAX_LINE_BYTES,
    AskAuthority,
    AuthorityIs,
    Enrol,
    Enrolled,
    Line,
    NotEnrolled,
    decode_line,
    encode_line,
)
from split.identity.tokens import JoinToken, pin_of
from split.profiles.address import HostPort

_TOKEN_CODES: Final = ("TOKEN_UNKNOWN", "TOKEN_USED", "TOKEN_EXPIRED")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewIdentity:
    """What enrolment makes, PEM, nothing written yet."""

    name: str
    key: bytes
    chain: bytes
    authority: bytes


async def enrol(token: JoinToken, companion: HostPort) -> NewIdentity:
    """Enrol at the companion's `enroll_listen`.

    IdentityError: the companion is not the token's, or a clock is wrong. TokenRefused: the token is no good (its code
    says why). ConnectionLost: nobody there, or no enrolment.
    """
    answer = await _ask(companion, AskAuthority(), token, authority=None)
    if not isinstance(answer, AuthorityIs):
        raise _unexpected(companion, answer)
    if pin_of(answer.authority) != token.pin:
        raise IdentityError(
            f"{companion} has another authority than the one that made the token: nothing was sent to it. Check the "
            "address; if it is right, somebody may be between you and the companion"
        )
    key, request = await asyncio.to_thread(make_request)
    enrolled = await _ask(companion, Enrol(secret=token.secret, request=request), token, authority=answer.authority)
    if isinstance(enrolled, NotEnrolled):
        if enrolled.code in _TOKEN_CODES:
            raise TokenRefused(enrolled.code, f"{companion} refused: {enrolled.message}")
        raise IdentityError(f"{companion} refused: {enrolled.message}")
    if not isinstance(enrolled, Enrolled):
        raise _unexpected(companion, enrolled)
    return NewIdentity(name=enrolled.name, key=key, chain=enrolled.chain.encode(), authority=answer.authority.encode())


async def _ask(companion: HostPort, question: Line, token: JoinToken, *, authority: str | None) -> Line:
    """One connection, one line each way. With `authority`, the other end is verified before the line is sent."""
    where = f"the companion at {companion}"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONVERSATION_S):
            reader, writer = await asyncio.open_connection(
                companion.host,
                companion.port,
                ssl=enrolment_client_context(authority),
                server_hostname="",
                limit=MAX_LINE_BYTES,
            )
            if authority is not None:
                tls = writer.get_extra_info("ssl_object")
                peer_of(tls.getpeercert(), role="companion", der=tls.getpeercert(binary_form=True))
            writer.write(encode_line(question))
            return decode_line(await reader.readline())
    except TimeoutError as error:
        raise ConnectionLost(
            f"{where} did not answer within {CONVERSATION_S:g} s: check the address and the way there"
        ) from error
    except ssl.SSLError as error:
        raise _about_tls(error, where) from error
    except (OSError, ValueError) as error:  # ValueError: a line that is too long
        raise ConnectionLost(
            f"{where} cannot be reached for enrolment ({getattr(error, 'strerror', None) or error}): check host and "
            "port (`enroll_listen`, 7444 by default), that `isthmus-cloud serve` runs there, and that the token, good "
            f"until {_utc(token.expires_at_s)}, lives: the port is open only while one does"
        ) from error
    finally:
        if writer is not None:
            writer.transport.abort()


def _about_tls(error: ssl.SSLError, where: str) -> IdentityError | ConnectionLost:
    known = explain(error, where)
    if known is None:
        return ConnectionLost(
            f"{where} does not speak TLS 1.3 as Isthmus does ({error.args[-1]}): is it `enroll_listen`?"
        )
    if "CERTIFICATE_REQUIRED" in str(error):
        return ConnectionLost(f"{where} wants a certificate: that is `listen`; enrolment is at `enroll_listen`, 7444")
    return IdentityError(f"{known} (this device's clock says {_utc(time.time())})")


def _unexpected(companion: HostPort, answer: Line) -> IdentityError:
    return IdentityError(f"{companion} answered with {type(answer).__name__}: is a newer version of Isthmus there?")


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
