"""What all sessions of one companion share."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloud.admission import Admission
from cloud.executor import TailExecutor
from cloud.metrics import Metrics
from cloud.pictures import DecodingRoom
from cloud.renewal import Renewals
from cloud.segments import Segments
from cloud.store import ModelStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    store: ModelStore
    segments: Segments
    executor: TailExecutor
    admission: Admission
    metrics: Metrics
    decoded_bytes: int
    """Bound of one payload as decoded: a few compressed bytes must not become gigabytes."""
    renewals: Renewals | None = None
    """None: certificates are renewed elsewhere."""
    pictures: DecodingRoom = field(default_factory=DecodingRoom)
