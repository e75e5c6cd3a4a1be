"""What the companion counts, as Prometheus metrics `isthmus_cloud_*` in base units; one registry per companion."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sessions = Gauge("isthmus_cloud_sessions", "Devices connected now.", registry=self.registry)
        self.inflight_bytes = Gauge(
            "isthmus_cloud_inflight_bytes", "Requests received and not yet answered, decoded.", registry=self.registry
        )
        self.requests = Counter(
            "isthmus_cloud_requests",
            "Requests by outcome: ok, cancelled or the code.",
            ["outcome"],
            registry=self.registry,
        )
        self.invalid_messages = Counter(
            "isthmus_cloud_invalid_messages", "Messages dropped because they make no sense.", registry=self.registry
        )
        self.received_bytes = Counter(
            "isthmus_cloud_received_bytes", "Payload bytes of requests.", registry=self.registry
        )
        self.sent_bytes = Counter("isthmus_cloud_sent_bytes", "Payload bytes of replies.", registry=self.registry)
        self.queue_seconds = Histogram(
            "isthmus_cloud_queue_seconds", "Waiting for the worker.", registry=self.registry, buckets=_SECONDS
        )
        self.tail_seconds = Histogram(
            "isthmus_cloud_tail_seconds", "Running a tail or a whole model.", registry=self.registry, buckets=_SECONDS
        )
        self.models_ready = Counter(
            "isthmus_cloud_models_ready", "Models brought to readiness, by sessions.", registry=self.registry
        )
        self.refusals = Counter(
            "isthmus_cloud_setup_refusals", "Models and cuts refused, by code.", ["code"], registry=self.registry
        )

    def exposition(self) -> bytes:
        """The text format, for `/metrics`."""
        return generate_latest(self.registry)
