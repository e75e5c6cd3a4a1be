"""The milliseconds that cases of the case list name, in real time and with real processes: one figure per case.

A second bound of the same case has the case's id and a word. What asks only the device is in `cases_device.py`, what
needs a link in `cases_link.py`; whatever a case does that takes long asleep goes on beside the others.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import onnx
import onnx.parser

from scripts.benches import cases_device, cases_link
from scripts.benches.cases_device import FOLDER, Taken
from scripts.benches.figure import Figure
from scripts.pair import Pair

IR: Final = '<ir_version: 10, opset_import: ["" : 18]>'
MODELS: Final = {
    "chain": f"{IR} g (float[n, 64] x) => (float[n, 64] y) {{ a = Relu(x)  b = Neg(a)  c = Abs(b)  y = Add(c, a) }}",
    "twin": f"{IR} g (float[n, 64] x) => (float[n, 64] y) {{ a = Abs(x)  b = Neg(a)  y = Add(b, a) }}",
    "sleeper": f"""{IR} g (int64 rounds, float[1] x) => (float[1] y) <bool go = {{1}}> {{
        y = Loop(rounds, go, x) <body = b (int64 i, bool c, float[1] v) => (bool d, float[1] w) {{
            d = Identity(c)  w = Neg(v)
        }}>
    }}""",
}
"""`sleeper` takes as long as a request asks for."""

BOUNDS: Final[dict[str, tuple[float, str]]] = {
    "O-GS-13": (10_000, "a load whose optional step hangs"),
    "O-RT-01": (5_000, "first answer, pinned to one core, the slower of two models"),
    "O-RT-02": (1_000, "a load that hangs is given up at its limit, give or take"),
    "O-RT-02 live": (100, "p99 of /v2/health/live meanwhile"),
    "O-RT-08": (2_000, "first answer of each model after a start, the slowest"),
    "O-OI-10": (50, "a request behind a busy worker ends at its timeout of 500 ms, give or take"),
    "O-OI-11": (200, "from the last of 100 callers who left until nothing waits"),
    "O-OI-11 next": (1_100, "the next caller, behind one request of a second (in proportion to what that took)"),
    "O-OI-12": (1_100, "20 requests with a timeout of 1 s to a model of 2 s, the last to be told"),
    "O-WI-02": (50, "a request for which there is no room behind a companion that stopped reading is answered here"),
    "O-WI-04": (50, "p99 of /v2/health/live while 30 MB go to a companion that stands still 0.4 s of each"),
    "O-WI-11": (1_000, "a request after 100 peers that reset within a frame"),
    "O-WI-13": (5_000, "the agent is stopped while it waits for a companion that is silent"),
    "O-WI-14": (2_000, "a companion that was restarted answers both models again, the slowest time"),
    "O-WI-16": (600, "of one live and three dead companions the live one is connected"),
    "O-WI-17": (10_000, "first split answer after the companion's port opens"),
}
"""Each at most so many ms."""


def prepare() -> None:
    """Lay the models, and have them prepared, measured and brought to the companion once."""
    for name, text in MODELS.items():
        place = FOLDER / "models" / name / "1" / "model.onnx"
        if not place.exists():
            place.parent.mkdir(parents=True)
            onnx.save(onnx.parser.parse_model(text), place)
    golden = FOLDER / "models" / "sleeper" / "golden.npz"
    if not golden.exists():
        np.savez(golden, rounds=np.array(1000), x=np.ones(1, np.float32))
    cases_link.make_impostor()
    cases_device.lay_load_that_hangs()
    if not (FOLDER / "companion-state" / "models").exists():
        with Pair(FOLDER, FOLDER / "models") as pair:
            pair.start_agent(slowdown=1.0)
            cases_link.until_remote(pair)


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    shutil.rmtree(FOLDER / "stuck", ignore_errors=True)
    taken: Taken = {}
    with ThreadPoolExecutor(2) as beside:
        asleep = [beside.submit(one, taken) for one in (cases_device.step_that_hangs, cases_device.load_that_hangs)]
        cases_device.run(taken, quick=quick)
        for one in asleep:
            one.result()
    cases_link.run(taken, quick=quick)
    assert taken.keys() == BOUNDS.keys(), taken.keys() ^ BOUNDS.keys()
    figures = [
        Figure(name=name, value=max(taken[name]), unit="ms", at_most=at_most) for name, (at_most, _) in BOUNDS.items()
    ]
    rows = [
        {
            "case": name,
            "what": what,
            "times": len(taken[name]),
            "best_ms": min(taken[name]),
            "worst_ms": max(taken[name]),
        }
        for name, (_, what) in BOUNDS.items()
    ]
    return figures, rows
