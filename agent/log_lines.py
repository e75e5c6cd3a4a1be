"""The daemon's log: one line an event on stderr, whatever callers, peers and model files put into it."""

from __future__ import annotations

import logging
import sys


def printable(text: str) -> str:
    """One line: control characters and what no terminal shows as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


class LineFormatter(logging.Formatter):
    """Time, level, place and one line of message; a traceback of ours follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(record.message)
        return super().formatMessage(record)


def log_to_stderr(level: str) -> None:
    """Set the root logger up; `level` as logging names them, in any case."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper())
