"""The words of a decision: plan, request facts, decision. Only values: `choose.py` compares, the planner knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from split.ids import KLT, CutId
from split.plan.values import value


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecKind:
    """What plans differ in by their codec."""

    lossless: bool = False
    """Decoded tensors are bit-exact; every other codec is held to the contract's fidelity bound."""
    of_pictures: bool = False
    """Of pictures, which only inputs are: offloads alone use it."""
    has_levels: bool = False
    """Settings to choose from; `isthmus calibrate` measures what each costs and does. What codecs without do to the
    outputs, `isthmus profile` measures."""
    needs_calibration: bool = False
    """The companion reads its payloads with the model's calibration."""


CODEC_KINDS: Final[Mapping[str, CodecKind]] = {
    "raw": CodecKind(lossless=True),
    "fp16": CodecKind(),
    "int8": CodecKind(),
    KLT: CodecKind(has_levels=True, needs_calibration=True),
    "encoded": CodecKind(lossless=True, of_pictures=True),
    "jpeg": CodecKind(of_pictures=True, has_levels=True),
    "webp": CodecKind(of_pictures=True, has_levels=True),
}
"""Every codec that a plan may have."""

LOSSLESS_CODECS: Final = frozenset(codec for codec, kind in CODEC_KINDS.items() if kind.lossless)
OF_PICTURES: Final = frozenset(codec for codec, kind in CODEC_KINDS.items() if kind.of_pictures)
WITH_LEVELS: Final = tuple(codec for codec, kind in CODEC_KINDS.items() if kind.has_levels)
REENCODED: Final = OF_PICTURES & frozenset(WITH_LEVELS)
"""A picture input made anew for the trip."""
NEEDS_CALIBRATION: Final = frozenset(codec for codec, kind in CODEC_KINDS.items() if kind.needs_calibration)


class Placement(StrEnum):
    LOCAL = "local"
    SPLIT = "split"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Placement + cut + codec: the thing that is chosen."""

    placement: Placement
    cut: CutId | None = None
    """Set exactly for a split."""
    codec: str | None = None
    """Set exactly when something travels: raw, fp16, int8, klt (split only), encoded, jpeg, webp (offload only)."""

    def __post_init__(self) -> None:
        assert (self.cut is not None) == (self.placement is Placement.SPLIT), self
        assert (self.codec is None) == (self.placement is Placement.LOCAL), self
        assert self.codec not in OF_PICTURES or self.placement is Placement.OFFLOAD, self

    def __str__(self) -> str:
        parts = (self.placement, self.cut, self.codec)
        return " ".join(str(part) for part in parts if part is not None)


LOCAL = Plan(placement=Placement.LOCAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What one request demands, as far as the decision goes."""

    budget_ms: float
    """Time left until the deadline."""
    mode: Placement | None = None
    """Forced by the caller (`isthmus.mode`); None lets the decider choose."""
    cut: CutId | None = None
    codec: str | None = None
    privacy: str = "any"
    """The stricter of the request's and the model's: any | no-raw-input | local-only. What the contract says of single
    inputs the `PlanTable` holds, whatever stands here."""
    fidelity: float | None = None
    """A bound closer than the contract's, by its measure (`isthmus.fidelity`); None: the contract's own."""
    encoded_bytes: int = 0
    """Size of the encoded input as it came; 0 when the input came as tensors."""
    sizes: tuple[int, ...] = ()
    """Of the model's open dims (`graph.growth.open_dims`), as the input tensors have them; () where the model has none
    or the input came encoded: then the costs hold as they were profiled."""


@value(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """One plan, predicted: a row of an explanation. Milliseconds."""

    plan: Plan
    predicted_ms: float
    risk_ms: float
    """The quantile that is held against the deadline (≥ predicted_ms)."""
    stages_ms: Mapping[str, float]
    """queue, activate, image, head (the whole for local), encode, up, cloud_queue, cloud_decode, tail, down, decode,
    rest (what no stage has, `rest.py`) and overlap (≤ 0: what parts spare by going through them at once); they sum up
    to predicted_ms."""
    bytes: int
    """Payload bytes up."""
    fidelity: float | None
    """By the contract's measure; None for a lossless plan."""
    level: int | None = None
    """The codec's setting, which rides in the payload; None for a codec that has none."""
    allowed: bool
    why_not: str = ""
    """The constraint that forbids it, as a sentence; empty when allowed."""
    estimated: bool = False
    """Whether the compute times of its cut are estimated from those of others and nothing has proven them yet."""
    parts: int = 1
    """In how many the request's batch is served, one after the other through each stage."""
    sigma_ms: float = 0.0
    """Standard deviation of predicted_ms."""
    energy_j: float = 0.0
    """Joules of the device above its idle draw; 0 where nothing is known of its power."""
    energy_measured: bool = False
    """Whether the power behind `energy_j` was measured on this device; otherwise it is modelled."""
    money: float = 0.0
    """Of bytes and companion time, in the unit of the configured prices."""


@value(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was chosen for one request and why: everything `isthmus explain` shows."""

    chosen: PlanEstimate
    runners_up: Sequence[PlanEstimate]
    """Allowed plans, next best first (at most 5); worked out when read."""
    reason_of: Callable[[], str] = field(compare=False, repr=False)
    """`reason`, put into words when asked: nobody reads that of most requests."""
    candidates: int
    """How many plans were compared."""
    tried: bool = False
    """Whether it is not what is expected to be best, but run to learn something."""
    worth_opening: CutId | None = None
    """The cut that would have been chosen if its halves were open."""
    link: Mapping[str, float] = field(default_factory=dict)
    """The link as estimated at that moment: rtt_ms, up_mbit_s, down_mbit_s, age_s; empty without a companion."""
    objective: Mapping[str, float] = field(default_factory=dict)
    """Weights that were used, normalised: latency, throughput, energy, cost; empty where nothing was compared."""
    why_no_split: Callable[[], str] = field(default=lambda: "", compare=False, repr=False)
    """Why no split was chosen, as a sentence, worked out when asked; "" where one was."""

    reply_decides: Callable[[], bool] = field(default=lambda: False, compare=False, repr=False)
    """Whether it runs here although another plan would be better if its reply took no time to come down; then the rate
    down is worth knowing. Worked out when asked."""

    @property
    def reason(self) -> str:
        """One sentence."""
        return self.reason_of()
