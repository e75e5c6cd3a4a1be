"""Runs the differential test in a child process: a model that kills the runtime costs one graph, not the run.

The child (`python -m scripts.fuzzing.run SEED CUTS`) draws graphs from SEED on until it is ended. For each it prints a
line when it begins, one when the runtime has taken the whole, and the tally of that graph.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from scripts.fuzzing.cuts import Tally, Wrong, judge
from scripts.fuzzing.graphs import random_graph

ROOT: Final = Path(__file__).resolve().parents[2]


def fuzz_cuts(
    seed: int, *, graphs: int, cuts_max: int, on_graph: Callable[[Tally], None] = lambda tally: None
) -> Tally:
    """Draw graphs from this seed on until `graphs` of them are valid; at most `cuts_max` cuts of each are run."""
    tally = Tally()
    while tally.graphs < graphs:
        seed = _until_it_dies(seed, tally, graphs, cuts_max, on_graph)
    return tally


def _until_it_dies(seed: int, tally: Tally, graphs: int, cuts_max: int, on_graph: Callable[[Tally], None]) -> int:
    """Add what a child finds from this seed on; returns the seed to go on with when it died."""
    command = [sys.executable, "-m", "scripts.fuzzing.run", str(seed), str(cuts_max)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        valid = False
        for line in child.stdout:
            message = json.loads(line)
            if "begins" in message:
                seed, valid = message["begins"], False
            elif "valid" in message:
                valid = True
            else:
                tally.add(_tally(message))
                on_graph(tally)
                if tally.graphs >= graphs:
                    child.kill()
                    return seed + 1
        status = child.wait()
    if status >= 0:
        raise RuntimeError(f"{' '.join(command)} ended with {status} at seed {seed}; run it by hand to see why")
    # It died within this seed: of the whole (no graph then), or of a half.
    tally.add(Tally(graphs=1, cuts=1, unopened=1) if valid else Tally(rejected=1))
    return seed + 1


def _tally(message: dict[str, Any]) -> Tally:
    wrong = [Wrong(**failure) for failure in message.pop("wrong")]
    return Tally(**message | {"wrong": wrong, "refusals": Counter(message["refusals"])})


def _say(out: IO[str], message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def main() -> None:
    seed, cuts_max = (int(word) for word in sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-") as folder:
        while True:
            _say(sys.stdout, {"begins": seed})
            tally = Tally()
            judge(
                random_graph(seed),
                Path(folder),
                tally,
                cuts_max=cuts_max,
                on_valid=lambda: _say(sys.stdout, {"valid": True}),
            )
            plain = {field.name: getattr(tally, field.name) for field in dataclasses.fields(tally)}
            _say(sys.stdout, plain | {"wrong": [dataclasses.asdict(failure) for failure in tally.wrong]})
            seed += 1


if __name__ == "__main__":
    main()
