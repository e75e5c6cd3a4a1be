"""What each stage of each plan takes, and each transfer: measured once through the daemon, kept, and summed.

The sums rank all plans of a cell, so that only the best few have to run for real there. Stages belong to (model, cut,
codec) and are multiplied by the slowdown, as the emulation does; transfers belong to (bytes, link); what a caller sees
beside them (HTTP, the daemon's own work) is what one request took without its stages. Nothing here is the planner's: it
is what the planner is held against.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent.calibrated import sidecar_beside
from agent.model_cache import find_card
from agent.replay.known import Known
from scripts.benches.regret_cells import LINKS, Cell, Subject
from scripts.client import Answer, Client, Refused
from scripts.lab_pair import Conditions, LabPair
from scripts.models import Unavailable
from scripts.pair import STATUS
from split.plan.plan import LOCAL, Placement, Plan
from split.plan.table import Column
from split.profiles.contract import contract_beside, default_contract
from split.profiles.measured import read_profile
from split.tensor import Tensors

FAST: Final = Conditions(rate_mbit=200, rtt_ms=5)
"""While stages are measured."""
RUNS: Final = 4
SUBJECT_BUDGET_S: Final = 25.0
"""For the plans of one subject; those that it does not reach are left out."""
OPEN_TIMEOUT_S: Final = 180.0
"""For all cuts of all models at the companion; then those that are open are measured."""
SLOW_MS, SLOW_RUNS = 1e3, 2
TRANSFERS: Final = 8
"""Sizes that a link is measured with, at most."""
TRANSFER_RUNS: Final = 3
TRANSFER_MAX_S: Final = 3.0
"""Longer ones go on as a straight line."""
DEADLINE_MS: Final = 60e3
"""Of every request of this bench: what it holds apart is speed, not lateness."""
PAUSE_S: Final = 0.005
"""Between requests: the daemon's books are closed some milliseconds after an answer."""
FORGIVEN_S: Final = 0.3
_NO_STAGES: Final = frozenset({"total", "rest"})
"""What the daemon clocks beside its stages: part of a request's overhead here."""
"""After an answer that the device had to give: until then the companion may be taken for one that is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Of one plan at one device speed; ms, the device's with the slowdown in."""

    image_ms: float
    head_ms: float
    """The whole, for local."""
    encode_ms: float
    cloud_decode_ms: float
    tail_ms: float
    decode_ms: float
    overhead_ms: float
    """What the caller waits beside the stages and the link."""
    up_bytes: int
    down_bytes: int

    @property
    def computed_ms(self) -> float:
        """Everything but the link."""
        here = self.image_ms + self.head_ms + self.encode_ms + self.decode_ms
        return here + self.cloud_decode_ms + self.tail_ms + self.overhead_ms


class Offer:
    """The plans of a subject that its contract allows."""

    def __init__(self, subject: Subject, known: Known) -> None:
        self.subject = subject
        self.profile, self.table = known.profile, known.table
        self.known = known
        rows = [
            row
            for row, plan in enumerate(self.table.plans)
            if self.table.allowed[0][row] and (plan.codec != "encoded" or subject.form == "JPEG")
        ]
        self.plans: tuple[Plan, ...] = tuple(self.table.plans[row] for row in rows)

    @cached_property
    def inputs(self) -> Tensors:
        return self.subject.inputs()

    @cached_property
    def encoded_bytes(self) -> int:
        return len(self.inputs["input"][0]) if self.subject.form == "JPEG" else 0

    def bytes_of(self, plan: Plan) -> tuple[int, int]:
        """Payload up and down."""
        up, down = self.table.costs[[Column.UP, Column.DOWN], self.table.row_of[plan]]
        return self.encoded_bytes if plan.codec == "encoded" else round(up), round(down)

    def ask(self, client: Client, plan: Plan) -> Answer:
        """One request by this plan; Refused, or an answer that may have fallen back."""
        wishes: dict[str, str | float] = {"mode": str(plan.placement), "deadline_ms": DEADLINE_MS}
        wishes |= {key: value for key, value in (("cut", plan.cut), ("codec", plan.codec)) if value is not None}
        return client.infer(self.subject.model, self.inputs, **wishes)

    def ask_auto(self, client: Client) -> Answer:
        return client.infer(self.subject.model, self.inputs, deadline_ms=DEADLINE_MS)


def offers_of(folder: Path, subjects: Sequence[Subject]) -> dict[Subject, Offer]:
    """Of the daemon in `folder`, which has profiled all models: of its cache what it takes itself."""
    found: dict[str, Known] = {}
    for name in dict.fromkeys(subject.model for subject in subjects):
        path = folder / "models" / name / "1" / "model.onnx"
        there = find_card(folder / "agent-cache", path, sidecar_beside(path, None).calibration)
        profile = read_profile(there[0]) if there is not None else None
        if there is None or profile is None:
            raise Unavailable(f"{path} is not profiled in {folder / 'agent-cache'}; run scripts/bench regret --prepare")
        card = there[1]
        found[name] = Known(card=card, profile=profile, contract=contract_beside(path) or default_contract(card))
    return {subject: Offer(subject, found[subject.model]) for subject in subjects}


def fell_back(answer: Answer, plan: Plan) -> str:
    """Why another plan ran than the one asked for; "" when it is the one."""
    if answer.fallback:
        return answer.fallback
    return "" if answer.plan == str(plan) else f"{answer.plan} ran"


def wait_until_open(pair: LabPair, offers: Mapping[Subject, Offer]) -> None:
    """Until the companion has opened what may be used, or has not got further for a while."""
    wanted = {offer.subject.model: int(np.count_nonzero(offer.table.allowed[0])) for offer in offers.values()}
    deadline_at_s = time.monotonic() + OPEN_TIMEOUT_S
    with pair.client() as client:
        while time.monotonic() < deadline_at_s:
            there = {model["name"]: model for model in client.get(STATUS)["models"]}
            left = [
                name
                for name, rows in wanted.items()
                if there[name]["allowed_now"] < rows and not there[name]["cuts_not_open"]
            ]
            if not left:
                break
            time.sleep(0.2)
    pair.wait_until_idle()


# -- stages -----------------------------------------------------------------------------------------------------------


class Record:
    """Measured numbers in one file, thrown away when what they depend on has changed."""

    def __init__(self, path: Path, depends: Mapping[str, Any]) -> None:
        self._path = path
        self._depends = json.loads(json.dumps(depends))
        self.numbers: dict[str, dict[str, float]] = {}
        if path.exists() and (found := json.loads(path.read_text()))["depends"] == self._depends:
            self.numbers = found["numbers"]

    def keep(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"depends": self._depends, "numbers": self.numbers}, indent=1))
        fresh.replace(self._path)


def _depends(offer: Offer, slowdown: float) -> dict[str, Any]:
    profile = offer.profile
    return {
        "digest": profile.digest,
        "runtime": profile.runtime,
        "device": profile.fingerprint,
        "basis": profile.basis,
        "threads": profile.threads,
        "slowdown": slowdown,
        "encoded_bytes": offer.encoded_bytes,
        "plans": [str(plan) for plan in offer.plans],
    }


def kept_stages(folder: Path, offer: Offer, slowdown: float) -> Record:
    name = f"{offer.subject.model}-{offer.subject.form}-{slowdown:g}"
    return Record(folder / "stages" / f"{name}.json", _depends(offer, slowdown))


def measure_stages(pair: LabPair, folder: Path, offer: Offer, slowdown: float) -> None:
    """Each plan `RUNS` times within the budget, on a fast link; kept."""
    kept = kept_stages(folder, offer, slowdown)
    if kept.numbers:
        return
    print(f"measuring {len(offer.plans)} plans of {offer.subject}, {slowdown:g}× slower …", flush=True)
    pair.condition(FAST)
    deadline_at_s = time.monotonic() + SUBJECT_BUDGET_S
    with pair.client() as client:
        for plan in _spread(offer.plans):
            if time.monotonic() > deadline_at_s:
                break
            try:
                kept.numbers[str(plan)] = _measured(client, offer, plan)
            except Refused as error:
                print(f"  {plan} is left out: {error}", flush=True)
    kept.keep()


def _spread(plans: Sequence[Plan]) -> list[Plan]:
    """What is no split first, then splits from all over the model: what the budget leaves out has neighbours."""
    splits = [plan for plan in plans if plan.placement is Placement.SPLIT]
    others = [plan for plan in plans if plan.placement is not Placement.SPLIT]
    return others + [plan for start in range(5) for plan in splits[start::5]]


def measured_now(pair: LabPair, offer: Offer, plans: Iterable[Plan], *, runs: int) -> dict[Plan, Stages]:
    """What these plans take at this moment over a fast link, at the device's speed as it is; not kept. Plans that do
    not run are left out."""
    pair.condition(FAST)
    found = {}
    with pair.client() as client:
        for plan in plans:
            with contextlib.suppress(Refused):
                found[plan] = _stages(offer, plan, _measured(client, offer, plan, runs), 1.0)
    return found


def median_stages(measured: Sequence[Stages]) -> Stages:
    """Of one plan, stage by stage."""
    numbers = {field.name: [getattr(one, field.name) for one in measured] for field in fields(Stages)}
    return Stages(**{name: statistics.median_low(found) for name, found in numbers.items()})


def _measured(client: Client, offer: Offer, plan: Plan, runs: int = RUNS) -> dict[str, float]:
    """Medians of its stages; Refused where it does not run."""
    answers = _answers(client, offer, plan, runs)
    stages = {stage for answer in answers for stage in answer.timings_ms} - _NO_STAGES
    found = {stage: statistics.median(one.timings_ms.get(stage, 0.0) for one in answers) for stage in stages}
    found["overhead"] = statistics.median(
        answer.took_ms - sum(ms for stage, ms in answer.timings_ms.items() if stage not in _NO_STAGES)
        for answer in answers
    )
    return found


def _answers(client: Client, offer: Offer, plan: Plan, count: int) -> list[Answer]:
    """So many by this plan (fewer where it takes seconds) after one that may have had to open something; Refused where
    the device finishes more of them than that."""
    answers: list[Answer] = []
    failures = ""
    for _ in range(2 * count + 2):
        time.sleep(PAUSE_S)
        answer = offer.ask(client, plan)
        if why := fell_back(answer, plan):
            failures = why
            time.sleep(FORGIVEN_S)
            continue
        answers.append(answer)
        if len(answers) > (count if answer.took_ms < SLOW_MS else SLOW_RUNS):
            return answers[1:]
    raise Refused(failures)


def read_stages(folder: Path, offer: Offer, slowdown: float) -> dict[Plan, Stages]:
    """Of all plans that were measured at this speed, or at speed 1 and are brought to this one."""
    at_one, here = (kept_stages(folder, offer, speed).numbers for speed in (1.0, slowdown))
    found = {}
    for plan in offer.plans:
        if (numbers := here.get(str(plan))) is not None:
            found[plan] = _stages(offer, plan, numbers, 1.0)
        elif (numbers := at_one.get(str(plan))) is not None:
            found[plan] = _stages(offer, plan, numbers, slowdown)
    return found


def _stages(offer: Offer, plan: Plan, numbers: Mapping[str, float], slowdown: float) -> Stages:
    up, down = offer.bytes_of(plan)
    return Stages(
        image_ms=numbers.get("image", 0.0) * slowdown,
        head_ms=(numbers.get("head", 0.0) + numbers.get("whole", 0.0)) * slowdown,
        encode_ms=numbers.get("encode", 0.0) * slowdown,
        cloud_decode_ms=numbers.get("cloud_decode", 0.0),
        tail_ms=numbers.get("tail", 0.0),
        decode_ms=numbers.get("decode", 0.0) * slowdown,
        overhead_ms=numbers["overhead"] + numbers.get("queue", 0.0) + numbers.get("cloud_queue", 0.0),
        up_bytes=up,
        down_bytes=down,
    )


# -- transfers --------------------------------------------------------------------------------------------------------


class Transfers:
    """ms to the companion and back over one link, by the bytes both ways together."""

    def __init__(self, numbers: Mapping[str, Mapping[str, float]]) -> None:
        """`numbers`: bytes → {"network": ms}; at least two of them."""
        points = sorted((int(size), found["network"]) for size, found in numbers.items())
        self._bytes = np.array([size for size, _ in points], float)
        # A stall only makes a transfer longer: fewer bytes take no longer than more.
        self._ms = np.minimum.accumulate(np.array([ms for _, ms in points], float)[::-1])[::-1]

    def ms(self, crossing_bytes: int) -> float:
        """Straight lines between what was measured, the last one going on."""
        if crossing_bytes <= self._bytes[-1] or len(self._bytes) < 2:
            return float(np.interp(crossing_bytes, self._bytes, self._ms))
        slope = (self._ms[-1] - self._ms[0]) / (self._bytes[-1] - self._bytes[0])
        return float(self._ms[-1] + slope * (crossing_bytes - self._bytes[-1]))


def kept_transfers(folder: Path, link: Conditions) -> Record:
    netlab = Path(__file__).resolve().parents[1] / "netlab.c"
    depends = {"link": str(link), "netlab": hashlib.sha256(netlab.read_bytes()).hexdigest()}
    return Record(folder / "transfers" / f"{LINKS.index(link)}.json", depends)


def measure_transfers(pair: LabPair, folder: Path, offer: Offer, link: Conditions) -> None:
    """With the plans of `offer` that differ most in bytes, the smallest first, which teach the daemon what to expect;
    what was asked for is not overtaken. Kept."""
    kept = kept_transfers(folder, link)
    if kept.numbers:
        return
    print(f"measuring transfers over {link} …", flush=True)
    pair.condition(link)
    with pair.client() as client:
        for size, plan in _sizes(offer):
            if size * 8 / link.rate_mbit / 1e6 > TRANSFER_MAX_S and len(kept.numbers) > 1:
                continue
            try:
                answers = _answers(client, offer, plan, TRANSFER_RUNS)
            except Refused as error:
                print(f"  {size} bytes are left out: {error}", flush=True)
                continue
            kept.numbers[str(size)] = {"network": statistics.median(one.timings_ms["network"] for one in answers)}
    kept.keep()


def _sizes(offer: Offer) -> list[tuple[int, Plan]]:
    """(bytes both ways, plan), the smallest, the largest and those between about as many times larger each."""
    by_size = {sum(offer.bytes_of(plan)): plan for plan in offer.plans if plan is not LOCAL}
    sizes = sorted(by_size)
    wanted = np.geomspace(sizes[0], sizes[-1], TRANSFERS)
    chosen = {min(sizes, key=lambda size: abs(size - want)) for want in wanted}
    return [(size, by_size[size]) for size in sorted(chosen)]


def read_transfers(folder: Path, link: Conditions) -> Transfers:
    return Transfers(kept_transfers(folder, link).numbers)


# -- sums -------------------------------------------------------------------------------------------------------------


class Sums:
    """The modelled milliseconds of all plans of a cell."""

    def __init__(self, folder: Path, offers: Mapping[Subject, Offer]) -> None:
        self._folder = folder
        self._offers = offers

    def of(self, cell: Cell) -> dict[Plan, float]:
        """Ascending."""
        transfers = read_transfers(self._folder, cell.link)
        found = {
            plan: stages.computed_ms + (0.0 if plan is LOCAL else transfers.ms(stages.up_bytes + stages.down_bytes))
            for plan, stages in self.stages(cell).items()
        }
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def stages(self, cell: Cell) -> dict[Plan, Stages]:
        return read_stages(self._folder, self._offers[cell.subject], cell.slowdown)

    def nearness(self, cell: Cell) -> float:
        """The best plan of the second-best placement over that of the best."""
        best = best_of_placements(self.of(cell))
        first, *others = best.values()
        return others[0] / first if others else float("inf")


def best_of_placements(ms: Mapping[Plan, float]) -> dict[Placement, float]:
    """Placement → ms of its fastest plan, ascending."""
    best: dict[Placement, float] = {}
    for plan, took in ms.items():
        best[plan.placement] = min(took, best.get(plan.placement, float("inf")))
    return dict(sorted(best.items(), key=lambda item: item[1]))
