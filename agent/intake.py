"""From a protocol's request to an admitted one: checked against the model, its deadline fixed, its bytes counted.

Not the decision (planner) and not the work (serve). What passes here is trusted afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from agent.room import Holding, Room
from agent.served_model import ServedModel
from split.errors import InvalidRequest
from split.graph.growth import sizes_of
from split.ids import RequestId
from split.oip.options import RequestOptions
from split.plan.plan import Placement, RequestFacts
from split.profiles.contract import strictest
from split.tensor import Array, Tensors
from split.wire.messages import Priority

_CLASSES: Final = ("gold", "silver", "bronze")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """One admitted request. Every input of the model is there, with the right dtype and shape."""

    id: RequestId
    model: ServedModel
    inputs: Tensors
    encoded: tuple[str, ...]
    """Names of the inputs that came as encoded bytes (a BYTES tensor of shape [1])."""
    outputs: tuple[str, ...]
    """Outputs wanted, in the order of the reply."""
    facts: RequestFacts
    received_at_s: float
    deadline_at_s: float
    holding: Holding
    """Its bytes; whoever makes more of the request says so here."""
    part: int = 0
    """Of a request that is served in parts, how many go before this one."""
    priority: int = 0
    """As Triton has it: 1 is the highest, 0 the default. The link heeds it, and the worker where nobody is late by
    it."""

    @property
    def items(self) -> int:
        """In its batch; 1 where the model takes none."""
        dim, sizes = self.model.batch_dim, self.facts.sizes
        return 1 if dim is None or not sizes else sizes[dim]

    @property
    def came_in_ms(self) -> float:
        """From its header to its admission, its body's time: over when it is decided, and no plan's."""
        return (self.deadline_at_s - self.received_at_s) * 1000 - self.facts.budget_ms

    @property
    def link_priority(self) -> Priority:
        """0, the default, lies with 2 between the highest (1) and all the others (3 and more)."""
        return {0: Priority.NORMAL, 1: Priority.URGENT, 2: Priority.NORMAL}.get(self.priority, Priority.BULK)

    @property
    def rank(self) -> int:
        """On the worker, the least first: by class, and within it by priority, as on the link."""
        return len(Priority) * _CLASSES.index(self.model.contract.behaviour.service_class) + self.link_priority

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.holding.release()


def bytes_of(array: Array) -> int:
    """What a tensor's values occupy; of BYTES the elements themselves."""
    if array.dtype.kind == "O":
        return sum(len(item) for item in array.reshape(-1))
    return int(array.nbytes)


def _encoded_inputs(model: ServedModel, inputs: Mapping[str, Array]) -> tuple[str, ...]:
    """Check every input against the model's; names of those that came encoded."""
    wanted = model.input_specs
    if unknown := [name for name in inputs if name not in wanted]:
        raise InvalidRequest(f"model {model.name!r} has no input {unknown[0]!r}; its inputs are {', '.join(wanted)}")
    if missing := [name for name in wanted if name not in inputs]:
        raise InvalidRequest(f"input {missing[0]!r} of model {model.name!r} is missing from the request")
    encoded = []
    for name, array in inputs.items():
        if name in model.images and array.dtype.kind == "O" and wanted[name].dtype != "BYTES":
            if array.shape != (1,):
                raise InvalidRequest(f"encoded input {name!r} must be BYTES of shape [1], got {list(array.shape)}")
            encoded.append(name)
        elif (why := wanted[name].refuse(array)) is not None:
            hint = " (or one picture as BYTES of shape [1])" if name in model.images else ""
            raise InvalidRequest(f"model {model.name!r}: {why}{hint}")
    return tuple(encoded)


class Intake:
    """Admits requests while their bytes fit."""

    def __init__(self, *, default_deadline_ms: float, room: Room) -> None:
        self._default_deadline_ms = default_deadline_ms
        self.room = room

    def admit(
        self,
        model: ServedModel,
        inputs: Tensors,
        outputs: tuple[str, ...],
        options: RequestOptions,
        *,
        received_at_s: float,
        now_s: float,
    ) -> InferenceRequest:
        """The request as the daemon serves it, to be used in a `with` block: its bytes are held until that ends.

        Raises InvalidRequest for what does not fit the model, Overloaded when no room is left for its bytes.
        """
        encoded = _encoded_inputs(model, inputs)
        names = model.output_names
        if unknown := [name for name in outputs if name not in names]:
            raise InvalidRequest(
                f"model {model.name!r} has no output {unknown[0]!r}; its outputs are {', '.join(names)}"
            )
        allowed = model.contract.data.fidelity
        if options.fidelity is not None and options.fidelity > allowed.bound:
            raise InvalidRequest(
                f"parameter isthmus.fidelity is {options.fidelity:g}: looser than what the contract of model "
                f"{model.name!r} allows, whose bound is {allowed.bound:g} ({allowed.measure}); ask for that or closer"
            )
        behaviour = model.contract.behaviour
        limits = [options.deadline_ms, behaviour.latency_p99_ms, self._default_deadline_ms]
        deadline_at_s = received_at_s + min(ms for ms in limits if ms is not None) / 1000
        total = sum(map(bytes_of, inputs.values()))
        facts = RequestFacts(
            budget_ms=(deadline_at_s - now_s) * 1000,
            mode=None if options.mode == "auto" else Placement(options.mode),
            cut=options.cut,
            codec=options.codec,
            fidelity=options.fidelity,
            privacy=strictest(options.privacy, model.contract.data.privacy),
            encoded_bytes=total if encoded else 0,
            sizes=() if encoded else sizes_of(model.open_dims, inputs),
        )
        return InferenceRequest(
            id=RequestId(secrets.token_hex(8)),
            model=model,
            inputs=inputs,
            encoded=encoded,
            outputs=outputs or names,
            facts=facts,
            received_at_s=received_at_s,
            deadline_at_s=deadline_at_s,
            holding=Holding(self.room, total),
            priority=options.priority,
        )
