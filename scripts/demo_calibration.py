"""The demo's calibration: what `isthmus calibrate` makes of some photographs, once; afterwards it lies in the cache."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rich.console import Console

from scripts import models
from scripts.pair import PROGRAMS, NotStarted
from split.codec.calibration import CALIBRATION_FILE, CALIBRATION_VERSION

CACHE: Final = models.ROOT / ".cache" / "demo"
PACKAGE: Final = "foolbox"
"""All of its photographs, 20 in 2 MB: none of them is one that the demo asks about."""


def photographs() -> list[Path]:
    """What it is calibrated on; Unavailable when they cannot be had."""
    return [path for kind in ("calibration", "test") for path in models.photographs(kind, PACKAGE)]


def calibration(console: Console, model_path: Path) -> Path:
    """The sidecar of the model (its contract two folders up), made where the cache does not hold it, which takes a
    minute of two cores, with progress on stderr; NotStarted where it fails, Unavailable without photographs."""
    photos = photographs()
    kept = CACHE / key([model_path, model_path.parents[1] / "contract.yaml", *photos]) / CALIBRATION_FILE
    if kept.exists():
        return kept
    console.print(f"Calibrating codec klt on {len(photos)} photographs, once: up to a minute …")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="isthmus-demo-photos-") as folder:
        for photo in photos:
            shutil.copy(photo, folder)
        command = [str(PROGRAMS / "isthmus"), "calibrate", str(model_path), "--inputs", folder, "--out", str(kept)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise NotStarted(f"isthmus calibrate ended with {done.returncode}; what it said stands above")
    return kept


def key(files: Iterable[Path]) -> str:
    """16 hex digits over what these files hold and the sidecar's version; their names and order count, too."""
    digest = hashlib.sha256(repr(CALIBRATION_VERSION).encode())
    for file in files:
        digest.update(repr((file.name, hashlib.sha256(file.read_bytes()).hexdigest())).encode())
    return digest.hexdigest()[:16]
