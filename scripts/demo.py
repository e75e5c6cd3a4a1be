"""The demonstration: a real network on a real photo, a device daemon and a companion as two processes, and for each
condition what was chosen beside what every road not taken measured. Then the companion is killed under load.

Emulated, and labelled so: the link (a user-space relay) and the device's speed (`emulation.slowdown`).
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts import models
from scripts.client import Answer, Client, Refused
from scripts.demo_calibration import calibration
from scripts.demo_conditions import (
    ALL_ROADS,
    CONDITIONS,
    MODEL,
    START,
    Condition,
    lay_models,
    make_inputs,
    shipped_contract,
)
from scripts.pair import NotStarted, Pair
from split.codec.fidelity import divergence
from split.profiles.contract import Fidelity
from split.tensor import Tensors

LABEL: Final = "emulated: the link (user-space relay, loopback) and the device's speed (emulation.slowdown)"

WARM_UP_ROUNDS: Final = 3
SETTLE_REQUESTS: Final = 6
CONNECT_TIMEOUT_S: Final = 30.0

KILL_REQUESTS: Final = 200
KILL_AFTER: Final = 60
DOWN_S: Final = 2.0
CALLERS: Final = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """One measured request."""

    answer: Answer
    about: int
    """Number of its input."""
    sent_bytes: int
    """What passed the link towards the companion meanwhile: the payload with all framing, TLS, and what else passed."""


@dataclass(slots=True)
class Road:
    """What one road measured under one condition."""

    asked: list[Asked] = field(default_factory=list)
    reason: str = ""
    """Why it could not or may not run."""

    @property
    def measured_ms(self) -> float | None:
        return statistics.median(a.took_ms for a in self._answers()) if self.asked else None

    @property
    def spread_ms(self) -> float:
        """Median absolute deviation."""
        times = [a.took_ms for a in self._answers()]
        return statistics.median(abs(t - statistics.median(times)) for t in times)

    @property
    def sent_bytes(self) -> float:
        """Mean over inputs of the median over requests: what passed beside a request is in few of them."""
        by_input: dict[int, list[int]] = {}
        for one in self.of_the_usual_plan():
            by_input.setdefault(one.about, []).append(one.sent_bytes)
        return statistics.mean(statistics.median(sent) for sent in by_input.values())

    def distance(self, measure: str, expected: Mapping[int, Tensors]) -> float:
        """Mean over inputs of `measure` against the outputs that are expected for each."""
        by_input = {one.about: one.answer.outputs["logits"] for one in self.of_the_usual_plan()}
        return statistics.mean(
            divergence(measure, found, expected[about]["logits"]) for about, found in by_input.items()
        )

    def as_json(self) -> dict[str, Any]:
        usual = self._answers()
        first = usual[0] if usual else None
        found: dict[str, Any] = {
            "placement": first.placement if first else None,
            "cut": first.cut if first else None,
            "codec": first.codec if first else None,
            "predicted_ms": _rounded(statistics.median(a.predicted_ms for a in usual)) if usual else None,
            "measured_ms": _rounded(self.measured_ms),
        }
        return found if usual else found | {"reason": self.reason}

    def of_the_usual_plan(self) -> list[Asked]:
        """Requests by the plan that ran most often (the decider may explore, or change its mind once)."""
        if not self.asked:
            return []
        ((usual, _),) = collections.Counter(one.answer.plan for one in self.asked).most_common(1)
        return [one for one in self.asked if one.answer.plan == usual]

    def _answers(self) -> list[Answer]:
        return [one.answer for one in self.of_the_usual_plan()]


@dataclass(frozen=True, slots=True)
class Verdict:
    condition: Condition
    chosen: Road
    roads: dict[str, Road]
    top1: int

    @property
    def best_ms(self) -> float:
        return min(road.measured_ms for road in self.roads.values() if road.measured_ms is not None)

    @property
    def right(self) -> bool:
        """Whether what was chosen is as fast as the best road, but for the noise of both."""
        assert self.chosen.measured_ms is not None
        best = min((r for r in self.roads.values() if r.asked), key=lambda r: r.measured_ms or 0.0)
        noise_ms = max(min(2 * (best.spread_ms + self.chosen.spread_ms), 0.2 * self.best_ms), 0.05 * self.best_ms, 1.0)
        return self.chosen.measured_ms <= self.best_ms + noise_ms

    def as_json(self) -> dict[str, Any]:
        alternatives = []
        for name, road in self.roads.items():
            found = road.as_json()
            if not road.asked:
                wished = self.condition.roads[name]
                found |= {"placement": wished["mode"], "codec": wished.get("codec")}
            alternatives.append(found)
        return {"name": self.condition.name, "chosen": self.chosen.as_json(), "alternatives": alternatives}


def ask(client: Client, inputs: Tensors, wishes: Mapping[str, str]) -> Answer | str:
    """The answer, or why this road is closed: refused, or answered by another road than the one wished for."""
    try:
        answer = client.infer(MODEL, inputs, **wishes)
    except Refused as error:
        return str(error)
    if answer.placement != wishes.get("mode", answer.placement):
        return answer.fallback or "the companion is out of reach: answered here"
    return answer


def start_device(console: Console, pair: Pair, slowdown: float) -> None:
    """(Re)start the daemon behind a progress bar: the first time it cuts the model and profiles itself."""
    if not console.is_terminal:
        pair.start_agent(slowdown=slowdown)
        return
    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting the device daemon", total=1.0)

        def show(what: str, ratio: float) -> None:
            progress.update(task, description=what, completed=ratio)

        pair.start_agent(slowdown=slowdown, on_progress=show)


def wait_for_companion(pair: Pair, client: Client, inputs: Tensors, wishes: Mapping[str, str]) -> None:
    """Until the companion has the model, answers with it as wished, and all cuts were compared on both sides."""
    deadline_at_s = time.monotonic() + CONNECT_TIMEOUT_S
    while isinstance(found := ask(client, inputs, wishes), str):
        if time.monotonic() > deadline_at_s:
            raise NotStarted(f"the companion did not answer within {CONNECT_TIMEOUT_S:.0f} s: {found}")
        time.sleep(0.25)
    pair.wait_until_idle()


def try_out(client: Client, condition: Condition, inputs: Sequence[Tensors], passed: Callable[[], int]) -> Verdict:
    """Auto and each forced road, interleaved, after a warm-up from which the estimates settle; each input as often as
    any other. `passed`: bytes that have passed the link towards the companion."""
    roads = {name: Road(reason=condition.left_out.get(name, "")) for name in condition.roads}
    for turn in range(WARM_UP_ROUNDS):
        for name, wishes in condition.roads.items():
            if not roads[name].reason and isinstance(found := ask(client, inputs[turn % len(inputs)], wishes), str):
                roads[name].reason = found
    for turn in range(SETTLE_REQUESTS):
        ask(client, inputs[turn % len(inputs)], {})
    chosen = Road()

    def measure(road: Road, wishes: Mapping[str, str], about: int) -> None:
        before = passed()
        if isinstance(found := ask(client, inputs[about], wishes), Answer):
            road.asked.append(Asked(found, about, passed() - before))
        else:
            road.reason = found

    order: list[tuple[Road, Mapping[str, str]]] = [(chosen, {})]
    order += [(roads[name], wishes) for name, wishes in condition.roads.items() if not roads[name].reason]
    for turn in range(-(-condition.rounds // len(inputs)) * len(inputs)):
        # Shuffled, not rotated: rotation leaves each road the same predecessor, whose warm caches it would profit from.
        for road, wishes in random.Random(turn).sample(order, len(order)):
            measure(road, wishes, turn % len(inputs))
    if not chosen.asked:
        raise NotStarted(f"{condition.name}: no answer at all: {chosen.reason}")
    top1 = int(np.argmax(chosen.asked[-1].answer.outputs["logits"]))
    return Verdict(condition, chosen, roads, top1)


@dataclass(slots=True)
class Killing:
    """200 requests while the companion dies and comes back."""

    answered: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wrong: int = 0
    back_after_s: float | None = None
    """From its restart to the first answer with its help."""

    @property
    def failure(self) -> str:
        """What must not happen whatever becomes of the companion, as a sentence; empty when it did not."""
        if not self.answered:
            why = f", the first because: {self.lost[0]}" if self.lost else ""
            return f"none of {KILL_REQUESTS} requests was answered{why}"
        if self.lost or self.wrong:
            return f"of {KILL_REQUESTS} requests {len(self.lost)} were lost and {self.wrong} got a wrong label"
        return ""

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": KILL_REQUESTS,
            "answered": len(self.answered),
            "lost": len(self.lost),
            "slowest_ms": _rounded(max((a.took_ms for a in self.answered), default=None)),
        }


def kill_under_load(pair: Pair, inputs: Tensors, top1: int) -> Killing:
    """Two callers send one request after the other; SIGKILL in between, and a new companion two seconds later."""
    killing = Killing()
    lock = threading.Lock()
    left = iter(range(KILL_REQUESTS))
    half_way = threading.Event()
    restarted_at_s = 0.0

    def call() -> None:
        nonlocal restarted_at_s
        with pair.client() as client:
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                try:
                    answer = client.infer(MODEL, inputs)
                except (Refused, OSError) as error:
                    with lock:
                        killing.lost.append(str(error))
                    continue
                with lock:
                    killing.answered.append(answer)
                    killing.wrong += int(np.argmax(answer.outputs["logits"])) != top1
                    if len(killing.answered) >= KILL_AFTER:
                        half_way.set()
                    if killing.back_after_s is None and restarted_at_s and answer.placement != "local":
                        killing.back_after_s = time.monotonic() - restarted_at_s

    callers = [threading.Thread(target=call) for _ in range(CALLERS)]
    for caller in callers:
        caller.start()
    half_way.wait(timeout=120)
    pair.kill_companion()
    time.sleep(DOWN_S)
    pair.start_companion()
    restarted_at_s = time.monotonic()
    for caller in callers:
        caller.join()
    return killing


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 2)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def show_table(console: Console, verdicts: list[Verdict]) -> None:
    table = Table(title=f"What was chosen, and what each road measured (median ms)\n{LABEL}", title_style="")
    table.add_column("condition")
    table.add_column("chosen", style="bold")
    for name in ("predicted", "measured", *ALL_ROADS):
        table.add_column(name, justify="right")
    table.add_column("right?", justify="center")
    for verdict in verdicts:
        chosen = verdict.chosen.as_json()
        plan = " ".join(filter(None, (chosen["placement"], (chosen["cut"] or "")[:6], chosen["codec"])))
        cells = []
        for name in ALL_ROADS:
            measured_ms = verdict.roads[name].measured_ms if name in verdict.roads else None
            text = _ms(measured_ms) if name in verdict.roads else ""
            cells.append(f"[bold green]{text}[/]" if measured_ms == verdict.best_ms else text)
        right = "✓" if verdict.right else f"+{100 * (verdict.chosen.measured_ms or 0) / verdict.best_ms - 100:.0f} %"
        row = [verdict.condition.name, plan, _ms(chosen["predicted_ms"]), f"[bold]{_ms(chosen['measured_ms'])}[/]"]
        table.add_row(*row, *cells, right)
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for verdict in verdicts:
        for name, road in verdict.roads.items():
            if not road.asked:
                reasons.setdefault(road.reason, []).append(f"{name} ({verdict.condition.name})")
    console.print(
        "Green: the fastest road. ✓: what was chosen is as fast, but for noise. - : could not or may not run:"
    )
    for reason, where in reasons.items():
        console.print(f"  {reason}: {'; '.join(where)}", style="dim", highlight=False)


def show_sent(console: Console, verdict: Verdict, fidelity: Fidelity) -> None:
    """What each road sent, and how far its answers are from the unsplit model's, which are those of the road local."""
    expected = {one.about: one.answer.outputs for one in verdict.roads["local"].of_the_usual_plan()}
    told = []
    for name, road in verdict.roads.items():
        if road.asked and name != "local":
            codec = road.as_json()["codec"]
            far = road.distance(fidelity.measure, expected)
            told.append(f"{codec} {road.sent_bytes / 1000:.1f} KB, {fidelity.measure} {far:.3f}")
    console.print(
        f"{verdict.condition.name}: sent a request, and how far the answers are from the unsplit model's (means over "
        f"{len(expected)} photos; the contract's bound for the mean is {fidelity.measure} {fidelity.bound:g}):\n  "
        + "; ".join(told),
        highlight=False,
    )


def show_killing(console: Console, killing: Killing) -> None:
    placements = collections.Counter(a.placement for a in killing.answered)
    fallbacks = sum(1 for a in killing.answered if a.fallback)
    console.print(
        f"\n[bold]{KILL_REQUESTS} requests while the companion was killed (SIGKILL) and restarted[/]: "
        f"answered {len(killing.answered)}, lost {len(killing.lost)}, wrong label {killing.wrong}, "
        f"slowest {_ms(max((a.took_ms for a in killing.answered), default=None))} ms"
    )
    answered_by = ", ".join(f"{placement} {count}" for placement, count in placements.most_common())
    back = "not yet" if killing.back_after_s is None else f"{killing.back_after_s:.1f} s after the restart"
    console.print(f"answered by: {answered_by}; {fallbacks} begun remotely and finished here; remote use back: {back}")
    for error in killing.lost[:3]:
        console.print(f"lost: {error}", style="red")


def run(console: Console, folder: Path) -> tuple[dict[str, Any], str]:
    """The whole story: what was measured, and what went wrong while the companion died (empty: nothing)."""
    console.print(f"[bold]Isthmus[/]: one photo, one network, two processes. {LABEL}.\n")
    sidecar = calibration(console, models.lay_in_repository(MODEL) / "1" / "model.onnx")
    repository = folder / "models"
    lay_models(repository, sidecar)
    inputs = make_inputs()
    labels = models.imagenet_labels()
    verdicts: list[Verdict] = []
    with Pair(folder, repository) as pair:
        running: tuple[float, str, bool] | None = None
        for condition in CONDITIONS:
            first, split = inputs[condition.input][0], condition.roads["best split"]
            over = START if condition.calibrated else condition
            pair.link(rtt_ms=over.rtt_ms, rate_mbit=over.rate_mbit, down_mbit=over.down_mbit)
            if running != (condition.slowdown, condition.privacy, condition.calibrated):
                lay_models(repository, sidecar, privacy=condition.privacy, calibrated=condition.calibrated)
                start_device(console, pair, condition.slowdown)
                running = (condition.slowdown, condition.privacy, condition.calibrated)
            with pair.client() as client:
                if condition.down:
                    pair.cut_link()
                elif condition.privacy != "local-only":
                    wait_for_companion(pair, client, first, split)
                if over is not condition:
                    pair.link(rtt_ms=condition.rtt_ms, rate_mbit=condition.rate_mbit, down_mbit=condition.down_mbit)
                verdict = try_out(client, condition, inputs[condition.input], pair.sent_bytes)
                if condition.down:
                    pair.restore_link()
            verdicts.append(verdict)
            chosen = verdict.chosen.as_json()
            console.print(
                f"  {condition.name:42} {chosen['placement']:8} {_ms(chosen['measured_ms']):>6} ms"
                f"   {labels[verdict.top1].partition(',')[0]}",
                highlight=False,
            )
        console.print()
        show_table(console, verdicts)
        for verdict in verdicts:
            if verdict.condition.calibrated:
                show_sent(console, verdict, shipped_contract().data.fidelity)

        lay_models(repository, sidecar)
        pair.link(rtt_ms=20, rate_mbit=10)
        pair.start_agent(slowdown=20)
        (tensor,) = inputs["tensor"]
        with pair.client() as client:
            wait_for_companion(pair, client, tensor, {"mode": "split"})
        killing = kill_under_load(pair, tensor, verdicts[0].top1)
        show_killing(console, killing)
    return {"label": LABEL, "conditions": [v.as_json() for v in verdicts], "kill": killing.as_json()}, killing.failure


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description="Local, split or offload: see it choose.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured, too")
    arguments = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    with tempfile.TemporaryDirectory(prefix="isthmus-demo-") as folder:
        try:
            found, failure = run(console, Path(folder))
        except (NotStarted, models.Unavailable) as error:
            print(f"scripts/demo: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if failure:
        print(f"scripts/demo: {failure}", file=sys.stderr)
        return 1
    model = f".cache/models/repository/{MODEL}/1/model.onnx"
    console.print("\nTry next:", style="bold")
    console.print(f"  .venv/bin/isthmus cuts {model}", highlight=False)
    console.print(f"  .venv/bin/isthmus plan {model} --rtt-ms 20 --rate-mbit 10 --slowdown 20", highlight=False)
    console.print("  scripts/bench split --quick", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
