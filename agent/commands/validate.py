"""`isthmus validate`: a contract by itself, against the model beside it, or against a running service."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from agent.commands.conformance import Field, Measured, Metadata, Stated, Tensor, hold, hold_signature, shown
from agent.commands.options import service_url
from agent.http_client import DaemonClient, DaemonRefused, DaemonUnreachable
from agent.log_lines import printable
from split.errors import ConfigError, InvalidModel, RemoteProtocolError
from split.oip.infer import plain_shape
from split.profiles.contract import Contract, load_contract, load_labels
from split.profiles.contract_schema import contract_schema
from split.tensor import TensorSpec

_KINDS: Final = {"KIND_CPU": "cpu", "KIND_GPU": "cuda"}
"""Of Triton's instance groups."""

_CELL: Final = 48
"""Characters of a value in the table; `--json` has the whole."""

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--contract", type=Path, metavar="FILE", help="the contract (YAML)")
    what.add_argument("--schema", action="store_true", help="print the JSON Schema of a contract instead")
    parser.add_argument(
        "--service",
        type=service_url,
        metavar="URL",
        help="a running service of the Open Inference Protocol, http://HOST:PORT or unix:///PATH (default: none: "
        "the file alone, and the model beside it where there is one)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """0 when every field holds, 1 when one does not; ConfigError when the file is no contract."""
    if args.schema:
        print(json.dumps(contract_schema(), indent=2, ensure_ascii=False))
        return 0
    path: Path = args.contract
    contract = load_contract(path)
    fields = _held_by_service(contract, path, args.service) if args.service else _held_by_files(contract, path)
    ok = all(field.ok for field in fields)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode({"ok": ok, "fields": fields}), indent=2).decode())
    else:
        for line in _lines(fields):
            print(line)
    return 0 if ok else 1


# -- the file ---------------------------------------------------------------------------------------------------------


def _held_by_files(contract: Contract, path: Path) -> list[Field]:
    """Against what lies beside it: the folder's name, the labels, the newest version of the model. A draft by another
    name is held as the contract is. Without a model only labels that are not there are told: they may come with it."""
    folder = path.absolute().parent
    model = _model_beside(folder)
    labels, missing = _own_labels(contract, folder)
    if model is None:
        return [msgspec.structs.replace(field, ok=True, mend="") for field in missing]
    fields = [_model_named(contract, folder.name), *missing]
    try:
        fields += hold_signature(contract, _signature(model), labels)
    except InvalidModel as error:
        fields.append(Field(path="model", ok=False, wanted=str(model), found=str(error), mend="put a model there"))
    return fields


def _model_beside(folder: Path) -> Path | None:
    versions = [one for one in folder.glob("*/model.onnx") if one.parent.name.isdigit()]
    return max(versions, key=lambda one: int(one.parent.name), default=None)


def _model_named(contract: Contract, name: str) -> Field:
    ok = contract.model in ("", name)
    mend = "" if ok else f"write {name}, or leave it out: the daemon serves the model by its folder's name"
    return Field(path="model", ok=ok, wanted=contract.model or name, found=name, mend=mend)


def _signature(model: Path) -> Metadata:
    """What a service of this file would state. InvalidModel when the runtime refuses it."""
    from split.runtime.segment import OrtEngine  # the runtime, which asking a service can do without

    segment = OrtEngine().open(model, threads=1)

    def told(specs: Sequence[TensorSpec]) -> list[Tensor]:
        return [Tensor(name=spec.name, datatype=spec.dtype, shape=plain_shape(spec)) for spec in specs]

    return Metadata(name=model.parents[1].name, inputs=told(segment.input_specs), outputs=told(segment.output_specs))


def _own_labels(contract: Contract, folder: Path) -> tuple[Mapping[str, Sequence[str]], list[Field]]:
    """The labels beside the contract, and the fields whose file is not there."""
    labels: dict[str, tuple[str, ...]] = {}
    missing = []
    for number, output in enumerate(contract.data.outputs):
        alone = Contract(data=msgspec.structs.replace(contract.data, outputs=(output,)))
        try:
            labels |= load_labels(alone, folder)
        except ConfigError as error:
            mend = f"put {output.labels} beside the contract, one label a line"
            missing.append(
                Field(
                    path=f"data.outputs[{number}].labels", ok=False, wanted=output.labels, found=str(error), mend=mend
                )
            )
    return labels, missing


# -- the service ------------------------------------------------------------------------------------------------------


def _held_by_service(contract: Contract, path: Path, url: str) -> list[Field]:
    client = DaemonClient(url, option="--service")
    name = contract.model or path.absolute().parent.name
    try:
        stated = _ask(client, name)
    except DaemonUnreachable as error:
        mend = "start it, or correct --service"
        return [Field(path="service", ok=False, wanted=url, found=str(error), mend=mend)]
    except RemoteProtocolError:
        mend = "correct --service: what answers there speaks no Open Inference Protocol (GET /v2/models/NAME)"
        return [Field(path="service", ok=False, wanted=url, found="no metadata of a model", mend=mend)]
    except DaemonRefused as error:
        mend = f"have the service load {name}, or correct `model` in the contract"
        return [Field(path="model", ok=False, wanted=name, found=f"{error} (HTTP {error.status})", mend=mend)]
    labels, _ = _own_labels(contract, path.absolute().parent)
    return [
        _model_named(msgspec.structs.replace(contract, model=name), stated.metadata.name),
        *hold(contract, stated, labels),
    ]


def _ask(client: DaemonClient, name: str) -> Stated:
    """All that the service says of the model. A service that knows no contracts answers OPTIONS as it likes."""
    described = _or_nothing(lambda: client.describe(name))
    try:
        metadata = _as(Metadata, client.about(name))
    except DaemonRefused:
        if "inputs" not in described:
            raise
        metadata = _as(Metadata, described)
    contract = described.get("contract")
    if isinstance(contract, dict):
        labels, runs_on = contract.get("labels"), described.get("runs_on")
        return Stated(
            metadata=metadata,
            contract=contract,
            labels=_as(dict[str, list[str]], labels) if labels is not None else {},
            measured=_as(Measured, described.get("measured", {})),
            accelerators=_as(list[str], runs_on) if runs_on is not None else None,
        )
    config, stats = _or_nothing(lambda: client.about(name, "config")), _or_nothing(lambda: client.about(name, "stats"))
    return Stated(metadata=metadata, measured=_from_statistics(stats), accelerators=_from_config(config))


def _or_nothing(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What an extension answers; {} from a service that does not have it."""
    try:
        return ask()
    except (DaemonRefused, RemoteProtocolError):
        return {}


def _as(kind: type[T], value: object) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(
            f"the service describes its model in another way than the protocol: {error}"
        ) from None


def _from_config(config: Mapping[str, Any]) -> list[str] | None:
    """Where Triton's model configuration says that the model runs."""
    try:
        kinds = [_KINDS[group["kind"]] for group in config["instance_group"]]
    except (KeyError, TypeError):
        return None
    return list(dict.fromkeys(kinds)) or None


def _from_statistics(stats: Mapping[str, Any]) -> Measured:
    """Triton's statistics know sums, no p99; what one instance could answer in a second, they tell."""
    try:
        spent = stats["model_stats"][0]["inference_stats"]
        count = int(spent["success"]["count"])
        busy_ns = sum(int(spent[stage]["ns"]) for stage in ("compute_input", "compute_infer", "compute_output"))
    except (IndexError, KeyError, TypeError, ValueError):
        return Measured()
    return Measured(requests=count, per_s=count * 1e9 / busy_ns if busy_ns > 0 else None)


# -- the table --------------------------------------------------------------------------------------------------------


def _lines(fields: Sequence[Field]) -> Iterator[str]:
    """A row a field, what to do below those that fail, and the sum. A foreign service has its say in cells and mends:
    nothing of it reaches the terminal as control characters."""
    rows = [("", "FIELD", "WANTED", "FOUND")]
    rows += [("✓" if field.ok else "✗", field.path, _cell(field.wanted), _cell(field.found)) for field in fields]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    for row, field in zip(rows, (None, *fields), strict=True):
        if fields:
            yield f"{row[0]:1} {row[1]:{wide[1]}}  {row[2]:{wide[2]}}  {row[3]}".rstrip()
        if field is not None and field.mend:
            yield f"  → {printable(field.mend)}"
    failing = sum(not field.ok for field in fields)
    if not fields:
        yield "the contract is well-formed; nothing was there to hold against it (a model beside it, --service URL)"
    elif failing:
        yield f"{failing} of {len(fields)} fields do not hold"
    else:
        yield f"all {len(fields)} fields hold"


def _cell(value: object) -> str:
    text = "–" if value is None else printable(shown(value))
    return text if len(text) <= _CELL else f"{text[: _CELL - 1]}…"
