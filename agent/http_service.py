"""What the daemon offers behind its front door, as `agent/http_api.py` asks for it: a seam, so that the door can be
tested without a daemon. `agent/service.py` is the one there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from split.oip.infer import ModelMetadata, OipRequest, OipResponse


class Service(Protocol):
    """What the daemon offers behind its front doors. `version` is "" where the caller named none.

    All methods but the awaitable ones return at once. UnknownModel and ModelUnavailable where a model is named.
    """

    def live(self) -> bool: ...

    def ready(self) -> bool: ...

    def index(self) -> list[dict[str, str]]:
        """Rows `{"name", "version", "state", "reason"}` of the repository index."""

    def metadata(self, name: str, version: str) -> ModelMetadata:
        """Of a model that can answer now."""

    def contract(self, name: str) -> dict[str, Any]:
        """The contract as data; `labels` in it: output name → words of its classes."""

    def runs_on(self, name: str) -> Sequence[str]:
        """Words of the contract's accelerators, first choice first."""

    def measured(self, name: str) -> dict[str, float | None]:
        """`{"requests", "p50_ms", "p99_ms", "failed_ratio", "per_s"}` of the requests so far; None where not known."""

    def config(self, name: str, version: str) -> dict[str, Any]:
        """Triton's ModelConfig."""

    def stats(self, name: str | None) -> list[dict[str, Any]]:
        """Triton's `model_stats`: one element a version."""

    async def infer(self, model: str, version: str, request: OipRequest, received_at_s: float) -> OipResponse:
        """`received_at_s`: when the request's header had come (monotonic); its deadline counts from there."""

    async def load(self, name: str) -> None: ...

    async def unload(self, name: str) -> None: ...

    def status(self) -> dict[str, Any]: ...

    def explain(self, request_id: str) -> dict[str, Any] | None: ...

    def record(self) -> bytes:
        """What happened in the last hour, in the format of `agent/record.py`."""

    def metrics(self) -> bytes:
        """Prometheus text format 0.0.4."""
