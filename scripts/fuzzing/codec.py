"""The compiled core of codec klt under the address and undefined-behaviour sanitizers, with random maps and streams."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from split.codec.laplace import tables

ROOT: Final = Path(__file__).resolve().parents[2]
SANITIZERS: Final = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
COMPILE_S: Final = 120


class NotCompiled(Exception):
    """No C compiler here, or none with sanitizers."""


def run(rounds: int, seed: int, *, timeout_s: float) -> tuple[dict[str, int], str]:
    """What happened in `rounds` rounds from `seed` on, and what was wrong, empty where nothing was."""
    with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-") as folder:
        program, made = Path(folder) / "klt", tables()
        given = Path(folder) / "tables"
        given.write_bytes(made.starts.tobytes() + made.groups.tobytes() + made.low_bits.tobytes())
        sources = [ROOT / "scripts" / "fuzzing" / "klt.c", *sorted((ROOT / "split" / "codec" / "native").glob("*.c"))]
        flags = ("-O1", "-g", "-std=c11", "-ffp-contract=off", *SANITIZERS)
        try:
            subprocess.run(
                ["cc", *flags, *map(str, sources), "-o", str(program), "-lm"],
                capture_output=True,
                text=True,
                check=True,
                timeout=COMPILE_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise NotCompiled(f"cc cannot compile with sanitizers: {getattr(error, 'stderr', '') or error}") from error
        command = [str(program), str(rounds), str(seed), str(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode:
        return {}, f"{done.stdout}{done.stderr}"[:4000] or f"it exited with {done.returncode}"
    return json.loads(done.stdout), ""
