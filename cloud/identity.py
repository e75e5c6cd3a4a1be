"""The companion's own authority: where it lies, and how `isthmus-cloud init` makes it together with the companion's
certificate. Making and checking certificates is `split.identity`'s.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from cloud.config import CompanionConfig
from cloud.register import Register
from cloud.tokens import TokenStore
from split.errors import IdentityError
from split.identity.certificates import LEAF_DAYS, make_authority
from split.identity.contexts import Identity
from split.identity.credentials import Credentials
from split.identity.known_time import KnownTime
from split.identity.tokens import JoinToken, pin_of


def authority_folder(config: CompanionConfig) -> Path:
    """Where `ca.pem` and `ca-key.pem` lie."""
    return config.state_dir / "authority"


def tokens_folder(config: CompanionConfig) -> Path:
    """Where one-time join tokens are kept, hashed."""
    return config.state_dir / "tokens"


def known_time(config: CompanionConfig) -> KnownTime:
    """This companion's, as it was kept last."""
    return KnownTime(config.state_dir / "known-time")


def make_token(config: CompanionConfig, *, name: str, ttl_s: float) -> JoinToken:
    """A new one-time token for one device, by the time that the companion will judge it by. IdentityError without an
    authority of this companion's own."""
    if config.enroll_listen is None:
        raise IdentityError("enroll_listen is null in the configuration: no device can enrol here; set HOST:PORT")
    authority = authority_folder(config) / "ca.pem"
    try:
        pin = pin_of(authority.read_text())
    except OSError as error:
        raise IdentityError(
            f"{authority} cannot be read ({error.strerror}): make the authority first (isthmus-cloud init)"
        ) from error
    known, paths = known_time(config), config.identity
    with contextlib.suppress(IdentityError):  # files that cannot serve are said by `serve`
        own = Credentials(Identity(cert=paths.cert, key=paths.key, ca=paths.ca), "companion")
        known.at_least(own.validity().from_s)
    return TokenStore(tokens_folder(config)).make(name=name, pin=pin, ttl_s=ttl_s, now_s=known.now_s())


def make_identity(config: CompanionConfig, name: str) -> list[tuple[str, Path]]:
    """Make the authority, and a companion's certificate at the paths of `config.identity`; what was made, for people.

    IdentityError when any of it exists already (nothing is made then) or cannot be written.
    """
    paths, folder = config.identity, authority_folder(config)
    for path in (folder / "ca.pem", folder / "ca-key.pem", paths.cert, paths.key, paths.ca):
        if path.exists():
            raise IdentityError(f"{path} exists already and is not overwritten: this companion has an identity")
    authority = make_authority(folder)
    made = [authority.cert, authority.key]
    try:
        with tempfile.TemporaryDirectory(prefix=".issuing-", dir=folder) as fresh:
            issued = Register(folder).issue(name, "companion", Path(fresh) / "companion", days=LEAF_DAYS)
            for source, target, mode in (
                (issued.cert, paths.cert, 0o644),
                (issued.key, paths.key, 0o600),
                (issued.ca, paths.ca, 0o644),
            ):
                if target.resolve() != authority.cert.resolve():
                    _place(source, target, mode)
                    made.append(target)
    except IdentityError:
        for path in made:  # half an identity would only stand in the way of the next try
            path.unlink(missing_ok=True)
        raise
    return [
        ("authority", authority.cert),
        ("authority's key (keep it secret)", authority.key),
        ("companion's certificate", paths.cert),
        ("companion's key (keep it secret)", paths.key),
        ("authority for `identity.ca`", paths.ca),
    ]


def _place(source: Path, target: Path, mode: int) -> None:
    """Copy into a new file, never over one that appeared meanwhile."""
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as out:
            out.write(source.read_bytes())
    except OSError as error:
        raise IdentityError(f"{target} cannot be made: {error.strerror}") from error
