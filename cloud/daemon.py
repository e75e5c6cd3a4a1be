"""The companion's process: everything wired together, started in order, stopped in order. No behaviour of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from cloud.accept import Reception
from cloud.admission import Admission, Bounds
from cloud.companion import Companion
from cloud.config import CompanionConfig
from cloud.enrolment import Enrolment
from cloud.executor.local import LocalExecutor
from cloud.health import HealthServer
from cloud.identity import authority_folder, known_time, tokens_folder
from cloud.metrics import Metrics
from cloud.pace import Pace, Pieces
from cloud.register import Register
from cloud.renewal import Renewals
from cloud.revocations import Revocations
from cloud.segments import Segments
from cloud.store import ModelStore
from cloud.tokens import TokenStore
from cloud.version import VERSION
from cloud.workbench import ChildWorkbench
from split.codec.image import image_fingerprint
from split.codec.payload import SPOKEN
from split.errors import ChannelError, ConfigError
from split.identity.contexts import Identity
from split.identity.credentials import Credentials
from split.profiles.address import HostPort
from split.profiles.load import claim, require_writable
from split.runtime.kernels import kernel_answers
from split.runtime.machine import read_machine
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.runtime.tuning import default_tuning
from split.systemd import asked_to_stop, feed_watchdog, notify
from split.transport.listener import Listener, listen
from split.wire.limits import MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, Limits
from split.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello

log = logging.getLogger(__name__)

DRAIN_S = 5.0
"""For requests under way when the companion is told to stop: longer than any of them should take, shorter than the
ten seconds after which container runtimes kill."""

STUCK_S = 120.0
"""One run lasting longer hangs: the slowest model needs 15 s on a slow core. Whoever watches may restart us."""

MODELS_TOLD = 512
"""Digests in a Hello, which has at most 64 KiB and of which no device needs all: it offers what it uses."""
assert MODELS_TOLD * 80 < MAX_HELLO_BYTES


async def serve(config: CompanionConfig, *, stop: asyncio.Event | None = None) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP (or `stop`); requests under way are answered before it returns.

    ConfigError when a folder cannot be written, an address cannot be listened on or a certificate file cannot serve.
    """
    stop = stop or asyncio.Event()
    with asked_to_stop(stop):
        async with contextlib.AsyncExitStack() as stack:
            await _start(config, stack)
            notify(f"READY=1\nSTATUS=serving devices on {config.listen}")
            await stop.wait()
            notify("STOPPING=1")
            log.info("stopping")


async def _start(config: CompanionConfig, stack: contextlib.AsyncExitStack) -> None:
    """Start everything; what was started is stopped by `stack`, last first."""
    _take_place(config, stack)
    register = Register(authority_folder(config))
    revocations = Revocations(register)
    credentials = _credentials(config, revocations)
    revocations.start()
    renewals = Renewals(register, credentials, days=config.certificate_days)
    engine = OrtEngine()
    tuning = default_tuning(await asyncio.to_thread(read_machine), config.threads)
    opened = SegmentStore(engine, threads=tuning.threads, spin_us=tuning.spin_us, budget_bytes=config.budget_bytes)
    stack.callback(opened.close)
    executor = LocalExecutor(opened)
    stack.callback(executor.close)
    segments = Segments(
        config.cache_dir, ChildWorkbench(), prefer=opened.prefer, let_go=opened.forget, runtime=engine.name
    )
    stack.push_async_callback(segments.close)
    pieces = await asyncio.to_thread(lambda: Pieces(tuning.threads))
    stack.callback(pieces.close)
    pace = Pace(pieces, is_busy=lambda: executor.running_s > 0.0)
    companion = _companion(config, segments, executor, renewals, pace)
    stack.callback(companion.disk.shutdown)
    reception = Reception(companion)
    reception.revoke(revocations.serials)
    revocations.on_change = reception.revoke
    pace.tell = reception.tell_pace

    # Both are kept, and computed where they hold up nobody.
    await asyncio.to_thread(lambda: (kernel_answers(), image_fingerprint()))

    def live() -> bool:
        return executor.running_s < STUCK_S

    if config.http is not None:
        health = HealthServer(metrics=companion.metrics, live=live, ready=lambda: not reception.leaving)
        await health.start(config.http)
        stack.push_async_callback(health.stop)
        log.info("health and metrics on %s:%d", config.http.host, health.port)
    listener = await _listen(config, credentials, reception, companion.store, runtime=engine.name)
    stack.push_async_callback(listener.close)
    stack.push_async_callback(lambda: reception.send_home("the companion is stopping", within_s=DRAIN_S))
    beside = [feed_watchdog(live), revocations.run(), renewals.keep_own(), pace.run()]
    if config.enroll_listen is not None:
        enrolment = _enrolment(config, config.enroll_listen, credentials, register)
        stack.push_async_callback(enrolment.close)
        beside.append(enrolment.run())
    for work in beside:
        stack.callback(asyncio.create_task(work).cancel)
    log.info(
        "isthmus-cloud listening on %s:%d threads=%d runtime=%r",
        config.listen.host,
        listener.port,
        tuning.threads,
        engine.name,
    )


def _take_place(config: CompanionConfig, stack: contextlib.AsyncExitStack) -> None:
    """ConfigError where a folder is not writable or is another companion's."""
    folders = {"state_dir": config.state_dir, "cache_dir": config.cache_dir}
    for key, folder in folders.items():
        require_writable(key, folder)
    for descriptor in claim(folders):
        stack.callback(os.close, descriptor)


def _credentials(config: CompanionConfig, revocations: Revocations) -> Credentials:
    """ConfigError where the identity's files cannot serve."""
    paths = config.identity
    credentials = Credentials(
        Identity(cert=paths.cert, key=paths.key, ca=paths.ca),
        "companion",
        known_time=known_time(config),
        revoked=lambda: revocations.serials,
    )
    if warning := credentials.require():
        log.warning("%s", warning)
    return credentials


def _companion(
    config: CompanionConfig, segments: Segments, executor: LocalExecutor, renewals: Renewals, pace: Pace
) -> Companion:
    """What all sessions share."""
    limits = config.limits
    return Companion(
        store=ModelStore(config.state_dir / "models", budget_bytes=config.models_bytes),
        segments=segments,
        executor=executor,
        admission=Admission(Bounds(inflight_bytes=limits.inflight_bytes, device_bytes=limits.device_bytes)),
        metrics=Metrics(),
        decoded_bytes=limits.inflight_bytes,
        renewals=renewals,
        pace=pace,
    )


def _enrolment(config: CompanionConfig, place: HostPort, credentials: Credentials, register: Register) -> Enrolment:
    """New devices, at a door of their own."""
    return Enrolment(
        place,
        identity=credentials.identity,
        register=register,
        tokens=TokenStore(tokens_folder(config)),
        days=config.certificate_days,
        now_s=credentials.known_time.now_s,
    )


async def _listen(
    config: CompanionConfig, credentials: Credentials, reception: Reception, store: ModelStore, *, runtime: str
) -> Listener:
    """Open for devices; each is told in our Hello what we have at that moment. ConfigError where it cannot be."""
    limits = Limits(max_message_bytes=min(config.limits.device_bytes + MAX_METADATA_BYTES, MAX_MESSAGE_BYTES))

    def hello() -> Hello:
        return Hello(
            major=PROTOCOL_MAJOR,
            minor=PROTOCOL_MINOR,
            agent=f"isthmus-cloud {VERSION}",
            runtime=runtime,
            max_message_bytes=limits.max_message_bytes,
            codecs=SPOKEN,
            models=store.held()[:MODELS_TOLD],
            image=image_fingerprint(),
            kernels=kernel_answers(),
            window_bytes=limits.unread_bytes,
        )

    try:
        return await listen(
            config.listen.host,
            config.listen.port,
            identity=credentials,
            make_hello=hello,
            on_channel=reception.receive,
            make_room=reception.make_room,
            max_sessions=config.limits.connections,
            limits=limits,
        )
    except ChannelError as error:
        raise ConfigError(f"listen: {error}; stop what listens there, or choose another HOST:PORT") from error
