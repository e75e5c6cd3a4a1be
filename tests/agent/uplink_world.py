"""A device in virtual time: the real uplink, dialler, openings and planner; companions that do as they are told at the
other end of channels in memory. For the tests beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agent.planner import Planner
from agent.served_model import ServedModel
from agent.uplink import Uplink
from agent.waiting import Asked
from split.codec.payload import encode
from split.errors import (
    ChannelError,
    IdentityError,
    NotReached,
)
from split.graph.card import CutCard, ModelCard
from split.ids import CutId, ModelDigest, ModelName
from split.plan.observation import Metered
from split.plan.plan import RequestFacts
from split.profiles.contract import Contract
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.tensor import TensorSpec
from split.transport.memory import MemoryChannel, memory_pair
from split.transport.retry import Backoff
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import (
    Hello,
    Infer,
    Message,
    ModelNeed,
    ModelOffer,
    ModelReady,
    Priority,
    Refused,
    Reply,
    SegmentOpen,
    SegmentReady,
)

CUTS = [CutId(letter * 12) for letter in "abc"]
DIGEST = ModelDigest("sha256:" + "1" * 64)
GOLDEN = {"y": np.array([1.0, 2.0], np.float32)}
OTHER = {"y": np.array([1.0, 2.1], np.float32)}
HOST = "companion:1"
SYNS_S = (0.0, 1.0, 2.0)
"""Pauses between a connection's SYNs, as TCP doubles them."""
TENSOR = RequestFacts(budget_ms=10_000.0)


def joined(tensors: Any) -> bytes:
    return b"".join(bytes(part) for part in encode(tensors, "raw"))


def hello(
    max_message_bytes: int = 1 << 20,
    kernels: dict[str, int] | None = None,
    minor: int = 0,
    codecs: tuple[str, ...] = ("raw",),
) -> Hello:
    return Hello(
        major=1,
        minor=minor,
        agent="test",
        runtime="test",
        max_message_bytes=max_message_bytes,
        codecs=codecs,
        kernels=kernels or {},
    )


class Golden:
    """What the device itself computes."""

    async def offered(self, model: ServedModel) -> bytes:
        return b""

    async def run(self, model: ServedModel, cut: CutId | None) -> Any:
        return GOLDEN

    def forget(self, model: ServedModel) -> None:
        pass


def model(
    folder: Path,
    name: str = "m",
    *,
    contract: Contract | None = None,
    file_bytes: int = 100,
    digest: ModelDigest = DIGEST,
) -> ServedModel:
    """Three cuts, no ONNX: nothing here runs it."""
    path = folder / "model.onnx"
    path.write_bytes(bytes(file_bytes))
    cuts = tuple(
        CutCard(
            id=cut,
            boundary=(TensorSpec(name="t", dtype="FP32", shape=(1, 100)),),
            head_inputs=("x",),
            head_outputs=(),
            tail_inputs=(),
            shown_inputs=(),
            tail_outputs=("y",),
            nodes=3,
            compute_share=0.3,
            node_bitmap="07",
        )
        for cut in CUTS
    )
    codecs = (CodecCosts(codec="raw", bytes=400, encode_ms=0.0, decode_ms=0.0),)
    return ServedModel(
        name=ModelName(name),
        version="1",
        card=ModelCard(
            digest=digest,
            path=str(path),
            files=(("model.onnx", file_bytes, "0" * 64),),
            inputs=(TensorSpec(name="x", dtype="FP32", shape=(1, 100)),),
            outputs=(TensorSpec(name="y", dtype="FP32", shape=(1, 2)),),
            nodes=10,
            opset=17,
            cuts=cuts,
        ),
        contract=contract or Contract(),
        images={},
        labels={},
        folder=folder,
        profile=ModelProfile(
            digest=digest,
            runtime="test",
            fingerprint="test",
            dims={},
            threads=1,
            whole_ms=100.0,
            image_ms=0.0,
            input_codecs=codecs,
            encoded_bytes=0,
            output_bytes=8,
            cuts=tuple(CutCosts(cut=cut, head_ms=30.0, tail_ms=70.0, codecs=codecs) for cut in CUTS),
        ),
        store=SegmentStore(OrtEngine(), threads=1, budget_bytes=1 << 20),
    )


Script = Callable[[Any, int], Sequence[Message]]
"""(message, how many of its kind came before on all connections) → what is answered."""


def takes(offer: ModelOffer, before: int) -> Sequence[Message]:
    return ModelNeed(digest=offer.digest, missing=()), ready(offer)


def ready(offer: ModelOffer) -> ModelReady:
    return ModelReady(digest=offer.digest, golden=joined(GOLDEN), whole_ms=10.0)


def opens(wanted: SegmentOpen, before: int) -> Sequence[Message]:
    return (SegmentReady(digest=wanted.digest, cut=wanted.cut, golden=joined(GOLDEN), tail_ms=6.0),)


def delay_arrivals(end: MemoryChannel, delay_s: float) -> None:
    """What is sent to this end comes so much later, in its order, as much at once as there is."""
    arrive, on_the_way = end._take, deque[bytes]()

    def take(data: bytes) -> None:
        on_the_way.append(data)
        asyncio.get_running_loop().call_later(delay_s, lambda: arrive(on_the_way.popleft()))

    end._take = take  # type: ignore[method-assign]


@dataclass
class World:
    """A device, and companions at some addresses behind a network that may be broken."""

    folder: Path
    companions: Sequence[str] = (HOST,)
    on_offer: Script = takes
    on_cut: Script = opens
    max_message_bytes: int = 1 << 20
    kernels: dict[str, int] = field(default_factory=dict)
    """What the companion says of its integer kernels."""
    minor: int = 0
    """Of the companion's version."""
    codecs: tuple[str, ...] = ("raw",)
    """That the companion reads."""
    draw: float = 0.5
    limits: Any = None
    dead: set[str] = field(default_factory=set)
    """Addresses behind which nothing answers; dialling them hangs."""
    refused: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    """Addresses at which somebody else answers."""
    identity_is: str = ""
    """What the device's identity files hold."""
    handshake_s: float = 0.0
    delay_s: float = 0.0
    """One way, for what companions say."""
    metered: Metered | None = None
    dialled: list[tuple[float, str]] = field(default_factory=list)
    connected: list[tuple[str, MemoryChannel, MemoryChannel]] = field(default_factory=list)
    """Address, the device's end, the companion's."""
    seen: list[Message] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.planner = Planner(metered=lambda: self.metered)
        self.uplink = Uplink(
            companions=self.companions,
            dial=self.dial,
            planner=self.planner,
            golden=Golden(),  # type: ignore[arg-type]  # the same methods, nothing runs
            backoff=Backoff(draw=lambda: self.draw),
            identity_is=lambda: self.identity_is,
        )
        self.ids = itertools.count(1)

    def serve(self, served: ServedModel) -> ServedModel:
        self.planner.add_model(served.name, served.card, served.profile, served.contract)  # type: ignore[arg-type]
        self.uplink.serve_model(served)
        return served

    async def dial(self, address: str, timeout_s: float, first: Sequence[Message]) -> MemoryChannel:
        self.dialled.append((self.now, address))
        try:
            async with asyncio.timeout(timeout_s):
                for heard_s in SYNS_S:  # TCP tries again by itself
                    await asyncio.sleep(heard_s)
                    if address not in self.dead:
                        break
                else:
                    await asyncio.sleep(math.inf)
                await asyncio.sleep(self.handshake_s)
        except TimeoutError:
            raise NotReached("TIMEOUT", f"{address} did not answer") from None
        if address in self.wrong:
            raise IdentityError(f"{address} shows a certificate of another CA")
        if address in self.refused:
            raise NotReached("REFUSED", f"{address} refused")
        device, companion = memory_pair(hello(), hello(self.max_message_bytes, self.kernels, self.minor, self.codecs))
        if self.delay_s:
            delay_arrivals(device, self.delay_s)
        for message in first:
            device.send(message)
        self.connected.append((address, device, companion))
        self.tasks.append(asyncio.create_task(self.companion(companion)))
        return device

    async def companion(self, channel: MemoryChannel) -> None:
        try:
            while True:
                message = (await channel.receive()).message
                before = sum(type(other) is type(message) for other in self.seen)
                self.seen.append(message)
                match message:
                    case ModelOffer():
                        answers = self.on_offer(message, before)
                    case SegmentOpen():
                        answers = self.on_cut(message, before)
                    case _:
                        answers = ()
                for answer in answers:
                    channel.send(answer)
        except ChannelError:
            return

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def companion_end(self) -> MemoryChannel:
        return self.connected[-1][2]

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.seen)

    def opened(self, name: str = "m") -> set[str]:
        """Cuts whose splits may be chosen now."""
        return {cut for cut in CUTS if self.placement(name, cut) == "split"}

    def placement(self, name: str, cut: CutId) -> str:
        facts = RequestFacts(budget_ms=10_000.0, cut=cut)
        return str(self.planner.decide(name, facts, edge_queue_ms=0.0, now_s=self.now).chosen.plan.placement)

    def why(self, name: str = "m") -> str:
        return self.planner.local_only_reason(name)

    def ask(self, **more: Any) -> asyncio.Future[Any]:
        return self.asked(**more).reply

    def asked(self, *, size: int = 100, cloud_ms: float = 0.0, attempts: int = 1, **more: Any) -> Asked:
        infer = Infer(
            request_id=str(next(self.ids)), attempt=1, digest=DIGEST, cut="offload", codec="raw", budget_ms=9e3
        )
        infer = msgspec.structs.replace(infer, **more)
        return self.uplink.infer(infer, [bytes(size)], priority=Priority.NORMAL, cloud_ms=cloud_ms, attempts=attempts)

    def answer(self, request_id: str, *, attempt: int = 1, **odd: float) -> None:
        times = {"queue_ms": 0.0, "decode_ms": 0.0, "tail_ms": 1.0, "encode_ms": 0.0, "cloud_ms": 1.0} | odd
        reply = Reply(request_id=request_id, attempt=attempt, cut="offload", codec="raw", **times)
        self.companion_end.send(reply, encode(GOLDEN, "raw"))

    async def until(self, true: Callable[[], bool], within_s: float = 600.0) -> float:
        """Seconds until it was true."""
        began_s = self.now
        async with asyncio.timeout(within_s):
            while not true():  # noqa: ASYNC110 - virtual time, costs nothing
                await asyncio.sleep(0.01)
        return self.now - began_s


@asynccontextmanager
async def running(world: World, *models: ServedModel) -> AsyncIterator[World]:
    for served in models or (model(world.folder),):
        world.serve(served)
    world.uplink.start()
    try:
        yield world
    finally:
        await world.uplink.close()
        for task in world.tasks:
            task.cancel()
        await asyncio.gather(*world.tasks, return_exceptions=True)


def story(test: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A test that lives in virtual time."""

    def run(tmp_path: Path) -> None:
        run_in_virtual_time(test(tmp_path))

    run.__name__ = test.__name__
    return run


def refuses(code: str, times: int, then: Script) -> Script:
    def script(message: Any, before: int) -> Sequence[Message]:
        if before >= times:
            return then(message, before)
        cut = message.cut if isinstance(message, SegmentOpen) else ""
        return (Refused(code=code, message=f"not now: {code}", digest=message.digest, cut=cut),)

    return script
