"""What runs tails and whole models on the companion: the seam, and the local runtime behind it.

`TailExecutor` is a Protocol because a companion with an accelerator or with a model server next to it runs the same
work elsewhere; a session knows only this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from split.tensor import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One run of one segment."""

    path: Path
    """The segment's file: a tail, or the whole model."""
    feeds: Tensors
    outputs: tuple[str, ...] | None
    """Outputs wanted; None: all."""
    device: str
    """Whose work it is: devices share the companion fairly."""
    deadline_at_s: float
    """Monotonic seconds; later than that it is not started."""
    expected_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    outputs: Tensors
    queue_ms: float
    run_ms: float


class TailExecutor(Protocol):
    """Called from the event loop only; the work itself happens elsewhere."""

    def wait_ms(self, device: str) -> float:
        """Expected milliseconds before a further run for this device would start."""

    async def open(self, path: Path) -> None:
        """Make a segment ready, so that no request pays for it. InvalidModel when the runtime refuses it."""

    async def run(self, work: Work) -> Done:
        """Run once. DeadlineExceeded when it could not be started in time; InvalidRequest and EngineFailed as of
        `split.runtime.engine`. Cancelling the caller takes work out that has not started."""

    def forget(self, place: Path) -> None:
        """Let go of the segment of this file, or of all in this folder: nobody will ask for them."""

    def close(self) -> None:
        """Finish what runs; waiting work gets ModelUnavailable."""
