"""Compile the core of codec `klt`: hatchling's build hook (pyproject.toml), and a program run by hand.

Without a C compiler, or where it fails, the package is built without the core, with one line that says so: the codec
then runs in plain Python and makes the same bytes. A wheel that has the core is tagged py3-none-<platform>.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
FLAGS: Final = (
    *("-O3", "-std=c11", "-fPIC", "-shared", "-fvisibility=hidden"),
    "-ffp-contract=off",  # one rounding for each operation, as in the fallback
)
"""No -march: what one machine builds runs on every machine of its kind (SSE2 on x86-64, NEON on ARM64)."""
COMPILE_S: Final = 120


def build(root: Path = ROOT, library: Path | None = None, compiler: str | None = None) -> str | None:
    """Compile `split/codec/native/*.c` below `root` to `library` (None: where `split/codec/core.py` looks for it)
    with `compiler` (None: what $CC says, else `cc`).

    None, or why there is no core now; an old one is removed then.
    """
    folder = root / "split" / "codec"
    library = library or folder / f"_native.{sysconfig.get_platform()}.so"
    sources = sorted(map(str, (folder / "native").glob("*.c")))
    command = shlex.split(compiler or os.environ.get("CC") or "cc")
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".native-") as scratch:
        fresh = Path(scratch) / library.name
        try:
            done = subprocess.run(
                [*command, *FLAGS, *sources, "-o", str(fresh), "-lm"],
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
                check=False,
            )
            why = None if done.returncode == 0 else done.stderr.strip()[-400:] or f"it exited with {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why is None:
            fresh.replace(library)  # in one step: whoever has the old one mapped keeps it
            return None
    library.unlink(missing_ok=True)
    return f"{' '.join(command)}: {why}"


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand: no build backend at hand
    pass
else:

    class NativeHook(BuildHookInterface[Any]):
        """Compiles before files are collected, for wheels and editable installs; source archives carry the sources."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel":
                return
            if why := build(Path(self.root)):
                self.app.display_warning(f"isthmus is built without its compiled core ({why})")
                return
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def main() -> int:
    why = build()
    print("isthmus has no compiled core: " + why if why else "compiled the core of codec klt", file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
