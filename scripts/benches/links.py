"""Whether a split that wins in bytes wins in time: device speeds × named links, every plan inside the same bound of
fidelity, run by the daemon and its companion over an emulated link; other devices by the sum of the stages.

Rivals are local with the threads that were measured fastest, and the picture made anew as JPEG or WebP at the quality
and size that the same bound allows. The model quantised to int8 is another model: where its own fidelity is inside the
bound, each contest is shown with it as a rival, too, at local's time by the ratio that this machine takes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from scripts.benches import codec_int8
from scripts.benches.codec_model import Contest, Network, Stages, modelled_ms, summary
from scripts.benches.codec_splits import FOLDER, calibration_of
from scripts.benches.codec_subjects import MAIN, MAIN_BOUND, Sample, Subject, subject
from scripts.benches.figure import Figure
from scripts.client import Answer, Client, Refused
from scripts.lab_pair import Conditions, LabPair, lab_pair
from scripts.models import ROOT
from split.profiles.device import device_names, load_device

LAB: Final = "codec"
LINKS: Final = {
    "LTE-M": Conditions(rate_mbit=0.375, rtt_ms=120),
    "ADSL": Conditions(rate_mbit=1, rtt_ms=30),
    "LTE": Conditions(rate_mbit=5, rtt_ms=50),
    "Wi-Fi": Conditions(rate_mbit=20, rtt_ms=6),
    "LAN": Conditions(rate_mbit=100, rtt_ms=1),
}
"""Upwards, since that is where the bytes go: LTE-M's peak in half duplex (3GPP TS 36.306, category M1: 375 kbit/s),
ADSL's (ITU-T G.992.1: about 1 Mbit/s), usual ones of a cell and of a room, a switch's."""
SLOWDOWNS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
QUICK: Final = ((10.0,), ("ADSL", "Wi-Fi"))
"""Speeds and links of a quick run: one cell where bytes matter, one where they do not."""
SLOWDOWN_MIN: Final = 0.05
"""Of a device profile: an accelerator's matrix rate is not what a request takes."""
FAST: Final = Conditions(rate_mbit=200, rtt_ms=2)
"""While stages are measured."""

ROUNDS: Final = 7
STAGE_ROUNDS: Final = 5
SPLITS_RUN: Final = 2
"""Of a cell's splits, those that the sum of their stages puts first."""
DEADLINE_MS: Final = 60e3
OPEN_TIMEOUT_S: Final = 90.0
PAUSE_S: Final = 0.005
LOCAL, AUTO = "local", "auto"
PICTURES: Final = ("offload jpeg", "offload webp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One cell, run."""

    link: str
    slowdown: float
    ms: dict[str, float]
    """Plan in words → median of its requests, asked for or chosen by the daemon."""
    network_ms: dict[str, float]
    auto_ms: float
    auto_plan: str
    error: float
    """|predicted − measured| / measured of the plans that the daemon chose, median."""

    @property
    def contest(self) -> Contest:
        return Contest.of(self.ms)

    @property
    def over_best(self) -> float:
        """The plan that the daemon chose most often / the fastest plan, less 1."""
        return self.ms.get(self.auto_plan, self.auto_ms) / min(self.ms.values()) - 1


@dataclass(slots=True)
class _Asked:
    answers: list[Answer] = field(default_factory=list)

    @property
    def took_ms(self) -> float:
        return statistics.median(answer.took_ms for answer in self.answers)


def prepare(*, quick: bool) -> None:
    """The model calibrated, once: a minute."""
    calibration_of(subject(MAIN), MAIN_BOUND)


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    """Five minutes, `quick` without the quantised model; Unavailable without root and network namespaces."""
    one, bound = subject(MAIN), MAIN_BOUND
    slowdowns, links = QUICK if quick else (SLOWDOWNS, tuple(LINKS))
    path, calibration = calibration_of(one, bound)
    cuts = [f"split {cut} klt" for cut in calibration.tables]
    sizes = {
        plan: point.mean_bytes
        for plan, curve in (
            *((f"split {cut} klt", curve) for cut, curve in calibration.curves.items()),
            *((f"offload {codec}", curve) for codec, curve in calibration.pictures.items()),
        )
        if (point := curve.within(one.measure, bound)) is not None
    }
    samples = one.samples("test", crops=1)
    int8 = [] if quick else [codec_int8.row(one, bound, samples, threads=len(os.sched_getaffinity(0)))]
    ratio = next((row["int8_ms"] / row["fp32_ms"] for row in int8 if row.get("inside_bound")), None)
    folder = FOLDER / "grid"
    shutil.copytree(path.parents[1], folder / "models" / one.model, dirs_exist_ok=True)
    with lab_pair(folder, folder / "models", name=LAB) as pair:
        pair.start_agent(slowdown=1.0, timeout_s=1200)
        stages = _stages(pair, one, samples, [LOCAL, *PICTURES, *cuts], sizes)
        cells = list(_cells(pair, one, samples, stages, slowdowns, links))
    networks = {name: _network(cells, name, sizes) for name in links}
    slower = sum(cell.over_best > max(cell.error, _noise(cell)) for cell in cells)
    rows = [*int8, *(_row(cell, stages, networks, ratio) for cell in cells)]
    rows += _summaries("run", [cell.ms for cell in cells], ratio)
    rows += _devices(stages, networks, ratio)
    return [Figure(name="slower_cells", value=slower, unit="cells", at_most=0)], rows


def _noise(cell: Measured) -> float:
    """What two runs of one plan differ by on this machine at least: a request's millisecond."""
    return 1.0 / cell.auto_ms


def _cells(
    pair: LabPair,
    subject: Subject,
    samples: Sequence[Sample],
    stages: Mapping[str, Stages],
    slowdowns: Sequence[float],
    links: Sequence[str],
) -> Iterator[Measured]:
    """All of them, by speed, since each is a start of the daemon."""
    for slowdown in slowdowns:
        pair.start_agent(slowdown=slowdown)
        for link in links:
            conditions, network = LINKS[link], _straight(link)
            first = {plan: modelled_ms(one, slowdown, network) for plan, one in stages.items()}
            splits = sorted((plan for plan in first if plan.startswith("split")), key=lambda plan: first[plan])
            plans = [LOCAL, *(plan for plan in PICTURES if plan in stages), *splits[:SPLITS_RUN]]
            pair.condition(conditions)
            pair.reconnect()
            found = _cell(pair, subject, samples, plans, link, slowdown)
            print(f"  {link}, {slowdown:g}× slower: {found.auto_plan}, gain {found.contest.gain:.2f}", flush=True)
            yield found


def _cell(
    pair: LabPair, subject: Subject, samples: Sequence[Sample], plans: Sequence[str], link: str, slowdown: float
) -> Measured:
    asked = {plan: _Asked() for plan in (*plans, AUTO)}
    with pair.client() as client:
        for plan in plans:
            _wait_for(client, subject, samples[0], plan)
        pair.wait_until_idle()
        for turn in range(ROUNDS):
            for plan in random.Random(turn).sample(sorted(asked), len(asked)):
                time.sleep(PAUSE_S)
                answer = _ask(client, subject, samples[turn % len(samples)], plan)
                if plan == AUTO or _ran(answer, plan):
                    asked[plan].answers.append(answer)
    auto = asked.pop(AUTO)
    for answer in auto.answers:
        if not answer.fallback:  # whoever asked for it, a plan is that plan
            asked.setdefault(answer.plan, _Asked()).answers.append(answer)
    ran = {plan: one for plan, one in asked.items() if one.answers}
    errors = [abs(answer.predicted_ms - answer.timings_ms["total"]) / answer.took_ms for answer in auto.answers]
    return Measured(
        link=link,
        slowdown=slowdown,
        ms={plan: one.took_ms for plan, one in ran.items()},
        network_ms={
            plan: statistics.median(answer.timings_ms.get("network", 0.0) for answer in one.answers)
            for plan, one in ran.items()
        },
        auto_ms=auto.took_ms,
        auto_plan=statistics.mode(answer.plan for answer in auto.answers),
        error=statistics.median(errors),
    )


def _stages(
    pair: LabPair, subject: Subject, samples: Sequence[Sample], plans: Sequence[str], sizes: Mapping[str, float]
) -> dict[str, Stages]:
    """Of each plan that runs, over a fast link; those inside the bound only."""
    pair.condition(FAST)
    found = {}
    with pair.client() as client:
        for plan in plans:
            if plan != LOCAL and plan not in sizes:
                continue
            try:
                _wait_for(client, subject, samples[0], plan)
            except Refused as error:
                print(f"  {plan} is left out: {error}", flush=True)
                continue
            answers = [_ask(client, subject, sample, plan) for sample in itertools.islice(samples, STAGE_ROUNDS)]
            answers = [answer for answer in answers if _ran(answer, plan)]
            if not answers:
                print(f"  {plan} is left out: another plan answered each time", flush=True)
                continue
            found[plan] = Stages.of(
                [answer.timings_ms for answer in answers],
                [answer.took_ms for answer in answers],
                sizes.get(plan, 0.0),
            )
    return found


def _wait_for(client: Client, subject: Subject, sample: Sample, plan: str) -> None:
    """Until this plan runs; Refused where it does not within `OPEN_TIMEOUT_S`."""
    deadline_at_s, why = time.monotonic() + OPEN_TIMEOUT_S, ""
    while time.monotonic() < deadline_at_s:
        try:
            answer = _ask(client, subject, sample, plan)
        except Refused as error:
            why = str(error)
        else:
            if _ran(answer, plan):
                return
            why = answer.fallback or f"{answer.plan} ran"
        time.sleep(0.3)
    raise Refused(why)


def _ask(client: Client, subject: Subject, sample: Sample, plan: str) -> Answer:
    wishes: dict[str, str | float] = {"deadline_ms": DEADLINE_MS}
    if plan != AUTO:
        placement, *rest = plan.split()
        wishes["mode"] = placement
        wishes |= dict(zip(("cut", "codec") if placement == "split" else ("codec",), rest, strict=False))
    return client.infer(subject.model, sample.tensors, **wishes)


def _ran(answer: Answer, plan: str) -> bool:
    return not answer.fallback and answer.plan == plan


# -- the rest by sums -------------------------------------------------------------------------------------------------


def _straight(link: str) -> Network:
    """Of one link, as its conditions say."""
    conditions = LINKS[link]
    return Network([(0.0, conditions.rtt_ms), (1e6, conditions.rtt_ms + 8e3 / conditions.rate_mbit)])


def _network(cells: Sequence[Measured], link: str, sizes: Mapping[str, float]) -> Network:
    """Of one link, from all that crossed it; as its conditions say where nothing did."""
    taken: dict[float, list[float]] = {}
    for cell in cells:
        if cell.link == link:
            for plan, ms in cell.network_ms.items():
                if plan in sizes:
                    taken.setdefault(sizes[plan], []).append(ms)
    return Network([(size, statistics.median(ms)) for size, ms in taken.items()]) if taken else _straight(link)


def with_int8(ms: Mapping[str, float], ratio: float | None) -> Contest:
    """The contest with the model in int8 as one more rival."""
    return Contest.of(ms if ratio is None else {**ms, "local int8": ms[LOCAL] * ratio})


def _summaries(grid: str, cells: Sequence[Mapping[str, float]], int8_ratio: float | None) -> list[dict[str, Any]]:
    rows = [{"grid": grid, **summary(Contest.of(ms) for ms in cells)}]
    if int8_ratio is not None:
        rows.append({"grid": f"{grid}, local int8 too", **summary(with_int8(ms, int8_ratio) for ms in cells)})
    return rows


def _row(
    cell: Measured, stages: Mapping[str, Stages], networks: Mapping[str, Network], int8_ratio: float | None
) -> dict[str, Any]:
    known = {plan: ms for plan, ms in cell.ms.items() if plan in stages}
    network = networks[cell.link]
    off = statistics.fmean(
        abs(modelled_ms(stages[plan], cell.slowdown, network) / ms - 1) for plan, ms in known.items()
    )
    return {
        "link": cell.link,
        "slowdown": cell.slowdown,
        **cell.contest.as_row(),
        "gain_with_int8": with_int8(cell.ms, int8_ratio).gain,
        "auto": cell.auto_plan,
        "auto_ms": cell.auto_ms,
        "auto_over_best": cell.over_best,
        "prediction_error": cell.error,
        "sums_off": off,
        **{f"{plan} ms": ms for plan, ms in cell.ms.items()},
    }


def _devices(
    stages: Mapping[str, Stages], networks: Mapping[str, Network], int8_ratio: float | None
) -> list[dict[str, Any]]:
    """Every device profile over every link, and what each of them gains in all."""
    here = _matrix_gflops()
    rows: list[dict[str, Any]] = []
    everywhere: list[dict[str, float]] = []
    for name in device_names():
        slowdown = max(here / load_device(name).sustained_gflops, SLOWDOWN_MIN)
        cells = {
            link: {plan: modelled_ms(one, slowdown, network) for plan, one in stages.items()}
            for link, network in networks.items()
        }
        everywhere += cells.values()
        for link, ms in cells.items():
            gain = {"gain_with_int8": with_int8(ms, int8_ratio).gain}
            rows.append({"device": name, "link": link, "slowdown": slowdown, **Contest.of(ms).as_row(), **gain})
        rows += _summaries(f"{name}, modelled", list(cells.values()), int8_ratio)
    return [*rows, *_summaries("all devices, modelled", everywhere, int8_ratio)]


def _matrix_gflops() -> float:
    command = [sys.executable, "-m", "agent.cli", "fingerprint", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    return float(json.loads(done.stdout)["gemm_gflops"])
