"""One-time join tokens, kept hashed: `tokens/live/<hash>` until used or expired, then `tokens/used/<hash>` for a while.

Using one is the rename from live to used: the file system lets one of two racing uses win, also across processes and
restarts. Who reads the folder learns no secret.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from split.errors import IdentityError, TokenRefused
from split.identity.contexts import NAME
from split.identity.files import make_folder, sync_folder, write_whole
from split.identity.tokens import SECRET_BYTES, JoinToken

MAX_LIVE: Final = 1000
"""Tokens alive at once: a fleet is enrolled in batches of these, and each is looked at once a second."""
REMEMBERED_S: Final = 7 * 86_400.0
"""So long after its expiry a token is still known, to say "used" or "expired" instead of "unknown"."""

_NEW: Final = "`isthmus-cloud token` on the companion makes a new one"


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Of the device; empty: the companion makes one up."""
    expires_at_s: int


class TokenStore:
    """In `folder`, which is made when the first token is."""

    def __init__(self, folder: Path) -> None:
        self._live = folder / "live"
        self._used = folder / "used"
        self._expiries: dict[str, float] = {}
        """File → expiry, of the files that were there the last time."""

    def make(self, *, name: str, pin: bytes, ttl_s: float, now_s: float) -> JoinToken:
        """A new token for one device; `name`: what it will be called, empty: made up at its use.

        IdentityError for a name that is none, too many live tokens, a folder that cannot be written.
        """
        if name and not NAME.fullmatch(name):
            raise IdentityError(f"a name has 1 to 64 characters of a-z, 0-9 and -, got {name!r}")
        for folder in (self._live, self._used):
            make_folder(folder)
        self._forget_old(now_s)
        if self.live(now_s) >= MAX_LIVE:
            raise IdentityError(f"{MAX_LIVE} tokens are alive, the bound: use them, or wait until they have expired")
        token = JoinToken(secret=os.urandom(SECRET_BYTES), pin=pin, expires_at_s=int(now_s + ttl_s))
        kept = _Kept(name=name, expires_at_s=token.expires_at_s)
        write_whole(self._live / _hash(token.secret), msgspec.json.encode(kept), mode=0o600)
        return token

    def use(self, secret: bytes, *, now_s: float) -> str:
        """Use the token up; the name for its device, empty: make one up. TokenRefused says why it is no good."""
        name = _hash(secret)
        kept = _read(self._live / name)
        if kept is None:
            raise self._gone(name, now_s)
        if kept.expires_at_s <= now_s:
            raise TokenRefused("TOKEN_EXPIRED", f"the token has expired; {_NEW}")
        try:
            os.rename(self._live / name, self._used / name)
        except FileNotFoundError:
            raise self._gone(name, now_s) from None
        except OSError as error:
            raise IdentityError(f"the token cannot be marked as used, so it is not: {error.strerror}") from error
        sync_folder(self._used)
        return kept.name

    def give_back(self, secret: bytes) -> None:
        """Undo a `use` after which nothing was issued. IdentityError when that fails: the token stays used."""
        name = _hash(secret)
        try:
            os.rename(self._used / name, self._live / name)
            sync_folder(self._live)
        except OSError as error:
            raise IdentityError(f"the token cannot be given back, so it stays used: {error.strerror}") from error

    def live(self, now_s: float) -> int:
        """How many tokens can be used now. A file is read once: no token is ever changed."""
        try:
            names = [name for name in os.listdir(self._live) if not name.startswith(".")]
        except FileNotFoundError:
            return 0
        known, self._expiries = self._expiries, {}
        for name in names:
            if name in known:
                self._expiries[name] = known[name]
            else:
                kept = _read(self._live / name)
                self._expiries[name] = kept.expires_at_s if kept is not None else 0.0
        return sum(expiry > now_s for expiry in self._expiries.values())

    def _gone(self, name: str, now_s: float) -> TokenRefused:
        if _read(self._used / name) is not None:
            return TokenRefused("TOKEN_USED", f"the token was used already, and each is good for one device; {_NEW}")
        return TokenRefused("TOKEN_UNKNOWN", f"this companion has made no such token, or forgotten it; {_NEW}")

    def _forget_old(self, now_s: float) -> None:
        for folder in (self._live, self._used):
            for path, kept in _all(folder):
                if kept.expires_at_s + REMEMBERED_S < now_s:
                    path.unlink(missing_ok=True)


def _hash(secret: bytes) -> str:
    """The secret is random and long: one round of a plain hash hides it for good."""
    return hashlib.sha256(secret).hexdigest()


def _read(path: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return None


def _all(folder: Path) -> Iterator[tuple[Path, _Kept]]:
    for path in folder.iterdir():
        if not path.name.startswith(".") and (kept := _read(path)) is not None:
            yield path, kept
