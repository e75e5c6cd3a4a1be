"""`isthmus plan MODEL`: what would be chosen on a given link, stage by stage, and why not the others.

Uses what was measured of the model on this machine (measures it when nothing was); the companion is assumed to be a
machine like this one, times `--cloud-speedup`. No daemon is asked, but with `--url` whether the one there shares the
model with its companion, and if not, why.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agent.commands.model_argument import add_inputs_argument, add_model_argument, model_path
from agent.commands.options import daemon_url, not_negative, within
from agent.commands.profile import add_cache_argument, cache_folder, profiled, progress_bar
from agent.http_client import DaemonClient
from split.errors import InvalidRequest
from split.graph.card import ModelCard
from split.graph.growth import open_dims, sizes_of
from split.plan.decide import decide, estimate_all
from split.plan.objective import Prices
from split.plan.observation import LinkEstimate, Observation, RemoteView
from split.plan.plan import Placement, PlanEstimate, RequestFacts
from split.plan.power import Power, modelled
from split.plan.table import Column, PlanTable
from split.profiles.contract import CONTRACT_FILE, Contract, check_contract, contract_beside, default_contract
from split.profiles.device import load_device, recognise
from split.profiles.measured import ModelProfile
from split.profiles.radio import RADIOS, LinkKind
from split.runtime.accelerators import PROVIDERS
from split.runtime.machine import read_machine
from split.tensor import bind_dims
from split.workbench.inputs import read_inputs

RTT_MS = 20.0
RATE_MBIT_S = 50.0
"""A companion in the same country over a good home link: the middle of the range where the choice is contested."""
WITHIN = within(1e-3, 1e6)
"""1 kbit/s to 1 Tbit/s, a microsecond to a quarter of an hour, a thousandth to a million times. Far beyond, times are
no numbers any more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_inputs_argument(parser)
    add_cache_argument(parser)
    parser.add_argument(
        "--rtt-ms", type=WITHIN, default=RTT_MS, metavar="MS", help=f"round trip, ms (default {RTT_MS:g})"
    )
    parser.add_argument(
        "--rate-mbit",
        type=WITHIN,
        default=RATE_MBIT_S,
        metavar="R",
        help=f"rate both ways, Mbit/s (default {RATE_MBIT_S:g})",
    )
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--device", metavar="NAME", help="another device, by its data sheet (profiles/devices)")
    speed.add_argument(
        "--slowdown", type=WITHIN, default=1.0, metavar="X", help="the device computes X times slower (default 1)"
    )
    parser.add_argument(
        "--cloud-speedup",
        type=WITHIN,
        default=1.0,
        metavar="X",
        help="the companion is X times as fast as this machine",
    )
    parser.add_argument(
        "--price-per-gb", type=not_negative, default=0.0, metavar="M", help="money per 10⁹ bytes on the link"
    )
    parser.add_argument(
        "--price-per-companion-s",
        type=not_negative,
        default=0.0,
        metavar="M",
        help="money per second that the companion computes",
    )
    parser.add_argument(
        "--encoded-bytes",
        type=int,
        metavar="N",
        help="the picture comes encoded in N bytes; 0: it comes as a tensor (default: as is typical for the contract)",
    )
    parser.add_argument(
        "--link-kind",
        type=LinkKind,
        choices=list(LinkKind),
        default=LinkKind.ETHERNET,
        help="what the device sends by, for its joules (default %(default)s)",
    )
    parser.add_argument(
        "--url", type=daemon_url, help="a running daemon: plans that it or its companion bars now are not allowed"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the stages of the best plans")


def run(arguments: argparse.Namespace) -> int:
    """Measure the model if need be, decide for the given link, print all plans; always 0."""
    path = model_path(arguments)
    with progress_bar("plan") as on_progress:
        card, profile = profiled(path, cache_folder(arguments), inputs=arguments.inputs, on_progress=on_progress)
    contract = _contract(path, card)
    facts = _facts(card, profile, contract, arguments)
    table = PlanTable.build(card, profile, contract, _runs_on(arguments))
    table = table.with_compute(tail_ms=table.costs[Column.TAIL] / arguments.cloud_speedup)
    observation = _observation(table, profile, arguments)
    shared = {} if arguments.url is None else _daemons_model(arguments.url, path)
    decision = decide(table, _as_shared(observation, table, shared), facts)
    plans = [_unless_refused(plan, shared) for plan in _estimates(table, observation, facts, profile)]
    plans.sort(key=lambda plan: (not plan.allowed, plan.predicted_ms))
    no_split = decision.why_no_split()
    reason = f"{decision.reason}; {no_split}" if no_split else decision.reason
    others = [plan for plan in plans if plan.plan != decision.chosen.plan]
    if arguments.plot is not None:
        _plot([decision.chosen, *others], str(path), arguments.plot)
    if arguments.json:
        shown = {"chosen": _shown(decision.chosen), "runners_up": [_shown(plan) for plan in others], "reason": reason}
        print(json.dumps(shown, indent=1))
    else:
        print(_text(decision.chosen, others, reason, arguments, observation.power.source))
    return 0


# -- what is known --------------------------------------------------------------------------------------------------


def _contract(path: Path, card: ModelCard) -> Contract:
    contract = contract_beside(path) or default_contract(card)
    check_contract(contract, card, path=path.absolute().parent.parent / CONTRACT_FILE)
    return contract


def _facts(card: ModelCard, profile: ModelProfile, contract: Contract, arguments: argparse.Namespace) -> RequestFacts:
    encoded = arguments.encoded_bytes
    if encoded is None:
        encoded = profile.encoded_bytes if contract.encoded() and arguments.inputs is None else 0
    if encoded < 0:
        raise InvalidRequest(f"--encoded-bytes must be 0 or more, got {encoded}")
    if encoded and not contract.encoded():
        raise InvalidRequest("--encoded-bytes: the model's contract has no input that may come encoded")
    sizes: tuple[int, ...] = ()
    if not encoded and (tensors := read_inputs(arguments.inputs)) is not None:
        bind_dims(card.inputs, tensors)
        sizes = sizes_of(open_dims(card.inputs), tensors)
    return RequestFacts(budget_ms=contract.behaviour.latency_p99_ms or math.inf, encoded_bytes=encoded, sizes=sizes)


def _observation(table: PlanTable, profile: ModelProfile, arguments: argparse.Namespace) -> Observation:
    """Everything as told and certain; nothing waits."""
    per_byte = 0.008 / arguments.rate_mbit
    link = LinkEstimate(
        rtt_ms=arguments.rtt_ms,
        up_ms_per_byte=per_byte,
        down_ms_per_byte=per_byte,
        covariance=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        age_s=0.0,
    )
    return Observation(
        edge_queue_ms=0.0,
        slowdown=arguments.slowdown if arguments.device is None else _slowdown_of(arguments.device, arguments),
        alpha=1.0,
        alpha_sigma=0.0,
        image_ms=profile.image_ms,
        image_ratio=1.0,
        remote=RemoteView(
            link=link,
            beta=1.0,
            beta_sigma=0.0,
            speed_ratio=1.0 / arguments.cloud_speedup,
            image_ms=profile.image_ms / arguments.cloud_speedup,
            queue_ms=0.0,
            queue_sigma_ms=0.0,
            opened=np.ones(len(table), dtype=np.bool_),
        ),
        power=_power(arguments, profile),
        prices=Prices(per_byte=arguments.price_per_gb / 1e9, per_companion_ms=arguments.price_per_companion_s / 1e3),
    )


def _runs_on(arguments: argparse.Namespace) -> list[str] | None:
    """What the named device has, in a contract's words; None for this machine, which has measured the model."""
    if arguments.device is None:
        return None
    providers = load_device(arguments.device).providers
    return [word for word, provider in PROVIDERS.items() if provider in providers]


def _power(arguments: argparse.Namespace, profile: ModelProfile) -> Power:
    """Modelled: of the named device, else of the profile that this machine is recognised by."""
    machine = read_machine()
    name = arguments.device or recognise(machine.board, machine.compatible, machine.architecture)
    device = None if name is None else load_device(name)
    threads = device.threads if arguments.device is not None and device is not None else machine.threads
    rate, used = arguments.rate_mbit, 0 if arguments.device is not None else profile.threads
    return modelled(device, threads, RADIOS[arguments.link_kind]).at(rate, rate, threads=used)


def _daemons_model(url: str, path: Path) -> Mapping[str, Any]:
    """What the daemon's status says of this model, by the name of its folder in the repository."""
    models = DaemonClient(url).get("/v2/isthmus/status").get("models") or ()
    name = path.absolute().parent.parent.name
    found: dict[str, Any] | None = next((model for model in models if model.get("name") == name), None)
    if found is None:
        raise InvalidRequest(
            f"--url: the daemon at {url} has no model {name!r} (named as the folder of {path} is in a repository), it "
            f"has {', '.join(str(model.get('name')) for model in models) or 'none'}"
        )
    return found


def _as_shared(observation: Observation, table: PlanTable, model: Mapping[str, Any]) -> Observation:
    """With what the daemon's companion does not share left out, for the reason that the daemon has."""
    if why := _why_local(model):
        return dataclasses.replace(observation, remote=None, remote_why_not=str(why))
    closed = model.get("cuts_not_open") or {}
    opened = np.array([plan.cut not in closed for plan in table.plans], dtype=np.bool_)
    assert observation.remote is not None
    codecs = model.get("codecs_why_not") or {}
    remote = dataclasses.replace(observation.remote, opened=opened, codecs_why_not=codecs)
    return dataclasses.replace(observation, remote=remote)


def _why_local(model: Mapping[str, Any]) -> str:
    return str(model.get("local_only_reason") or model.get("reason") or "")


def _unless_refused(plan: PlanEstimate, model: Mapping[str, Any]) -> PlanEstimate:
    """The same plan, not allowed where the daemon's companion does not share the model or this cut, or where its codec
    is not used now."""
    why = _why_local(model) or str((model.get("cuts_not_open") or {}).get(plan.plan.cut, ""))
    why = why or str((model.get("codecs_why_not") or {}).get(plan.plan.codec, ""))
    if not why or not plan.allowed or plan.plan.placement is Placement.LOCAL:
        return plan
    return dataclasses.replace(plan, allowed=False, why_not=why)


def _slowdown_of(name: str, arguments: argparse.Namespace) -> float:
    """How many times longer a segment takes on the named device: float32 matrix products as measured on this machine
    over what that device sustains. Convolutions are not held against each other: what the runtime makes of them,
    relative to its matrix products, is taken to be the same on both."""
    device = load_device(name)
    from agent.commands.fingerprint import known_fingerprint

    return known_fingerprint(arguments).matrix_gflops / device.sustained_gflops


def _estimates(
    table: PlanTable, observation: Observation, facts: RequestFacts, profile: ModelProfile
) -> list[PlanEstimate]:
    """All plans; an encoded one is predicted for a typical picture where the request has none."""
    plans = estimate_all(table, observation, facts)
    if facts.encoded_bytes:
        return list(plans)
    typical = dataclasses.replace(facts, encoded_bytes=profile.encoded_bytes, sizes=())
    pictures = estimate_all(table, observation, typical)
    return [
        dataclasses.replace(picture, allowed=plan.allowed, why_not=plan.why_not)
        if plan.plan.codec == "encoded"
        else plan
        for plan, picture in zip(plans, pictures, strict=True)
    ]


# -- what is shown --------------------------------------------------------------------------------------------------


def _shown(plan: PlanEstimate) -> dict[str, Any]:
    """PLAN as DESIGN §7 has it."""
    return {
        "placement": str(plan.plan.placement),
        "cut": plan.plan.cut,
        "codec": plan.plan.codec,
        "predicted_ms": plan.predicted_ms,
        "stages_ms": dict(plan.stages_ms),
        "bytes": plan.bytes,
        "fidelity": plan.fidelity,
        "allowed": plan.allowed,
        "why_not": plan.why_not,
        "energy_j": plan.energy_j,
        "money": plan.money,
        "level": plan.level,
    }


def _text(
    chosen: PlanEstimate, others: list[PlanEstimate], reason: str, arguments: argparse.Namespace, source: str
) -> str:
    device = f"device {arguments.device}" if arguments.device else f"device {arguments.slowdown:g}× slower"
    lines = [
        f"RTT {arguments.rtt_ms:g} ms, {arguments.rate_mbit:g} Mbit/s, {device}, companion "
        f"{arguments.cloud_speedup:g}× as fast as this machine",
        "",
        f"  {'placement':9}  {'cut':12}  {'codec':7}  {'ms':>9}  {'bytes':>9}  {'joules':>7}  {'fidelity':>8}",
    ]
    for mark, plan in [("*", chosen), *((" ", other) for other in others)]:
        fidelity = "–" if plan.fidelity is None else f"{plan.fidelity:.2g}"
        notes = ["estimated from other cuts"] * plan.estimated + [plan.why_not] * bool(plan.why_not)
        notes += [f"costs {plan.money:.3g} of money"] * bool(plan.money)
        why = f"  {'; '.join(notes)}" if notes else ""
        lines.append(
            f"{mark} {plan.plan.placement!s:9}  {plan.plan.cut or '–':12}  {plan.plan.codec or '–':7}  "
            f"{plan.predicted_ms:>9.2f}  {plan.bytes:>9}  {plan.energy_j:>7.3g}  {fidelity:>8}{why}"
        )
    stages = "  ".join(f"{stage} {ms:.2f}" for stage, ms in chosen.stages_ms.items() if ms > 0.0)
    joules = f"joules above idle: {source or 'unknown for this device'}"
    return "\n".join([*lines, "", f"stages of the chosen plan, ms: {stages}", joules, f"why: {reason}"])


def _plot(plans: list[PlanEstimate], title: str, path: Path) -> None:
    from agent.commands.plan_plot import draw  # Pillow, which the table does without

    try:
        draw(plans, title, path)
    except OSError as error:
        raise InvalidRequest(f"the plot cannot be written to {path}: {error.strerror or error}") from None
