"""The revocation list as the running companion knows it: read at the start, looked at every second, obeyed at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final

from cloud.register import Register
from split.errors import ConfigError, IdentityError
from split.identity.revocation import revocation_list

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0


class Revocations:
    """`on_change` is called with all serials whenever there are others than before."""

    def __init__(self, register: Register) -> None:
        self.on_change: Callable[[Collection[int]], None] = lambda serials: None
        self.serials: frozenset[int] = frozenset()
        self._register = register
        self._path = revocation_list(register.folder)
        self._file_was: tuple[int, int, int] | None = None

    def start(self) -> None:
        """ConfigError when there is a list and it cannot be read: to serve without it would let the revoked in."""
        try:
            self.look()
        except IdentityError as error:
            raise ConfigError(str(error)) from error

    def look(self) -> None:
        """Take the list as it is now; IdentityError when it is damaged, and then the one before stays in force."""
        try:
            facts = self._path.stat()
        except FileNotFoundError:
            return  # never was one; or somebody removed it, which takes nothing back
        file_is = facts.st_ino, facts.st_mtime_ns, facts.st_size
        if file_is == self._file_was:
            return
        self._file_was = file_is
        serials = frozenset(self._register.revoked())
        if serials != self.serials:
            log.info("revocation list read serials=%d", len(serials))
            self.serials = serials
            self.on_change(serials)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except IdentityError as error:
                log.error("%s; the list before it stays in force", error)
