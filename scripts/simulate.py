"""Run policies over traces in the simulator and say what each costs, beside an oracle's.

    scripts/simulate                                    all traces, a device 1, 5 and 20 times slower, an example
    scripts/simulate --model FOLDER                     costs measured by the workbench (card.json and profile.json)
    scripts/simulate --trace "rate steps" --plot DIR    and a picture for each trace and slowdown

JSON: a list of `{"trace", "slowdown", "policy", …}` with the figures of `agent/replay/summary.py`, `recover_requests`
(one for each step of the trace) and `probe_bytes`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
from rich.console import Console
from rich.table import Table

from agent.replay.example import ENCODED_BYTES, example, known_example
from agent.replay.known import Known
from agent.replay.policies.field import FIELD
from agent.replay.simulate import Simulation
from agent.replay.summary import Summary, requests_to_recover
from agent.replay.traces import STEPS_S, TRACES, lasts_s
from agent.replay.world import Arrival, Outcome, SlowStart, Stages, World
from scripts.simulate_plot import draw
from split.graph.card import read_card
from split.plan.objective import Prices
from split.plan.plan import Plan
from split.plan.power import Power
from split.profiles.contract import Contract, Data, Fidelity, InputContract
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import read_profile

MODEL: Final = "m"
POWER: Final = Power(
    compute_w=3.0, send_w=1.2, receive_w=0.9, wait_w=0.1, measured=False, source="a board of 3 W, made up"
)
PRICES: Final = Prices(per_byte=2e-9, per_companion_ms=1e-8)
"""2 a gigabyte, 0.01 for a companion's thousand seconds: the orders of mobile data and of a shared processor."""
PLOTTED: Final = ("ours", "oracle", "two-way rule")


def measured(folder: Path, *, encoded_bytes: int, image_ms: float) -> Known:
    """A model's costs as the workbench left them. Pictures: as if its first input took them at this size and cost."""
    card, profile = read_card(folder), read_profile(folder)
    if profile is None:
        raise SystemExit(f"scripts/simulate: {folder} holds no sound profile.json; run `isthmus profile` on the model")
    inputs: tuple[InputContract, ...] = ()
    if encoded_bytes:
        inputs = (InputContract(name=card.inputs[0].name, encoded=ImageSpec(resize=224, crop=224)),)
        profile = msgspec.structs.replace(profile, encoded_bytes=encoded_bytes, image_ms=profile.image_ms or image_ms)
    data = Data(
        inputs=inputs,
        codecs=("raw", "fp16", "int8", "klt", "encoded", "jpeg", "webp"),
        fidelity=Fidelity(measure="kl", bound=0.05),
    )
    return Known(card=card, profile=profile, contract=Contract(data=data))


def world(plans: Mapping[Plan, Stages], trace: str, slowdown: float, options: argparse.Namespace) -> World:
    """Requests at a steady rate over one trace: `--per-second`, or what keeps a local device three fifths busy, ten at
    most."""
    moments = TRACES[trace]()
    whole_ms = slowdown * max(stages.head_ms for stages in plans.values())
    per_second = options.per_second or min(10.0, 600.0 / whole_ms)
    count = int(lasts_s(moments) * per_second)
    return World(
        models={MODEL: plans},
        trace=moments,
        arrivals=[
            Arrival(
                at_s=number / per_second,
                model=MODEL,
                deadline_ms=options.deadline_ms,
                encoded_bytes=options.encoded_bytes,
            )
            for number in range(count)
        ],
        slowdown=slowdown,
        power=POWER,
        prices=PRICES,
        jitter=options.jitter,
        seed=options.seed,
        slow_start=SlowStart() if options.slow_start else None,
    )


def run(run_world: World, known: Known, policies: Sequence[str]) -> dict[str, tuple[list[Outcome], int]]:
    """Outcomes and probe bytes of each policy, the oracle's always."""
    found = {}
    for name in dict.fromkeys(("oracle", *policies)):
        simulation = Simulation(run_world, FIELD[name](run_world, {MODEL: known}))
        found[name] = simulation.run(), simulation.probe_bytes
    return found


def figures(
    trace: str, slowdown: float, found: Mapping[str, tuple[list[Outcome], int]], policies: Sequence[str]
) -> list[dict[str, Any]]:
    best = found["oracle"][0]
    return [
        {
            "trace": trace,
            "slowdown": slowdown,
            "policy": name,
            **dataclasses.asdict(Summary.of(outcomes, best)),
            "recover_requests": [requests_to_recover(outcomes, best, step_s) for step_s in STEPS_S.get(trace, ())],
            "probe_bytes": probe_bytes,
        }
        for name, (outcomes, probe_bytes) in found.items()
        if name in policies
    ]


def show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=title, title_style="", title_justify="left")
    table.add_column("policy")
    columns = ("mean ms", "regret", "p95 ms", "missed", "KB", "mJ", "µ money", "switches", "recover", "probe KB")
    for name in columns:
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: float(row["mean_ms"])):
        table.add_row(
            row["policy"],
            f"{row['mean_ms']:.1f}",
            f"{row['regret']:.3f}",
            f"{row['p95_ms']:.1f}",
            str(row["missed"]),
            f"{row['bytes'] / 1e3:.1f}",
            f"{row['joules'] * 1e3:.1f}",
            f"{row['money'] * 1e6:.2f}",
            str(row["switches"]),
            ", ".join(map(str, row["recover_requests"])),
            f"{row['probe_bytes'] / 1e3:.0f}",
        )
    console.print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description="Policies on links that change, simulated.")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="card.json and profile.json; default: an example")
    parser.add_argument("--trace", choices=TRACES, action="append", help="again for more; default: all")
    parser.add_argument("--policy", choices=FIELD, action="append", help="again for more; default: all")
    parser.add_argument("--slowdown", type=float, nargs="+", default=[1.0, 5.0, 20.0], help="of the device")
    parser.add_argument("--companion", type=float, default=1.0, help="its time / the unslowed device's (1)")
    parser.add_argument("--encoded-bytes", type=int, default=ENCODED_BYTES, help="inputs as they come; 0: tensors")
    parser.add_argument("--image-ms", type=float, default=2.0, help="preparing one, where the profile does not say (2)")
    parser.add_argument("--deadline-ms", type=float, default=1000.0)
    parser.add_argument("--per-second", type=float, help="requests; default: up to 10, as the device can")
    parser.add_argument("--jitter", type=float, default=0.05, help="of log(time) of each stage (0.05)")
    parser.add_argument("--slow-start", action="store_true", help="after a pause, as without bbr")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="latency over time: ours, oracle, two-way rule")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    policies = options.policy or list(FIELD)
    plotted = PLOTTED if options.plot is not None else ()
    if options.model is None:
        encoded = options.encoded_bytes > 0
        known = known_example(options.companion, encoded=encoded)
        plans = example(options.companion, encoded=encoded)
    else:
        known = measured(options.model, encoded_bytes=options.encoded_bytes, image_ms=options.image_ms)
        plans = known.stages(options.companion)
    rows: list[dict[str, Any]] = []
    for trace in options.trace or TRACES:
        for slowdown in options.slowdown:
            here = world(plans, trace, slowdown, options)
            found = run(here, known, [*policies, *plotted])
            rows += (here_rows := figures(trace, slowdown, found, policies))
            show(console, f"{trace}, device {slowdown:g} times slower, {len(here.arrivals)} requests", here_rows)
            if options.plot is not None:
                options.plot.mkdir(parents=True, exist_ok=True)
                path = options.plot / f"{trace.replace(' ', '-')}-{slowdown:g}.png"
                lines = {name: found[name][0] for name in PLOTTED}
                draw(lines, here.trace, f"{trace}, device {slowdown:g} times slower", path)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
