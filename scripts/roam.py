"""A device that changes its address under load, as from Wi-Fi to LTE: what becomes of its requests.

    unshare --net python -m scripts.roam FOLDER MODEL [--changes 4]

Runs in a network namespace of its own (as root), which it changes: loopback plays both networks, the companion has one
address, and the device sends to it from another that vanishes while requests are under way; nothing says so to the old
connections. In FOLDER lie `models/MODEL` and what an earlier run has made. Prints one JSON line: `requests`, `lost`,
`wrong`, `remote` (answers of a companion), `connects`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort

from scripts.callers import Callers
from scripts.pair import STATUS, Pair
from split.tensor import Tensors

COMPANION: Final = "10.9.0.1"
DEVICE: Final = ("10.9.0.2", "10.9.0.3")
WORKERS: Final = 4
DIFFERENCE_MAX: Final = 1e-5


def ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], check=True)


def move(*, to: str, away_from: str | None) -> None:
    """From now on this host sends to the companion from another address; the one before is gone."""
    ip(f"address add {to}/32 dev lo")
    ip(f"route replace local {COMPANION} dev lo table local src {to}")
    if away_from is not None:
        ip(f"address del {away_from}/32 dev lo")


def roam(folder: Path, model: str, changes: int) -> dict[str, int]:
    ip("link set lo up")
    ip(f"address add {COMPANION}/32 dev lo")
    move(to=DEVICE[0], away_from=None)
    session = ort.InferenceSession(str(folder / "models" / model / "1" / "model.onnx"))
    shapes = {one.name: [d if isinstance(d, int) else 1 for d in one.shape] for one in session.get_inputs()}

    def draw(dice: np.random.Generator) -> Tensors:
        return {name: dice.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}

    with Pair(folder, folder / "models", companions=2, host=COMPANION) as pair:
        pair.stop_companion(0)  # the relay in front of it would be a second device
        pair.start_agent(slowdown=1.0)
        with Callers(pair, model, draw, workers=WORKERS) as callers:
            for n in range(changes):
                callers.until_remote()
                move(to=DEVICE[(n + 1) % 2], away_from=DEVICE[n % 2])
            callers.until_remote()
        with pair.client() as client:
            connects = int(client.get(STATUS)["companion"]["connects"])
    for failure in callers.failures:
        print(failure, file=sys.stderr)
    wrong = 0
    for answer, inputs in callers.answers:
        for name, expected in zip([one.name for one in session.get_outputs()], session.run(None, inputs), strict=True):
            wrong += bool(np.abs(answer.outputs[name] - expected).max() > DIFFERENCE_MAX * np.abs(expected).max())
    return {
        "requests": sum(callers.counts),
        "lost": len(callers.failures),
        "wrong": wrong,
        "remote": callers.remote,
        "connects": connects,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="roam", description="A device that changes its address under load.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("--changes", type=int, default=4, metavar="N")
    arguments = parser.parse_args()
    print(json.dumps(roam(arguments.folder, arguments.model, arguments.changes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
