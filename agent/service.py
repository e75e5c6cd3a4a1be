"""What the daemon offers to its front doors: the Open Inference Protocol's questions, answered from the repository,
the journal and the planner. Translation only; the way of a request is `serve.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from agent.bringing_up import Entry, ModelState
from agent.compute import Compute
from agent.device_watch import DeviceWatch
from agent.fingerprinting import Fingerprinting
from agent.health import Health
from agent.intake import Intake
from agent.journal import Journal
from agent.metering import Meter
from agent.metrics import Metrics
from agent.outcome import Outcome
from agent.planner import Planner
from agent.recorder import Recorder
from agent.repository import UNLOADED, Repository
from agent.serve import Serve
from agent.served_model import ServedModel
from agent.uplink import Uplink
from agent.version import VERSION
from split.oip.infer import ModelMetadata, OipRequest, OipResponse, plain_shape
from split.oip.options import isthmus_options
from split.plan.plan import PlanEstimate
from split.runtime.machine import Machine
from split.tensor import TensorSpec


class DaemonService:
    def __init__(
        self,
        *,
        intake: Intake,
        serve: Serve,
        repository: Repository,
        journal: Journal,
        planner: Planner,
        uplink: Uplink,
        compute: Compute,
        metrics: Metrics,
        meter: Meter,
        recorder: Recorder,
        health: Health,
        machine: Machine,
        watch: DeviceWatch,
        fingerprinting: Fingerprinting,
        identity: Callable[[], Mapping[str, object] | None],
    ) -> None:
        self._intake = intake
        self._serve = serve
        self._repository = repository
        self._journal = journal
        self._planner = planner
        self._uplink = uplink
        self._compute = compute
        self._metrics = metrics
        self._meter = meter
        self._recorder = recorder
        self._health = health
        self._machine = machine
        self._watch = watch
        self._fingerprinting = fingerprinting
        self._identity = identity
        self._started_at_s = asyncio.get_running_loop().time()

    # -- inference ----------------------------------------------------------------------------------------------------

    async def infer(self, model: str, version: str, request: OipRequest, received_at_s: float) -> OipResponse:
        """One request as the protocol brings it; errors as `split.errors` has them."""
        served = self._repository.serving(model, version)
        admitted = self._intake.admit(
            served,
            request.inputs,
            tuple(output.name for output in request.outputs),
            isthmus_options(request),
            received_at_s=received_at_s,
            now_s=asyncio.get_running_loop().time(),
        )
        with admitted as admitted_request:
            outcome = await self._serve.infer(admitted_request)
            served.noted(outcome.outputs)
            return OipResponse(
                model_name=served.name,
                model_version=served.version,
                id=request.id,
                parameters=_parameters(admitted_request.id, outcome),
                outputs=outcome.outputs,
            )

    # -- questions ----------------------------------------------------------------------------------------------------

    def live(self) -> bool:
        return self._health.live()

    def ready(self) -> bool:
        """Every model answers, but for those that were unloaded on purpose (so is Triton ready)."""
        entries = self._repository.entries()
        return self.live() and all(one.state is ModelState.READY or one.reason == UNLOADED for one in entries)

    def index(self) -> list[dict[str, str]]:
        return [
            {"name": entry.name, "version": entry.version, "state": str(entry.state), "reason": entry.reason}
            for entry in self._repository.entries()
        ]

    def metadata(self, name: str, version: str) -> ModelMetadata:
        model = self._repository.serving(name, version)
        return ModelMetadata(
            name=model.name,
            versions=(model.version,),
            platform="onnx_onnxv1",
            inputs=model.card.inputs,
            outputs=model.outputs,
            encoded=frozenset(model.images),
        )

    def contract(self, name: str) -> dict[str, Any]:
        """The contract as data, with each labelled output's labels."""
        model = self._repository.serving(name, "")
        contract: dict[str, Any] = msgspec.to_builtins(model.contract)
        return contract | {"model": model.name, "labels": model.labels}

    def runs_on(self, name: str) -> Sequence[str]:
        """Which of its contract's accelerators do the work."""
        return self._repository.serving(name, "").choice.runs_on

    def measured(self, name: str) -> dict[str, float | None]:
        """How fast it has been; numbers are None before the first answer."""
        model = self._repository.serving(name, "")
        self._serve.settle_books()
        return self._journal.measured(model.name)

    def config(self, name: str, version: str) -> dict[str, Any]:
        """Triton's model configuration, as far as it says something here."""
        model = self._repository.serving(name, version)

        def described(spec: TensorSpec) -> dict[str, Any]:
            kind = "TYPE_STRING" if spec.dtype == "BYTES" else f"TYPE_{spec.dtype}"
            return {"name": spec.name, "data_type": kind, "dims": plain_shape(spec)}

        return {
            "name": model.name,
            "platform": "onnxruntime_onnx",
            "backend": "onnxruntime",
            "max_batch_size": 0,
            "input": [described(spec) for spec in model.card.inputs],
            "output": [described(spec) for spec in model.outputs],
        }

    def stats(self, name: str | None) -> list[dict[str, Any]]:
        models = [self._repository.serving(name, "")] if name else self._serving()
        self._serve.settle_books()
        return [self._journal.statistics(model.name, model.version) for model in models]

    async def load(self, name: str) -> None:
        await self._repository.load(name)

    async def unload(self, name: str) -> None:
        await self._repository.unload(name)

    def explain(self, request_id: str) -> dict[str, Any] | None:
        self._serve.settle_books()
        return self._journal.explain(request_id)

    def settle_books(self) -> None:
        """What was answered until now is in journal and record."""
        self._serve.settle_books()

    def record(self) -> bytes:
        """What happened in the last hour, for `isthmus audit`."""
        self._serve.settle_books()
        return self._recorder.last_hour()

    def metrics(self) -> bytes:
        self._serve.settle_books()
        return self._metrics.render()

    def status(self) -> dict[str, Any]:
        """The daemon now, for `isthmus status`."""
        self._serve.settle_books()
        now_s = asyncio.get_running_loop().time()
        known = self._planner.snapshot(now_s)
        return {
            "version": VERSION,
            "uptime_s": round(now_s - self._started_at_s, 1),
            "device": msgspec.to_builtins(self._machine),
            "threads": self._machine.threads,
            "fingerprint": self._fingerprinting.snapshot(),
            "sensors": msgspec.to_builtins(self._watch.sensors),
            "power": self._watch.snapshot(self._planner.power(now_s)),
            "models": [
                self._model_now(entry, known["models"].get(entry.name, {})) for entry in self._repository.entries()
            ],
            "companion": self._companion_now(known["link"]),
            "identity": self._identity(),
            "metering": self._meter.snapshot(),
            "record": self._recorder.snapshot(),
            "queue_ms": round(self._compute.queue_ms, 3),
            **self._journal.counts(),
            "emulation": {"slowdown": self._compute.slowdown},
        }

    def _model_now(self, entry: Entry, known: Mapping[str, Any]) -> dict[str, Any]:
        """`known`: what the planner says of it; {} until it is measured."""
        model, journal = entry.model, self._journal
        return {
            "name": entry.name,
            "version": entry.version,
            "state": str(entry.state),
            "reason": entry.reason,
            "progress": entry.progress,
            "profiled": bool(known),
            "runs_on": list(model.choice.runs_on) if model is not None else [],
            "calibration_note": model.calibration_note if model is not None else "",
            "accelerators_note": model.choice.note if model is not None else "",
            "cuts_note": model.card.note if model is not None else "",
            "placements": journal.placements(entry.name),
            "p50_ms": journal.p50_ms(entry.name),
            "shadow": journal.shadows(entry.name),
            "spot_checks": journal.checks(entry.name),
            "joules": journal.joules_mean(entry.name),
            **known,
        }

    def _companion_now(self, link: Mapping[str, float]) -> dict[str, Any]:
        """`link`: as the planner estimates it."""
        uplink, seen = self._uplink, self._uplink.observation
        return {
            "address": uplink.address,
            "state": uplink.state,
            "peer": uplink.peer,
            "connects": uplink.connects,
            "inflight": uplink.inflight,
            "link": link,
            "connections": [msgspec.to_builtins(one) for one in seen.connections] if seen is not None else [],
            "unreached": [
                {"address": one.address, "code": one.code, "reason": one.why, "next_try_s": round(one.next_try_s, 1)}
                for one in uplink.unreached
            ],
        }

    def _serving(self) -> list[ServedModel]:
        return [entry.model for entry in self._repository.entries() if entry.model is not None]


def _parameters(request_id: str, outcome: Outcome) -> dict[str, str | float]:
    """What the answer says about itself; scalars only, as the protocol demands (timings are JSON in a string)."""
    timings = {stage: round(ms, 3) for stage, ms in outcome.stages_ms.items()}
    timings["total"] = round(outcome.total_ms, 3)
    return {
        "isthmus.request_id": request_id,
        "isthmus.placement": str(outcome.ran.placement),
        "isthmus.cut": outcome.ran.cut or "",
        "isthmus.codec": outcome.ran.codec or "",
        "isthmus.fallback": outcome.fallback,
        "isthmus.predicted_ms": round(outcome.decision.chosen.predicted_ms, 3),
        "isthmus.timings": msgspec.json.encode(timings).decode(),
        **_costs(outcome.decision.chosen),
    }


def _costs(chosen: PlanEstimate) -> dict[str, float]:
    """Joules and money as predicted, where they are known and not nothing."""
    costs = {"isthmus.predicted_j": round(chosen.energy_j, 4), "isthmus.predicted_money": chosen.money}
    return {name: cost for name, cost in costs.items() if cost}
