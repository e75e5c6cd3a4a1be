"""The device daemon: everything wired together, started in order, stopped in order. No behaviour of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from agent.compute import Compute
from agent.config import AgentConfig
from agent.dialler import DIAL_TIMEOUT_S
from agent.fingerprint import Fingerprint, take_fingerprint
from agent.golden import Golden
from agent.health import Health
from agent.http_api import HttpApi
from agent.intake import Intake
from agent.journal import Journal
from agent.lateness import Lateness
from agent.metrics import Metrics
from agent.planner import Planner
from agent.repository import Repository, ServedModel
from agent.serve import Serve
from agent.service import DaemonService
from agent.uplink import Uplink
from agent.version import VERSION
from split.codec.image import image_fingerprint
from split.codec.payload import CODECS
from split.errors import ConfigError
from split.identity.contexts import Identity
from split.identity.readiness import require_identity
from split.profiles.address import HostPort
from split.runtime.segment import OrtEngine, usable_threads
from split.runtime.store import SegmentStore
from split.systemd import feed_watchdog, notify
from split.transport.channel import Channel
from split.transport.retry import Backoff
from split.transport.tls import dial
from split.wire.limits import DEFAULT_LIMITS
from split.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
"""One request: a batch of a hundred 224 × 224 pictures as tensors. One caller must not take the whole budget."""


class Daemon:
    """One instance lives as long as its `async with` block; `service` and `http` are ready inside it."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._engine = OrtEngine()
        self._stack = contextlib.AsyncExitStack()
        self.service: DaemonService
        self.http: HttpApi

    async def __aenter__(self) -> Daemon:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config = self._config
        for folder in (config.state_dir, config.cache_dir):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the folder {folder} cannot be made ({error.strerror}); see state_dir, cache_dir"
                ) from error
        if not config.models.is_dir():
            raise ConfigError(f"models: {config.models} is no folder; make it, or point `models` at your repository")
        if config.companions and (warning := require_identity(self._identity(), "device")):
            log.warning("%s", warning)
        threads = usable_threads()
        fingerprint: Fingerprint = await asyncio.to_thread(take_fingerprint)
        compute = Compute(config.emulation.slowdown)
        self._stack.callback(compute.close)
        store = SegmentStore(self._engine, threads=threads, budget_bytes=config.budget_bytes)
        self._stack.callback(store.close)
        golden = Golden(compute)
        planner = Planner(slowdown=config.emulation.slowdown, probe_bytes_per_hour=config.link.probe_bytes_per_hour)
        journal = Journal()
        uplink = Uplink(
            companions=[str(address) for address in config.companions],
            dial=self._dial,
            planner=planner,
            golden=golden,
            backoff=Backoff(),
        )

        def model_ready(model: ServedModel) -> None:
            assert model.profile is not None
            planner.add_model(model.name, model.card, model.profile, model.contract)
            uplink.serve_model(model)

        def model_gone(model: ServedModel) -> None:
            planner.remove_model(model.name)
            uplink.drop_model(model)

        repository = Repository(
            folder=config.models,
            cache_dir=config.cache_dir,
            store=store,
            timeout_s=config.workbench.timeout_s,
            memory_bytes=config.workbench.memory_bytes,
            warm_up=golden.warm_up,
            runtime=self._engine.name,
            machine=fingerprint.digest,
            on_ready=model_ready,
            on_gone=model_gone,
        )
        lateness = Lateness(queue_ms=lambda: compute.queue_ms)
        compute.on_load = lateness.make_room
        health = Health(compute)
        metrics = Metrics(
            journal,
            version=VERSION,
            gauges={
                "isthmus_queue_seconds": ("Expected wait for the worker.", lambda: compute.queue_ms / 1000),
                "isthmus_remote_inflight": ("Requests that wait for the companion.", lambda: uplink.inflight),
                "isthmus_companion_connects": ("Connections made to companions.", lambda: uplink.connects),
            },
        )
        self.service = DaemonService(
            intake=Intake(
                default_deadline_ms=config.limits.default_deadline_ms, inflight_bytes=config.limits.inflight_bytes
            ),
            serve=Serve(planner=planner, compute=compute, uplink=uplink, lateness=lateness, journal=journal),
            repository=repository,
            journal=journal,
            planner=planner,
            uplink=uplink,
            compute=compute,
            metrics=metrics,
            health=health,
            fingerprint=fingerprint,
        )
        repository.start()
        self._stack.push_async_callback(repository.close)
        uplink.start()
        self._stack.push_async_callback(uplink.close)
        self.http = HttpApi(
            self.service,
            max_body_bytes=min(MAX_BODY_BYTES, config.limits.inflight_bytes),
            inflight_bytes=config.limits.inflight_bytes,
        )
        await self.http.start(config.listen.http, config.listen.unix)
        self._stack.push_async_callback(self.http.stop)
        watchdog = asyncio.create_task(feed_watchdog(health.live), name="watchdog")
        self._stack.callback(watchdog.cancel)

    def _identity(self) -> Identity:
        paths = self._config.identity
        assert paths is not None, "the configuration checks that companions come with an identity"
        return Identity(cert=paths.cert, key=paths.key, ca=paths.ca)

    async def _dial(self, address: str) -> Channel:
        place = HostPort(address)
        return await dial(
            place.host,
            place.port,
            identity=self._identity(),
            hello=Hello(
                major=PROTOCOL_MAJOR,
                minor=PROTOCOL_MINOR,
                agent=f"isthmus {VERSION}",
                runtime=self._engine.name,
                max_message_bytes=DEFAULT_LIMITS.max_message_bytes,
                codecs=CODECS,
                image=image_fingerprint(),
            ),
            timeout_s=DIAL_TIMEOUT_S,
        )


async def run(config: AgentConfig) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight are answered before it returns."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    async with Daemon(config) as daemon:
        places = [f"http://{config.listen.http}" if config.listen.http else "", str(config.listen.unix or "")]
        log.info("serving on %s", " and ".join(place for place in places if place))
        notify(f"READY=1\nSTATUS=serving {config.models}")
        await stop.wait()
        notify("STOPPING=1")
        log.info("stopping")
        del daemon
