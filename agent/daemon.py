"""The device daemon: everything wired together, started in order, stopped in order. No behaviour of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Coroutine, Sequence
from functools import cached_property
from typing import Any

from agent.broken_bounds import BrokenBounds
from agent.compute import Compute
from agent.config import AgentConfig, Link
from agent.device_watch import DeviceWatch
from agent.fingerprinting import Fingerprinting
from agent.golden import Golden
from agent.health import Health
from agent.http_api import HttpApi
from agent.intake import Intake
from agent.interfaces import Interfaces
from agent.journal import Journal
from agent.lateness import Lateness
from agent.metering import Meter, interface_of
from agent.metrics import Metrics
from agent.planner import Planner
from agent.recalibrating import Recalibrating
from agent.record_files import RecordFiles
from agent.recorder import Recorder
from agent.renewal import Renewal
from agent.repository import Repository
from agent.room import Room
from agent.serve import Serve
from agent.served_model import ServedModel
from agent.service import DaemonService
from agent.uplink import Uplink
from agent.version import VERSION
from agent.warming import Warming
from split.codec.image import image_fingerprint
from split.codec.payload import SPOKEN
from split.errors import ConfigError, ConnectionLost, IsthmusError
from split.identity.contexts import Identity
from split.identity.credentials import Credentials
from split.identity.known_time import KnownTime
from split.plan.objective import Prices
from split.profiles.address import HostPort
from split.profiles.device import load_device, recognise
from split.profiles.load import claim, require_writable
from split.runtime.kernels import kernel_answers
from split.runtime.machine import Machine, read_machine
from split.runtime.segment import OrtEngine, usable_threads
from split.runtime.store import SegmentStore
from split.systemd import asked_to_stop, feed_watchdog, notify
from split.transport.channel import Channel
from split.transport.knock import knock
from split.transport.retry import Backoff
from split.transport.tls import dial
from split.wire.limits import DEFAULT_LIMITS
from split.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, Message

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
"""One request: a batch of a hundred 224 × 224 pictures as tensors. One caller must not take the whole budget."""


class Daemon:
    """One instance lives as long as its `async with` block; `service` and `http` are ready inside it."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._room = Room(config.limits.inflight_bytes)
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
        """Start everything, each part after those it needs; the stack stops them, last first."""
        config = self._config
        self._take_place()
        machine = await asyncio.to_thread(read_machine)
        if config.companions:  # both are kept, and computed where they hold up nobody
            await asyncio.to_thread(lambda: (kernel_answers(), image_fingerprint()))
        compute = Compute(config.emulation.slowdown)
        self._stack.callback(compute.close)
        golden = Golden(compute)
        watch = self._watch = await asyncio.to_thread(self._device_watch, machine, compute)
        meter = self._meter = self._bytes_meter()
        planner = self._planner(watch, meter)
        journal = Journal(planner.power)
        recorder = self._recorder(planner)
        journal.on_entry = recorder.note
        uplink = self._uplink(planner, golden)
        broken = await asyncio.to_thread(BrokenBounds, config.state_dir / "broken-bounds.json")
        repository = self._repository(planner, uplink, golden, broken, machine=machine.digest)
        lateness = Lateness(queue_ms=lambda: compute.queue_ms)
        compute.on_load, uplink.on_silence = lateness.make_room, lateness.hurry_all
        health = Health(compute)
        renewal = Renewal(self._credentials, ask=uplink.ask_renewal) if config.companions else None
        fingerprinting = self._fingerprinting(machine, compute, repository)
        self.service = DaemonService(
            intake=Intake(default_deadline_ms=config.limits.default_deadline_ms, room=self._room),
            serve=Serve(
                planner=planner,
                compute=compute,
                uplink=uplink,
                lateness=lateness,
                journal=journal,
                spot_check_every=config.spot_check_every,
                on_broken=broken.keep,
            ),
            repository=repository,
            journal=journal,
            planner=planner,
            uplink=uplink,
            compute=compute,
            metrics=_metrics(journal, planner, compute, uplink, meter, renewal),
            meter=meter,
            recorder=recorder,
            health=health,
            machine=machine,
            watch=watch,
            fingerprinting=fingerprinting,
            identity=lambda: renewal.status() if renewal is not None else None,
        )
        self._stack.callback(recorder.close)
        self._stack.callback(self.service.settle_books)
        repository.start()
        self._stack.push_async_callback(repository.close)
        self._reach_out(uplink, renewal)
        await watch.look(asyncio.get_running_loop().time())
        await self._open_doors()
        self._stack.callback(lateness.close)
        warming = Warming(planner=planner, compute=compute, models=repository.served)
        recalibrating = Recalibrating(entries=repository.entries, adopt=repository.recalibrated)
        self._beside("warming", warming.run())
        self._beside("recalibrating", recalibrating.run())
        self._beside("metering", meter.run())
        self._beside("recording", recorder.run())
        self._beside("fingerprint", fingerprinting.run())
        self._beside("device watch", watch.run())
        self._beside("watchdog", feed_watchdog(health.live))

    def _take_place(self) -> None:
        """ConfigError where this daemon could not live: folders that are not there, not writable or another's, an
        identity that cannot serve."""
        config = self._config
        require_writable("state_dir", config.state_dir)
        require_writable("cache_dir", config.cache_dir)
        for descriptor in claim({"state_dir": config.state_dir, "cache_dir": config.cache_dir}):
            self._stack.callback(os.close, descriptor)
        if not config.models.is_dir():
            raise ConfigError(f"models: {config.models} is no folder; make it, or point `models` at your repository")
        if config.companions and (warning := self._credentials.require()):
            log.warning("%s", warning)

    def _beside(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Have it go on beside the requests until the daemon stops."""
        self._stack.callback(asyncio.create_task(work, name=name).cancel)

    def _bytes_meter(self) -> Meter:
        config = self._config
        meter = Meter(
            config.state_dir / "metering.json",
            cap_bytes=config.link.metered_bytes_per_month,
            interfaces=config.link.metered_interfaces,
        )
        self._stack.callback(meter.close)
        return meter

    def _planner(self, watch: DeviceWatch, meter: Meter) -> Planner:
        """It asks watch and meter at each decision, and learns when the device's speed has changed."""
        config = self._config
        planner = Planner(
            slowdown=config.emulation.slowdown,
            probe_bytes_per_hour=config.link.probe_bytes_per_hour,
            probe_joules_per_hour=config.link.probe_joules_per_hour,
            metered=meter.left,
            prices=_prices(config.link),
            power=lambda: watch.power,
            battery_low=lambda: watch.battery_low,
        )
        watch.on_sensors = lambda read: planner.observe_sensors(
            throttled=read.throttled, frequency_ratio=read.frequency_ratio
        )
        return planner

    def _recorder(self, planner: Planner) -> Recorder:
        config = self._config
        return Recorder(
            knows=planner.known,
            power=planner.power,
            slowdown=config.emulation.slowdown,
            price_per_gb=config.link.price_per_gb,
            price_per_companion_s=config.link.price_per_companion_s,
            files=RecordFiles(config.state_dir / "record", days=config.record.days) if config.record.enabled else None,
            now_s=asyncio.get_running_loop().time,
        )

    def _uplink(self, planner: Planner, golden: Golden) -> Uplink:
        """It dials once `_reach_out` starts it."""
        companions = self._config.companions
        return Uplink(
            companions=[str(address) for address in companions],
            dial=self._metered_dial,
            planner=planner,
            golden=golden,
            backoff=Backoff(),
            knock=knock,
            identity_is=lambda: self._credentials.stamp() if companions else None,
        )

    def _fingerprinting(self, machine: Machine, compute: Compute, repository: Repository) -> Fingerprinting:
        """Of this machine, while nothing is asked of it and a model is measured."""
        return Fingerprinting(
            machine=machine,
            folder=self._config.state_dir,
            idle=lambda: compute.queue_ms == 0.0 and any(one.profile is not None for one in repository.served()),
        )

    def _reach_out(self, uplink: Uplink, renewal: Renewal | None) -> None:
        """Towards the companions, where there are any; the certificate is renewed through them."""
        uplink.start()
        self._stack.push_async_callback(uplink.close)
        if self._config.companions:
            interfaces = Interfaces(uplink.network_changed)
            interfaces.start()
            self._stack.callback(interfaces.close)
        if renewal is not None:
            uplink.on_renewed = renewal.answered
            self._beside("renewal", renewal.run())

    def _device_watch(self, machine: Machine, compute: Compute) -> DeviceWatch:
        config = self._config
        name = config.device or recognise(machine.board, machine.compatible, machine.architecture)
        profile = None if name is None else load_device(name)
        return DeviceWatch(
            profile=profile,
            generic=config.device is None and profile is not None and not profile.recognised_by,
            threads=machine.threads,
            battery_ratio_min=config.power.battery_ratio_min,
            busy_s=lambda: compute.busy_s,
        )

    def _repository(
        self, planner: Planner, uplink: Uplink, golden: Golden, broken: BrokenBounds, *, machine: str
    ) -> Repository:
        """The models, which tell planner and uplink when they come and go."""
        config = self._config
        store = SegmentStore(self._engine, threads=usable_threads(), budget_bytes=config.budget_bytes)
        self._stack.callback(store.close)

        def still_broken(model: ServedModel) -> None:
            for codec, why in broken.of(model).items():
                planner.codec_broken(model.name, codec, why)

        def ready(model: ServedModel) -> None:
            assert model.profile is not None
            planner.add_model(model.name, model.card, model.profile, model.contract, model.opening_ms)
            still_broken(model)
            uplink.serve_model(model)

        def recalibrated(model: ServedModel) -> None:
            assert model.profile is not None
            planner.recalibrated(model.name, model.card, model.profile, model.contract, model.opening_ms)
            still_broken(model)
            uplink.recalibrated(model)

        def gone(model: ServedModel) -> None:
            planner.remove_model(model.name)
            uplink.drop_model(model)

        return Repository(
            folder=config.models,
            cache_dir=config.cache_dir,
            store=store,
            timeout_s=config.workbench.timeout_s,
            memory_bytes=config.workbench.memory_bytes,
            warm_up=golden.warm_up,
            runtime=self._engine.name,
            machine=machine,
            on_ready=ready,
            on_gone=gone,
            on_recalibrated=recalibrated,
        )

    async def _open_doors(self) -> None:
        config = self._config
        self.http = HttpApi(
            self.service,
            max_body_bytes=min(MAX_BODY_BYTES, config.limits.inflight_bytes),
            room=self._room,
        )
        await self.http.start(config.listen.http, config.listen.unix)
        self._stack.push_async_callback(self.http.stop)
        log.info("serving on %s", " and ".join(self.http.places))

    @cached_property
    def _credentials(self) -> Credentials:
        paths = self._config.identity
        assert paths is not None, "the configuration checks that companions come with an identity"
        identity = Identity(cert=paths.cert, key=paths.key, ca=paths.ca)
        return Credentials(identity, "device", known_time=KnownTime(self._config.state_dir / "known-time"))

    async def _metered_dial(self, address: str, timeout_s: float, first: Sequence[Message]) -> Channel:
        """Where the month has bytes left for it."""
        place = HostPort(address)
        if why := await self._meter.refuses(place.host, place.port):
            raise ConnectionLost(why)
        try:
            channel = await self._dial(address, timeout_s, first)
        except IsthmusError as error:
            self._meter.failed(error)
            raise
        ends = channel.ends
        interface = interface_of(ends[0]) if ends is not None else ""
        self._meter.follow(channel, interface)
        self._watch.linked(interface)
        return channel

    async def _dial(self, address: str, timeout_s: float, first: Sequence[Message]) -> Channel:
        place = HostPort(address)
        return await dial(
            place.host,
            place.port,
            identity=self._credentials,
            hello=Hello(
                major=PROTOCOL_MAJOR,
                minor=PROTOCOL_MINOR,
                agent=f"isthmus {VERSION}",
                runtime=self._engine.name,
                max_message_bytes=DEFAULT_LIMITS.max_message_bytes,
                codecs=SPOKEN,
                image=image_fingerprint(),
                window_bytes=DEFAULT_LIMITS.unread_bytes,
            ),
            timeout_s=timeout_s,
            first=[(message, ()) for message in first],
        )


async def run(config: AgentConfig) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; requests in flight are answered before it returns."""
    stop = asyncio.Event()
    with asked_to_stop(stop):
        async with Daemon(config):
            notify(f"READY=1\nSTATUS=serving {config.models}")
            await stop.wait()
            notify("STOPPING=1")
            log.info("stopping")


def _prices(link: Link) -> Prices:
    return Prices(per_byte=link.price_per_gb / 1e9, per_companion_ms=link.price_per_companion_s / 1e3)


def _metrics(
    journal: Journal, planner: Planner, compute: Compute, uplink: Uplink, meter: Meter, renewal: Renewal | None
) -> Metrics:
    return Metrics(
        journal,
        version=VERSION,
        link=lambda: uplink.observation,
        rates=planner.rates,
        gauges={
            "isthmus_queue_seconds": ("Expected wait for the worker.", lambda: compute.queue_ms / 1000),
            "isthmus_waiting_jobs": ("Jobs that wait for the worker.", lambda: compute.waiting),
            "isthmus_remote_inflight": ("Requests that wait for the companion.", lambda: uplink.inflight),
            "isthmus_companion_connects": ("Connections made to companions.", lambda: uplink.connects),
            "isthmus_metered_bytes": ("Metered bytes used this month.", meter.used_bytes),
            "isthmus_metered_bytes_max": (
                "Metered bytes that a month has; +Inf where there is no cap.",
                lambda: math.inf if meter.cap_bytes is None else meter.cap_bytes,
            ),
            "isthmus_certificate_end_timestamp_seconds": (
                "When this device's certificate ends; +Inf where none is configured.",
                lambda: math.inf if renewal is None else renewal.until_s,
            ),
        },
    )
