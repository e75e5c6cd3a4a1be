"""A fingerprint is kept in the state folder and taken again when what it depends on has changed.

`fingerprint_key` names what that is, part by part, so that a reason can be given. The facts and sensors in a kept
fingerprint are of then; `kept` reads them anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from agent.fingerprint import Fingerprint, refreshed, seen_accelerators
from agent.sensors import throttled
from split.runtime.kernel_files import read_text
from split.runtime.machine import Machine
from split.runtime.segment import OrtEngine

FILE: Final = "fingerprint.json"


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    key: dict[str, str]
    fingerprint: Fingerprint


def fingerprint_key(machine: Machine, root: Path = Path("/"), *, runtime: str = "") -> dict[str, str]:
    """What the rates hold for: part → its state. `runtime`: the engine's name; "" asks it.

    Heat lowers the highest clock as a policy does: while a cooling device acts it says nothing and is left out, so that
    what was taken before still holds. (One taken then does not hold afterwards.)
    """
    hardware = (machine.board, machine.architecture, machine.cpu_model, machine.cpu_features, machine.memory_bytes)
    kinds = [(group.capacity, group.max_mhz, len(group.cores)) for group in machine.groups]
    policies = sorted(root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_max_freq"))
    key = {
        "hardware": hashlib.sha256(repr((hardware, kinds)).encode()).hexdigest()[:16],
        "runtime": f"{runtime or OrtEngine().name}, numpy {np.__version__}",
        "governor": ", ".join(machine.governors),
        "highest clock": ", ".join(sorted({read_text(policy) for policy in policies})),
        "online cores": read_text(root / "sys/devices/system/cpu/online") or str(machine.cores),
        "accelerators": ", ".join(seen_accelerators(root)),
        "quota": f"{machine.quota_cores}, {machine.threads} threads",
    }
    if throttled(root):
        del key["highest clock"]
    return key


def keep(fingerprint: Fingerprint, key: Mapping[str, str], folder: Path) -> str:
    """Write it down in one step. Why that failed; "" when it did not."""
    fresh = folder / f"{FILE}.new.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(_Kept(key=dict(key), fingerprint=fingerprint))))
        fresh.replace(folder / FILE)
    except OSError as error:
        with contextlib.suppress(OSError):  # nothing of it stays where there was too little room
            fresh.unlink(missing_ok=True)
        return f"the fingerprint cannot be kept in {folder}: {error.strerror or error}"
    return ""


def kept(key: Mapping[str, str], folder: Path, root: Path = Path("/")) -> tuple[Fingerprint | None, str]:
    """The one that holds for `key`, with its facts and sensors as they are now; or None and why, as a clause."""
    try:
        found = msgspec.json.decode((folder / FILE).read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None, "none was taken yet"
    except (OSError, msgspec.MsgspecError) as error:
        return None, f"the last one cannot be read ({error})"
    changed = [part for part in key if found.key.get(part) != key[part]]
    if changed:
        return None, f"changed since the last one: {', '.join(changed)}"
    return refreshed(found.fingerprint, root), ""
