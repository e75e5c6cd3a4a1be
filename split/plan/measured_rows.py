"""Every plan that was measured, as a row: local, the splits of each cut in each codec, the offloads. What the contract
forbids of them is `rows.py`'s, columns are made of them in `table.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from split.graph.card import CutCard, ModelCard
from split.plan.estimate import Drift
from split.plan.plan import LOCAL, Placement, Plan
from split.plan.rows import Row
from split.profiles.contract import Contract
from split.profiles.measured import CutCosts, ModelProfile

ESTIMATE_SIGMA: Final = 0.06
"""Relative scatter of an estimated head: its mean error is held under 5 % (`scripts/bench costmodel`), a mean error is
0.8 σ."""
_ESTIMATED: Final = 1.0 + (ESTIMATE_SIGMA / Drift.NOISE) ** 2
"""What σ² of a head is multiplied by where its time is estimated: relative to the least σ of a measurement."""


def measured_rows(card: ModelCard, profile: ModelProfile, contract: Contract) -> list[Row]:
    """In the order local, splits in topological order, offloads; a cut of the card that was not measured has none."""
    measured = {cut.cut: cut for cut in profile.cuts}
    rows = [Row(plan=LOCAL, head_ms=profile.whole_ms, finish_ms=0.0)]
    for cut in card.cuts:
        if (costs := measured.get(cut.id)) is not None:
            rows += _splits(cut, costs, down=_down_bytes(card, profile, cut))
    return [*rows, *_offloads(card, profile, contract)]


def _splits(cut: CutCard, costs: CutCosts, *, down: int) -> Iterator[Row]:
    """One for each codec that was measured; `down`: bytes of the reply."""
    for codec in costs.codecs:
        yield Row(
            plan=Plan(placement=Placement.SPLIT, cut=cut.id, codec=codec.codec),
            head_ms=costs.head_ms,
            tail_ms=costs.tail_ms,
            finish_ms=costs.tail_ms,
            codec=codec,
            down=down,
            depth=cut.compute_share,
            weight_bytes=cut.head_weight_bytes,
            raw_inputs=cut.shown_inputs,
            doubt=_ESTIMATED if costs.estimated else 1.0,
        )


def _offloads(card: ModelCard, profile: ModelProfile, contract: Contract) -> Iterator[Row]:
    """One for each codec of the input that was measured; as it came encoded last, where the contract says how a picture
    becomes a tensor: that needs no measurement."""
    codecs = {codec.codec: codec for codec in profile.input_codecs if codec.codec != "encoded"}
    for name in (*codecs, *(("encoded",) if contract.encoded() else ())):
        yield Row(
            plan=Plan(placement=Placement.OFFLOAD, codec=name),
            tail_ms=profile.whole_ms,
            finish_ms=profile.whole_ms,
            codec=codecs.get(name),
            down=profile.output_bytes,
            raw_inputs=tuple(spec.name for spec in card.inputs),
        )


def _down_bytes(card: ModelCard, profile: ModelProfile, cut: CutCard) -> int:
    """Bytes of the outputs made in the tail: their share of what was measured for all outputs."""
    sizes = {spec.name: spec.nbytes(profile.dims) for spec in card.outputs}
    share = sum(sizes[name] for name in cut.tail_outputs) / (sum(sizes.values()) or 1)
    return round(profile.output_bytes * share)
