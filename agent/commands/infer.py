"""`isthmus infer MODEL INPUT`: one request to the running daemon, and what became of it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from agent.commands.options import add_url_argument, not_negative, positive
from agent.http_client import DaemonClient
from split.errors import InvalidRequest
from split.oip.infer import OipResponse, Scalar
from split.oip.options import CODECS, MODES
from split.tensor import Array, Tensors, dtype_name
from split.workbench.inputs import read_inputs

TOP: Final = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of a model in the daemon's repository")
    parser.add_argument(
        "input", metavar="INPUT", type=Path, help="a picture (JPEG, PNG) or a .npz with the inputs by name"
    )
    add_url_argument(parser)
    parser.add_argument("--mode", choices=MODES, default="auto", help="force a placement (default: the daemon chooses)")
    parser.add_argument("--cut", metavar="ID", help="force a cut, see `isthmus cuts`")
    parser.add_argument("--codec", choices=CODECS, help="force how tensors travel")
    parser.add_argument(
        "--fidelity", type=not_negative, metavar="X", help="a bound closer than the contract's, by its measure"
    )
    parser.add_argument("--deadline-ms", type=positive, metavar="MS", help="answer within so many milliseconds")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Send one request and print outputs, plan and timings; always 0."""
    client = DaemonClient(args.url)
    described = client.describe(args.model)
    inputs = _read_input(args.input, described)
    wishes = {
        "isthmus.mode": args.mode,
        "isthmus.cut": args.cut,
        "isthmus.codec": args.codec,
        "isthmus.fidelity": args.fidelity,
        "isthmus.deadline_ms": args.deadline_ms,
    }
    parameters: dict[str, Scalar] = {key: value for key, value in wishes.items() if value is not None}
    start_s = time.perf_counter()
    answer = client.infer(args.model, inputs, parameters)
    round_trip_ms = (time.perf_counter() - start_s) * 1000
    shown = _as_json(answer, round_trip_ms, described.get("contract", {}).get("labels", {}))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    else:
        for line in _lines(shown):
            print(line)
    return 0


def _read_input(path: Path, described: Mapping[str, Any]) -> Tensors:
    """The inputs in a file: an archive of arrays, or a picture for the one input that takes pictures."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}); INPUT is a picture or a .npz file") from None
    if path.suffix == ".npz" or data.startswith(b"PK"):
        return read_inputs(path) or {}
    inputs = described.get("contract", {}).get("data", {}).get("inputs", ())
    pictures = [tensor["name"] for tensor in inputs if tensor.get("encoded")]
    if len(pictures) != 1:
        wanted = ", ".join(f"{one['name']} {one['datatype']} {one['shape']}" for one in described.get("inputs", ()))
        raise InvalidRequest(
            f"model {described.get('name')} takes {'several pictures' if pictures else 'no picture'}; "
            f"give a .npz with {wanted}"
        )
    picture: Array = np.empty(1, object)
    picture[0] = data
    return {pictures[0]: picture}


def _as_json(answer: OipResponse, round_trip_ms: float, labels: Mapping[str, list[str]]) -> dict[str, Any]:
    said = answer.parameters
    timings = said.get("isthmus.timings", "{}")
    return {
        "model": answer.model_name,
        "version": answer.model_version,
        "request_id": said.get("isthmus.request_id", ""),
        "plan": {key: said.get(f"isthmus.{key}") or None for key in ("placement", "cut", "codec")},
        "fallback": said.get("isthmus.fallback") or None,
        "predicted_ms": said.get("isthmus.predicted_ms"),
        "timings_ms": msgspec.json.decode(timings) if isinstance(timings, str) else {},
        "round_trip_ms": round(round_trip_ms, 3),
        "outputs": [_summary(name, array, labels.get(name, [])) for name, array in answer.outputs.items()],
    }


def _summary(name: str, array: Array, labels: list[str]) -> dict[str, Any]:
    summary: dict[str, Any] = {"name": name, "dtype": dtype_name(array.dtype), "shape": list(array.shape)}
    if array.dtype.kind not in "biuf" or not array.size:
        return summary
    flat = array.reshape(-1)
    values = flat.astype(np.float64)
    summary |= {"min": float(values.min()), "max": float(values.max()), "mean": float(values.mean())}
    if labels and len(labels) == flat.size:  # one row of scores, one word for each
        best = np.argsort(-values, kind="stable")[:TOP]
        summary["top"] = [{"index": int(i), "value": float(values[i]), "label": labels[i]} for i in best]
    else:
        summary["first"] = flat[:TOP].tolist()
    return summary


def _lines(shown: Mapping[str, Any]) -> Iterator[str]:
    plan = shown["plan"]
    yield f"{'model':<10} {shown['model']}, version {shown['version']}"
    yield f"{'request':<10} {shown['request_id']}  (isthmus explain {shown['request_id']})"
    chosen = [str(plan[key]) for key in ("placement", "cut", "codec") if plan[key]]
    predicted = shown["predicted_ms"]
    promise = f"  (predicted {predicted:.1f} ms)" if isinstance(predicted, float | int) else ""
    yield f"{'plan':<10} {' '.join(chosen) or 'unknown'}{promise}"
    if shown["fallback"]:
        yield f"{'fallback':<10} {shown['fallback']}"
    stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in shown["timings_ms"].items())
    yield f"{'time':<10} {shown['round_trip_ms']:.1f} ms here" + (f"; daemon: {stages} ms" if stages else "")
    for output in shown["outputs"]:
        spread = f"  {output['min']:.4g} … {output['max']:.4g}, mean {output['mean']:.4g}" if "min" in output else ""
        yield f"{'output':<10} {output['name']} {output['dtype']} {output['shape']}{spread}"
        for one in output.get("top", ()):
            yield f"{'':<10} {one['value']:9.4f}  {one['label']}  ({one['index']})"
        if "first" in output:
            yield f"{'':<10} first: {', '.join(format(value, '.6g') for value in output['first'])}"
