"""`isthmus explain REQUEST_ID`: why a request went where it went, predicted and measured side by side."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from agent.commands.options import add_url_argument
from agent.http_client import DaemonClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="isthmus.request_id of an answer")
    add_url_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Ask the daemon about one request and print what it remembers; always 0."""
    request_id = quote(os.fsencode(args.request_id), safe="")
    explained = DaemonClient(args.url).get(f"/v2/isthmus/explain/{request_id}")
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(explained), indent=2).decode())
    else:
        for line in _lines(explained):
            print(line)
    return 0


def _lines(explained: Mapping[str, Any]) -> Iterator[str]:
    chosen: Mapping[str, Any] = explained.get("chosen") or {}
    yield f"{'request':<10} {explained.get('request_id', '?')} to {explained.get('model', '?')}"
    yield f"{'chosen':<10} {_plan(chosen)}{_parts(chosen)}, predicted {_ms(chosen.get('predicted_ms'))}{_costs(chosen)}"
    yield f"{'because':<10} {explained.get('reason') or 'no reason was kept'}"
    if explained.get("why_not_split"):
        yield f"{'no split':<10} {explained['why_not_split']}"
    if len(counts := {name: weight for name, weight in (explained.get("objective") or {}).items() if weight}) > 1:
        yield f"{'counted':<10} " + ", ".join(f"{name} {100 * weight:.0f} %" for name, weight in counts.items())
    if explained.get("ran") not in (None, "", _plan(chosen)):
        yield f"{'ran':<10} {explained['ran']}"
    if explained.get("fallback"):
        yield f"{'fallback':<10} {explained['fallback']}"
    if explained.get("error"):
        yield f"{'error':<10} {explained['error']}"
    if explained.get("total_ms") is not None:
        yield f"{'took':<10} {_ms(explained['total_ms'])}, deadline {_ms(explained.get('deadline_ms'))}"
    if energy := explained.get("energy"):
        joules = f"{energy['used_j']:.3g} J used above idle, {energy['predicted_j']:.3g} J predicted"
        yield f"{'energy':<10} {joules} ({energy['source']})"
    link: Mapping[str, Any] = explained.get("link") or {}
    if link:
        yield f"{'link':<10} " + ", ".join(f"{key} {value:g}" for key, value in link.items())
    yield from _stages(chosen.get("stages_ms") or {}, explained.get("measured_ms") or {})
    runners: list[Mapping[str, Any]] = explained.get("runners_up") or []
    if runners:
        yield ""
        compared = f" of {explained['candidates']} compared" if explained.get("candidates") else ""
        yield f"runners-up{compared}"
    for plan in runners:
        why_not = f"  {plan['why_not']}" if plan.get("why_not") else ""
        yield f"  {_plan(plan):<34} {_ms(plan.get('predicted_ms')):>12}{_costs(plan)}{why_not}"


def _stages(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[str]:
    """One row a stage, in the order of the prediction; stages that were nothing on both sides are left out."""
    stages = [stage for stage in dict.fromkeys((*predicted, *measured)) if predicted.get(stage) or measured.get(stage)]
    if not stages:
        return
    yield ""
    yield f"{'stage':<14} {'predicted':>12} {'measured':>12}"
    for stage in stages:
        yield f"{stage:<14} {_ms(predicted.get(stage)):>12} {_ms(measured.get(stage)):>12}"


def _plan(plan: Mapping[str, Any]) -> str:
    return " ".join(str(plan[key]) for key in ("placement", "cut", "codec") if plan.get(key)) or "unknown"


def _parts(plan: Mapping[str, Any]) -> str:
    return f" in {plan['parts']} parts" if plan.get("parts", 1) > 1 else ""


def _costs(plan: Mapping[str, Any]) -> str:
    """Joules and money, where they are known and not nothing."""
    energy = f", {plan['energy_j']:.3g} J" if plan.get("energy_j") else ""
    return energy + (f", {plan['money']:.3g} of money" if plan.get("money") else "")


def _ms(value: object) -> str:
    return f"{value:.2f} ms" if isinstance(value, int | float) else "–"
