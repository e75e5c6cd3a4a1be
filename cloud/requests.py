"""The requests of one session. The straight road of a request on this side is `_infer`: admit, decode, check, run,
encode, reply.

Invariants: nothing runs that was not opened in this session under the same digest and cut (I6); every Infer gets one
Reply or one Refused, unless it was cancelled or the session ended; nothing about a request is kept after its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from cloud.companion import Companion
from cloud.executor import Work
from cloud.opened import Opened, check_feeds
from cloud.openings import MAX_TEXT, Openings, refusal_of
from split.codec.image import ImageSpec, decoding_bytes, prepare_image
from split.codec.klt import BoundaryTables
from split.codec.payload import SPOKEN, decode, decoded_bytes, encode
from split.errors import (
    CompanionRefused,
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    IsthmusError,
    ModelUnavailable,
    Overloaded,
)
from split.ids import KLT, OFFLOAD_CUT
from split.tensor import Tensors, dtype_name
from split.transport.channel import Buffer, Channel, Incoming
from split.wire.messages import Cancel, Infer, Message, Priority, Refused, Reply

T = TypeVar("T")

_DOWN = ("raw", "fp16", "int8")
"""Codecs of replies: what needs no calibration and no picture."""
INLINE_BYTES = 1 << 20
"""Raw payloads up to here are decoded and encoded on the event loop: views or at most one copy, about 0.1 ms."""
TENSORS_BESIDE = 16
"""Beyond those that an opened segment takes: so many are read, on the event loop, to say which of them is wrong."""
HELD_BACK_BYTES = 32 << 20
"""Replies of one session that wait for room in the queue to the link, beside it; a larger one waits alone."""
CANCELS_REMEMBERED = 256
"""Of requests that have not come yet: with two connections a Cancel overtakes its Infer (PROTOCOL.md §6)."""
DRIFT_SHARE = 0.2
"""Weight of the latest run in the expected time of the next: follows a change within about five requests."""


class Send(Protocol):
    """Queues a message to the device, as `Session._send`."""

    def __call__(self, message: Message, *, priority: Priority) -> None: ...


class Requests:
    """`group` owns their tasks, `openings` knows what may be asked for, `send` queues a refusal."""

    def __init__(
        self, channel: Channel, companion: Companion, group: asyncio.TaskGroup, openings: Openings, send: Send
    ) -> None:
        self._channel = channel
        self._companion = companion
        self._device = channel.peer.name
        self._group = group
        self._openings = openings
        self._send = send
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._cancelled: dict[tuple[str, int], None] = {}
        """What was cancelled and not seen, oldest first."""
        self._held_back_bytes = 0
        """Of replies that wait for room."""
        self.leaving = ""
        """Why nothing new is taken; "" while it is."""
        self.idle = asyncio.Event()
        """Set while none is under way."""
        self.idle.set()

    def end(self) -> None:
        """The session ends: nobody is to be answered."""
        for task in self._tasks.values():
            task.cancel()

    def begin(self, infer: Infer, incoming: Incoming) -> None:
        """A request came: it is refused at once, or a task of its own from here on."""
        key, shared = (infer.request_id, infer.attempt), self._companion
        if key in self._tasks:
            return  # the same attempt twice gets one answer
        if key in self._cancelled:
            del self._cancelled[key]
            shared.metrics.requests.labels("cancelled").inc()
            return
        shared.metrics.received_bytes.inc(incoming.payload.nbytes)
        if shared.pace is not None:
            shared.pace.used_at_s = incoming.received_at_s
        deadline_at_s = incoming.received_at_s + infer.budget_ms / 1000
        try:
            if self.leaving:
                raise ModelUnavailable(f"the companion takes nothing new: {self.leaving}")
            opened = self._find(infer)
            tables = None
            if infer.codec == KLT:
                tables = self._openings.calibrations.find(infer.digest, infer.cut, incoming.payload)
            size = _held_bytes(infer, incoming.payload, tensors_max=len(opened.feeds) + TENSORS_BESIDE)
            shared.admission.enter(
                self._device,
                size,
                wait_ms=shared.executor.wait_ms(self._device),
                budget_ms=(deadline_at_s - time.monotonic()) * 1000,
            )
        except Exception as error:
            self._refuse(infer, refusal_of(error))
            return
        shared.metrics.inflight_bytes.set(shared.admission.inflight_bytes)
        task = self._group.create_task(self._infer(infer, incoming, opened, tables, size, deadline_at_s))
        self._tasks[key] = task
        self.idle.clear()

        def left(_: asyncio.Task[None]) -> None:  # a callback: a task cancelled before its first step runs no `finally`
            shared.admission.leave(self._device, size)
            shared.metrics.inflight_bytes.set(shared.admission.inflight_bytes)
            del self._tasks[key]
            if not self._tasks:
                self.idle.set()

        task.add_done_callback(left)

    def _find(self, infer: Infer) -> Opened:
        """What this frame asks for, if exactly that was opened here; otherwise it is never answered (I6)."""
        opened = self._openings.find(infer.digest, infer.cut)
        if infer.codec not in SPOKEN or infer.output_codec not in _DOWN:
            raise CompanionRefused(
                "PLAN_MISMATCH",
                f"codecs {infer.codec[:40]!r} up and {infer.output_codec[:40]!r} down are not both spoken here",
            )
        if (infer.codec == "encoded") != bool(infer.encoded) or (infer.encoded and infer.cut != OFFLOAD_CUT):
            raise CompanionRefused(
                "PLAN_MISMATCH", "codec 'encoded' goes with cut 'offload' and says in `encoded` how to read its inputs"
            )
        if infer.codec == KLT and infer.cut == OFFLOAD_CUT:
            raise CompanionRefused("PLAN_MISMATCH", "codec 'klt' carries what crosses at a cut, not a model's inputs")
        if not math.isfinite(infer.budget_ms):
            raise InvalidRequest(f"budget_ms must be a finite number, got {infer.budget_ms}")
        unknown = [name for name in infer.outputs if name not in opened.model_outputs]
        if unknown:
            raise InvalidRequest(
                f"output {unknown[0]!r} is not the model's, which makes {', '.join(sorted(opened.model_outputs))}"
            )
        return opened

    async def _infer(
        self,
        infer: Infer,
        incoming: Incoming,
        opened: Opened,
        tables: BoundaryTables | None,
        size: int,
        deadline_at_s: float,
    ) -> None:
        try:
            began_at_s = time.monotonic()
            feeds = await self._decode(infer, incoming.payload, tables, size)
            _of_this_cut(feeds, infer.cut, opened)
            check_feeds(feeds, opened.feeds)
            decoded_at_s = time.monotonic()
            done = await self._companion.executor.run(
                Work(
                    path=opened.path,
                    feeds=feeds,
                    outputs=_wanted(infer.outputs, opened.outputs),
                    device=self._device,
                    deadline_at_s=deadline_at_s,
                    expected_ms=opened.expected_ms,
                )
            )
            opened.expected_ms += DRIFT_SHARE * (done.run_ms - opened.expected_ms)
            encoding_at_s = time.monotonic()
            payload = await self._encode(done.outputs, infer.output_codec)
            ended_at_s = time.monotonic()
            reply = Reply(
                request_id=infer.request_id,
                attempt=infer.attempt,
                cut=infer.cut,
                codec=infer.codec,
                queue_ms=done.queue_ms,
                decode_ms=(decoded_at_s - began_at_s) * 1000,
                tail_ms=done.run_ms,
                encode_ms=(ended_at_s - encoding_at_s) * 1000,
                cloud_ms=(ended_at_s - incoming.received_at_s) * 1000,
            )
            await self._send_reply(reply, payload, incoming.priority, deadline_at_s)
            self._companion.metrics.requests.labels("ok").inc()
            self._companion.metrics.queue_seconds.observe(done.queue_ms / 1000)
            self._companion.metrics.tail_seconds.observe(done.run_ms / 1000)
            self._companion.metrics.sent_bytes.inc(sum(memoryview(part).nbytes for part in payload))
        except Exception as error:
            self._refuse(infer, refusal_of(error))

    async def _decode(self, infer: Infer, payload: memoryview, tables: BoundaryTables | None, size: int) -> Tensors:
        bound = self._companion.decoded_bytes
        if infer.codec == "raw" and size <= INLINE_BYTES:
            return decode(payload, max_bytes=bound)
        tensors = await _beside(lambda: decode(payload, max_bytes=bound, tables=tables))
        if not infer.encoded:
            return tensors
        pictures, room = await _beside(lambda: _pictures_in(tensors, infer.encoded))
        return tensors | await self._companion.pictures.run(room, lambda: _prepared(pictures))

    async def _encode(self, outputs: Tensors, codec: str) -> list[Buffer]:
        if codec == "raw" and sum(array.nbytes for array in outputs.values()) <= INLINE_BYTES:
            return encode(outputs, codec)
        return await _beside(lambda: encode(outputs, codec))

    def cancel(self, cancel: Cancel) -> None:
        """The device does not want this one any more, seen or not yet."""
        key = cancel.request_id, cancel.attempt
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()
            self._companion.metrics.requests.labels("cancelled").inc()
            return
        self._channel.forget(*key)  # its reply may wait to be sent
        self._cancelled[key] = None
        if len(self._cancelled) > CANCELS_REMEMBERED:
            del self._cancelled[next(iter(self._cancelled))]

    def _refuse(self, infer: Infer, error: IsthmusError) -> None:
        self._companion.metrics.requests.labels(error.code).inc()
        self._send(
            Refused(
                code=error.code,
                message=str(error)[:MAX_TEXT],
                request_id=infer.request_id,
                attempt=infer.attempt,
                digest=infer.digest,
                cut=infer.cut,
            ),
            priority=Priority.CONTROL,  # it finds room also where replies fill the queue
        )

    async def _send_reply(
        self, reply: Reply, payload: Sequence[Buffer], asked_with: Priority, deadline_at_s: float
    ) -> None:
        """With the priority of its request: what is urgent is so both ways. Where the link takes replies more slowly
        than they are made, one waits for room, its request still counted as in flight, until nobody wants it any more
        (DeadlineExceeded) or too many bytes wait already (Overloaded)."""
        priority, size = max(asked_with, Priority.URGENT), sum(memoryview(part).nbytes for part in payload)
        full = ""
        while True:
            try:
                self._channel.send(reply, payload, priority=priority)
                return
            except ConnectionLost:
                return
            except Overloaded as error:
                full = str(error)
                if self._held_back_bytes and self._held_back_bytes + size > HELD_BACK_BYTES:
                    raise
            self._held_back_bytes += size
            try:
                async with asyncio.timeout(deadline_at_s - time.monotonic()):
                    await self._channel.drain(max(self._channel.queued_bytes, 1))
            except ConnectionLost:
                return
            except TimeoutError:
                raise DeadlineExceeded(f"the answer was there and the link was not free in time: {full}") from None
            finally:
                self._held_back_bytes -= size


async def _beside(work: Callable[[], T]) -> T:
    """`work()` in a thread. A request that is cancelled meanwhile ends when the thread does: until then it takes its
    memory, and counts as what it takes. In the queue for a thread, its turn passes."""
    wanted = True
    task = asyncio.create_task(asyncio.to_thread(lambda: work() if wanted else None))
    try:
        done = await asyncio.shield(task)
    except asyncio.CancelledError:
        wanted = False
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # seen: nobody is to be told
        raise
    assert done is not None, "what nobody wants any more is awaited by nobody"
    return done


def _held_bytes(infer: Infer, payload: memoryview, *, tensors_max: int) -> int:
    """What a request takes until it is answered: some kilobytes of zeros may become many megabytes."""
    pictures = sum(4 * math.prod(_image_spec(name, rule).shape) for name, rule in infer.encoded.items())
    return max(payload.nbytes, decoded_bytes(payload, tensors_max=tensors_max)) + pictures


def _image_spec(name: str, rule: Mapping[str, object]) -> ImageSpec:
    try:
        return msgspec.convert(rule, ImageSpec)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"how to read input {name[:80]!r} makes no sense: {error}") from error


def _pictures_in(
    tensors: Tensors, rules: Mapping[str, Mapping[str, object]]
) -> tuple[dict[str, tuple[bytes, ImageSpec]], int]:
    """The inputs that `rules` names, which came as the picture's own bytes and are prepared here; and the memory that
    takes. Reads headers only."""
    found = {}
    for name, rule in rules.items():
        array = tensors.get(name)
        if array is None or dtype_name(array.dtype) != "BYTES" or array.shape != (1,):
            raise InvalidRequest(f"input {name[:80]!r} must be a BYTES tensor of shape [1] with codec 'encoded'")
        found[name] = bytes(array[0]), _image_spec(name, rule)
    return found, sum(decoding_bytes(data, spec) for data, spec in found.values())


def _prepared(pictures: Mapping[str, tuple[bytes, ImageSpec]]) -> Tensors:
    return {name: prepare_image(data, spec) for name, (data, spec) in pictures.items()}


def _of_this_cut(feeds: Tensors, cut: str, opened: Opened) -> None:
    """PLAN_MISMATCH when a cut's tail gets tensors that cross elsewhere: the head of another cut made them."""
    wanted = {spec.name for spec in opened.feeds}
    if cut != OFFLOAD_CUT and feeds.keys() != wanted:
        raise CompanionRefused(
            "PLAN_MISMATCH",
            f"at cut {cut} the tensors {', '.join(sorted(wanted))} cross, got {', '.join(sorted(feeds)) or 'none'}; "
            "head and tail must be of one cut",
        )


def _wanted(asked: tuple[str, ...], made: tuple[str, ...]) -> tuple[str, ...]:
    """Of the outputs asked for, those made here; the device keeps what its head made. Nothing asked: all."""
    return tuple(name for name in asked if name in made) if asked else made
