"""What a service says of itself, held against a contract, field by field. Pure: `validate` asks the service.

A demand at its default is met by whoever says nothing; what a service does not state it does not promise. Where a
contract bounds (a latency, a codec, a privacy), a service that keeps closer bounds meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from split.errors import ConfigError
from split.profiles.boxes import Boxes, check_boxes
from split.profiles.contract import PRIVACY_ORDER, Contract, InputContract, OutputContract, Privacy, strictest
from split.profiles.image_spec import ImageSpec
from split.tensor import NUMPY_DTYPES, TensorSpec

UNSTATED_MEND: Final = (
    "the service does not state it: serve the model with `isthmus agent` and this contract beside it, or take the key "
    "out of the contract"
)

FAILED_MAX: Final = 0.01
"""Of the requests: with more that get no answer, there is no latency that 99 of 100 keep."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """As `GET /v2/models/NAME` of the Open Inference Protocol has it; other keys may come."""

    name: str
    datatype: str
    shape: list[int]


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the service has measured on its own requests."""

    requests: int = 0
    p99_ms: float | None = None
    failed_ratio: float | None = None
    """Share of the last requests that got no answer."""
    per_s: float | None = None
    """Requests a second that it could answer, at least."""


class Stated(msgspec.Struct, frozen=True, kw_only=True):
    """All that a service says of a model."""

    metadata: Metadata
    contract: Mapping[str, Any] | None = None
    """What it leaves out is at its default; None from a service that knows no contracts."""
    labels: Mapping[str, Sequence[str]] = {}
    """Output → its labels."""
    measured: Measured = Measured()
    accelerators: Sequence[str] | None = None
    """Where the model runs, if the service says so."""


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One demand and what became of it; `mend` is empty where it is met."""

    path: str
    ok: bool
    wanted: object
    found: object
    mend: str = ""


def hold(contract: Contract, stated: Stated, labels: Mapping[str, Sequence[str]]) -> list[Field]:
    """Every field of `contract` against what is stated. `labels`: of outputs whose file lies beside the contract."""
    if stated.contract is not None:
        stated = msgspec.structs.replace(stated, contract=_with_defaults(stated.contract))
    return [*_tensors(contract, stated, labels), *_words(contract, stated)]


def hold_signature(contract: Contract, metadata: Metadata, labels: Mapping[str, Sequence[str]]) -> list[Field]:
    """The part of `hold` that a model's file alone decides: names, dtypes and shapes."""
    stated = Stated(metadata=metadata, contract=_plain(contract), labels=labels)
    return list(_tensors(contract, stated, labels))


# -- tensors --------------------------------------------------------------------------------------------------------


def _tensors(contract: Contract, stated: Stated, labels: Mapping[str, Sequence[str]]) -> Iterator[Field]:
    inputs = {tensor.name: tensor for tensor in stated.metadata.inputs}
    for number, wanted in enumerate(contract.data.inputs):
        path = f"data.inputs[{number}]"
        yield _named(f"{path}.name", wanted.name, inputs, "input")
        if (found := inputs.get(wanted.name)) is not None:
            yield from _input(path, contract, wanted, found, stated)
    outputs = {tensor.name: tensor for tensor in stated.metadata.outputs}
    for number, output in enumerate(contract.data.outputs):
        path = f"data.outputs[{number}]"
        yield _named(f"{path}.name", output.name, outputs, "output")
        if output.name in outputs and output.labels is not None:
            yield _labels(f"{path}.labels", output, labels.get(output.name), stated)
    if (boxes := contract.data.fidelity.boxes) is not None:
        yield _readable(boxes, stated.metadata.outputs)


def _readable(boxes: Boxes, outputs: Sequence[Tensor]) -> Field:
    """Whether detections can be read off these outputs."""
    specs = [
        TensorSpec(name=one.name, dtype=one.datatype, shape=tuple(one.shape))
        for one in outputs
        if one.datatype in NUMPY_DTYPES
    ]
    path, wanted, said = "data.fidelity.boxes.heads", _plain(boxes)["heads"], {one.name: one.shape for one in outputs}
    try:
        check_boxes(boxes, specs, where=path.removesuffix(".heads"))
    except ConfigError as error:
        return Field(path=path, ok=False, wanted=wanted, found=said, mend=str(error))
    return Field(path=path, ok=True, wanted=wanted, found=said)


def _named(path: str, name: str, known: Mapping[str, Tensor], what: str) -> Field:
    ok = name in known
    mend = "" if ok else f"write the name of one of the model's {what}s ({', '.join(known) or 'it has none'})"
    return Field(path=path, ok=ok, wanted=name, found=name if ok else list(known), mend=mend)


def _input(path: str, contract: Contract, wanted: InputContract, found: Tensor, stated: Stated) -> Iterator[Field]:
    if wanted.dtype is not None:
        ok = wanted.dtype == found.datatype
        mend = "" if ok else f"write {found.datatype} into the contract, or export the model with {wanted.dtype}"
        yield Field(path=f"{path}.dtype", ok=ok, wanted=wanted.dtype, found=found.datatype, mend=mend)
    if wanted.shape is not None:
        ok = takes(wanted.shape, found.shape)
        mend = "" if ok else f"write {found.shape} into the contract, or export the model so that it takes these sizes"
        yield Field(path=f"{path}.shape", ok=ok, wanted=list(wanted.shape), found=found.shape, mend=mend)
    of_input = next((one for one in _list(stated.contract, "data", "inputs") if _dig(one, "name") == wanted.name), None)
    private = strictest(contract.data.privacy, wanted.privacy)
    theirs = [word for word in (_dig(stated.contract, "data", "privacy"), _dig(of_input, "privacy")) if _private(word)]
    yield _word(
        f"{path}.privacy",
        private,
        strictest(*cast(list[Privacy], theirs)) if theirs else None,
        default="any",
        holds=_as_strict,
        stated=stated,
    )
    if wanted.encoded is not None:
        rule = _plain(wanted.encoded)
        yield _word(
            f"{path}.encoded", rule, _dig(of_input, "encoded"), default=None, holds=lambda w, f: w == f, stated=stated
        )


def takes(wanted: Sequence[int], found: Sequence[int]) -> bool:
    """Whether a tensor declared as `found` takes all the sizes that `wanted` speaks of; -1 is any size in both."""
    return len(wanted) == len(found) and all(own in (-1, want) for want, own in zip(wanted, found, strict=True))


def _labels(path: str, output: OutputContract, own: Sequence[str] | None, stated: Stated) -> Field:
    found = stated.labels.get(output.name)
    if found is None:
        mend = f"put {output.labels} (one label a line) beside the contract of the service and load the model again"
        return Field(path=path, ok=False, wanted=output.labels, found=None, mend=mend)
    if own is None:
        said = f"{len(found)} labels, not compared: {output.labels} is not beside this contract"
        return Field(path=path, ok=True, wanted=output.labels, found=said)
    if list(own) == list(found):
        return Field(path=path, ok=True, wanted=output.labels, found=f"{len(found)} labels")
    differing = next((n for n, (a, b) in enumerate(zip(own, found, strict=False)) if a != b), min(len(own), len(found)))
    return Field(
        path=path,
        ok=False,
        wanted=f"{output.labels}: {len(own)} labels",
        found=f"{len(found)} labels, others from line {differing + 1} on",
        mend=f"copy {output.labels} to the service's model folder and load the model again",
    )


# -- words ----------------------------------------------------------------------------------------------------------


def _at_most(wanted: Any, found: Any) -> bool:
    return wanted is None or bool(found is not None and found <= wanted)


def _at_least(wanted: Any, found: Any) -> bool:
    return bool(found >= wanted)


def _equal(wanted: Any, found: Any) -> bool:
    return bool(wanted == found)


def _within(wanted: Any, found: Any) -> bool:
    return set(found) <= set(wanted)


def _private(word: object) -> bool:
    return word in PRIVACY_ORDER


def _as_strict(wanted: Any, found: Any) -> bool:
    return PRIVACY_ORDER.index(found) >= PRIVACY_ORDER.index(wanted)


def _threads(wanted: Any, found: Any) -> bool:
    return wanted in ("auto", found)


def _same_share(wanted: Any, found: Any) -> bool:
    return bool(abs(wanted - found) <= 1e-9)


def _same_boxes(wanted: Any, found: Any) -> bool:
    """With what either leaves out at its default."""
    try:
        return bool(wanted == found or msgspec.convert(wanted, Boxes) == msgspec.convert(found, Boxes))
    except msgspec.ValidationError:
        return False


_HOLDS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "resource.memory_bytes": _at_most,
    "resource.threads": _threads,
    "resource.accelerators": _within,
    "behaviour.class": _equal,
    "behaviour.weights.latency": _same_share,
    "behaviour.weights.throughput": _same_share,
    "behaviour.weights.energy": _same_share,
    "behaviour.weights.cost": _same_share,
    "behaviour.fallback.strategy": _equal,
    "behaviour.fallback.timeout_ms": _at_most,
    "behaviour.fallback.agreement_min": _at_least,
    "behaviour.retry.attempts": _at_most,
    "data.privacy": _as_strict,
    "data.depth_min_ratio": _at_least,
    "data.codecs": _within,
    "data.fidelity.measure": _equal,
    "data.fidelity.bound": _at_most,
    "data.fidelity.boxes": _same_boxes,
}
"""Path → whether a service whose contract says `found` keeps what `wanted` asks for."""

_SHARES: Final = tuple(path for path in _HOLDS if path.startswith("behaviour.weights."))


def _words(contract: Contract, stated: Stated) -> Iterator[Field]:
    wanted, default = _shares(_plain(contract)), _shares(_plain(Contract()))
    found = None if stated.contract is None else _shares(stated.contract)
    yield _latency(contract, stated)
    yield _throughput(contract, stated)
    for path, holds in _HOLDS.items():
        keys = path.split(".")
        theirs = _dig(found, *keys)
        if path == "resource.accelerators" and stated.accelerators is not None:
            theirs = list(stated.accelerators)
        if path == "resource.accelerators" and _dig(wanted, *keys) == _dig(default, *keys):
            holds = _anything  # asked for nothing
        if path == "behaviour.fallback.agreement_min" and "shadow" not in (
            contract.behaviour.fallback.strategy,
            _dig(found, "behaviour", "fallback", "strategy"),
        ):
            holds = _anything  # nothing is compared
        if path in ("data.fidelity.measure", "data.fidelity.boxes") and 0 in (
            contract.data.fidelity.bound,
            _dig(found, "data", "fidelity", "bound"),
        ):
            holds = _anything  # where nothing lossy is allowed, no measure is taken
        yield _word(path, _dig(wanted, *keys), theirs, default=_dig(default, *keys), holds=holds, stated=stated)


def _anything(wanted: Any, found: Any) -> bool:
    return True


def _word(
    path: str, wanted: object, found: object, *, default: object, holds: Callable[[Any, Any], bool], stated: Stated
) -> Field:
    if stated.contract is None and found is None:
        ok = wanted == default
        return Field(path=path, ok=ok, wanted=wanted, found=None, mend="" if ok else UNSTATED_MEND)
    try:
        ok = holds(wanted, found)
    except (TypeError, ValueError):  # a service says what it likes
        ok = False
    mend = ""
    if not ok and path == "resource.accelerators":
        mend = "run the service on a host that has one of these, or add to the contract where it runs"
    elif not ok:
        mend = (
            _set_there(path, wanted) if path not in _SHARES else "weigh there as here: only the ratio of weights counts"
        )
    return Field(path=path, ok=ok, wanted=wanted, found=found, mend=mend)


def _latency(contract: Contract, stated: Stated) -> Field:
    path, wanted = "behaviour.latency_p99_ms", contract.behaviour.latency_p99_ms
    failed_ratio = stated.measured.failed_ratio
    if wanted is not None and failed_ratio is not None and failed_ratio > FAILED_MAX:
        found = f"no answer to {100 * failed_ratio:.3g} % of the last requests"
        mend = "`isthmus explain` of one of them says why; a later deadline, or a fallback, would answer it"
        return Field(path=path, ok=False, wanted=wanted, found=found, mend=mend)
    return _measurable(
        path,
        wanted,
        stated.measured.p99_ms,
        stated,
        holds=_at_most,
        mend="it is the p99 of the last answers: give it a faster device, allow more codecs, or promise as much",
    )


def _throughput(contract: Contract, stated: Stated) -> Field:
    return _measurable(
        "behaviour.throughput_min_per_s",
        contract.behaviour.throughput_min_per_s or None,
        stated.measured.per_s,
        stated,
        holds=_at_least,
        mend="its longest stage allows no more: give it a faster device, allow more codecs, or ask for less",
    )


def _measurable(
    path: str,
    wanted: float | None,
    measured: float | None,
    stated: Stated,
    *,
    holds: Callable[[Any, Any], bool],
    mend: str,
) -> Field:
    """By what was measured where there are requests to go by, else by what the service's own contract promises."""
    promised = _dig(stated.contract, *path.split("."))
    found = measured if measured is not None else promised
    if wanted is None or (isinstance(found, int | float) and holds(wanted, found)):
        return Field(path=path, ok=True, wanted=wanted, found=found)
    if stated.contract is None and measured is None:
        mend = UNSTATED_MEND
    elif measured is None:
        mend = _set_there(path, wanted)
    return Field(path=path, ok=False, wanted=wanted, found=found, mend=mend)


def _set_there(path: str, wanted: object) -> str:
    return f"set {path} to {shown(wanted)} in the contract.yaml of the service and load the model again"


# -- data -----------------------------------------------------------------------------------------------------------


def _plain(struct: msgspec.Struct) -> dict[str, Any]:
    """As it comes out of JSON: lists, no tuples."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(struct))
    return plain


def _with_defaults(given: Mapping[str, Any]) -> Any:
    """What a service says with the defaults of the keys that it leaves out, those of its tensors too."""
    filled = _filled(given, _plain(Contract()))
    data = _dig(filled, "data")
    if isinstance(data, Mapping):
        inputs = [_filled(one, _of_input(one)) for one in _list(data, "inputs")] or data.get("inputs")
        filled["data"] = {**data, "inputs": inputs}
    return filled


def _of_input(given: Any) -> Any:
    """The defaults of an input, those of its pictures too if it takes any."""
    default = _plain(InputContract(name=""))
    return default | {"encoded": _IMAGE_DEFAULTS} if isinstance(_dig(given, "encoded"), Mapping) else default


_IMAGE_DEFAULTS: Final = {
    key: value for key, value in _plain(ImageSpec(resize=1, crop=1)).items() if key not in ("resize", "crop")
}


def _filled(given: Any, default: Any) -> Any:
    """With the defaults of the keys that are left out; what is no section where one belongs stays what it is."""
    if not (isinstance(given, Mapping) and isinstance(default, Mapping)):
        return given
    return {**given, **{key: _filled(given.get(key, value), value) for key, value in default.items()}}


def _shares(contract: Mapping[str, Any]) -> dict[str, Any]:
    """The same with weights that sum up to 1: only their ratio counts."""
    weights = _dig(contract, "behaviour", "weights")
    try:
        total = sum(weights.values())
        shares = {key: value / total for key, value in weights.items()}
    except (AttributeError, TypeError, ZeroDivisionError):
        return dict(contract)
    return {**contract, "behaviour": {**contract["behaviour"], "weights": shares}}


def _dig(value: object, *keys: str) -> Any:
    """What lies there, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _list(value: object, *keys: str) -> list[Any]:
    found = _dig(value, *keys)
    return found if isinstance(found, list) else []


def shown(value: object) -> str:
    """As one would write it in YAML."""
    match value:
        case str():
            return value
        case float():
            return f"{value:g}"
        case Mapping():
            return f"{{{', '.join(f'{key}: {shown(one)}' for key, one in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(shown, value))}]"
        case _:
            return msgspec.json.encode(value).decode()
