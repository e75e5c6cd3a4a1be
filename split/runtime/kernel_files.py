"""Small files that a kernel fills (/proc, /sys, /dev): what is not there, or may not be read, is empty and no error."""

from __future__ import annotations

import os
from pathlib import Path


def read_text(path: Path) -> str:
    """What it says, stripped of blanks and NULs; "" where it says nothing."""
    try:
        return path.read_text(errors="replace").strip().strip("\0")
    except OSError:  # not there, not allowed; a driver with nothing to say answers EAGAIN, EINVAL or ENODATA
        return ""


def read_number(path: Path) -> float | None:
    """The number that it says; None where it says none."""
    return as_number(read_text(path))


def as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def exists(path: Path) -> bool:
    """False where that may not be known, too (`Path.exists` raises then, before Python 3.14)."""
    return os.path.exists(path)
