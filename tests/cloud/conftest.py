"""A companion in this process and devices talking to it over channels in memory; runtime and cutting are real."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from cloud.admission import Admission, Bounds
from cloud.companion import Companion
from cloud.executor.local import LocalExecutor
from cloud.metrics import Metrics
from cloud.segments import Segments
from cloud.session import Session
from cloud.store import ModelStore
from split.codec.payload import decode, encode
from split.graph.card import CutCard, ModelCard
from split.graph.chunks import list_chunks
from split.graph.cuts import all_prefix_cuts, bitmap_of
from split.graph.load import load_model
from split.ids import CutId
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.tensor import Tensors
from split.transport.channel import Buffer, PeerIdentity
from split.transport.memory import MemoryChannel, memory_pair
from split.wire.limits import DEFAULT_LIMITS, Limits
from split.wire.messages import (
    Hello,
    Infer,
    Message,
    ModelChunk,
    ModelNeed,
    ModelOffer,
    ModelReady,
    SegmentOpen,
    SegmentReady,
)
from split.workbench import cut as workbench

CHAIN = """
<ir_version: 8, opset_import: ["" : 17]>
chain (float[N, 4] x, float[4] bias) => (float[N, 4] y, float[N, 4] early)
{
    a = Relu (x)
    early = Neg (a)
    b = Exp (a)
    c = Add (b, bias)
    y = Mul (c, a)
}
"""
"""Two inputs (the second needed late), an output made early, a value used twice: every way a tensor can travel."""


def hello(minor: int = 0) -> Hello:
    return Hello(major=1, minor=minor, agent="test", runtime="test", max_message_bytes=1 << 26, codecs=("raw",))


@dataclass
class Model:
    path: Path
    card: ModelCard

    @property
    def digest(self) -> str:
        return self.card.digest

    @property
    def offer(self) -> ModelOffer:
        return ModelOffer(digest=self.digest, files=self.card.files)

    def infer(self, feeds: Tensors, cut: str = "offload", **fields: Any) -> tuple[Infer, list[Buffer]]:
        """A request and its payload; `fields` replaces fields of the message."""
        known: dict[str, Any] = {"request_id": "1", "attempt": 1, "codec": "raw", "budget_ms": 20_000.0}
        message = Infer(**{**known, "digest": self.digest, "cut": cut, **fields})
        return message, encode(feeds, message.codec)

    def every_cut(self) -> list[CutCard]:
        """Legal cuts after each node, made in this model's folder: more than the candidates."""
        cuts = [cut for cut in all_prefix_cuts(load_model(self.path)) if not cut.reason]
        bitmaps = (bitmap_of(cut.mask, self.card.nodes) for cut in cuts)
        made = self.path.parent / "made"
        return [workbench.part(self.path, made, cut.id, bits) for cut, bits in zip(cuts, bitmaps, strict=True)]

    def whole(self, feeds: Tensors) -> Tensors:
        """What onnxruntime makes of the unsplit file."""
        return run_plainly(self.path, feeds)

    def crossing(self, cut: CutCard, feeds: Tensors) -> Tensors:
        """What travels at this cut: the boundary, and the inputs the tail needs."""
        made = self.head(cut, feeds)
        return {spec.name: made[spec.name] for spec in cut.boundary} | {name: feeds[name] for name in cut.tail_inputs}

    def head(self, cut: CutCard, feeds: Tensors) -> Tensors:
        return run_plainly(self.path.parent / "made" / f"{cut.id}.head.onnx", {n: feeds[n] for n in cut.head_inputs})


def run_plainly(path: Path, feeds: Tensors) -> Tensors:
    """All outputs of a file, by onnxruntime alone."""
    import onnxruntime  # after split.runtime, which switches its telemetry off first

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


MakeModel = Callable[[str], Model]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """ONNX text → a model on the device's disk, with its card."""
    folders = (tmp_path / f"device-{number}" for number in itertools.count(1))

    def make(text: str) -> Model:
        folder = next(folders)
        folder.mkdir()
        path = folder / "model.onnx"
        onnx.save(onnx.parser.parse_model(text), path)
        return Model(path=path, card=workbench.prepare(path, folder / "made"))

    return make


@pytest.fixture
def chain(make_model: MakeModel) -> Model:
    return make_model(CHAIN)


class InProcessWorkbench:
    """The real cutting without the child process (one test has that); counts its jobs."""

    def __init__(self) -> None:
        self.jobs: list[str] = []

    async def probe(self, model: Path) -> None:
        self.jobs.append("probe")
        await asyncio.to_thread(OrtEngine().open, model, threads=1)

    async def prepare(self, model: Path, folder: Path, dims: Mapping[str, int]) -> None:
        self.jobs.append("prepare")
        await asyncio.to_thread(lambda: workbench.prepare(model, folder, dims=dims))

    async def part(self, model: Path, folder: Path, cut: CutId, node_bitmap: str) -> CutCard:
        self.jobs.append("part")
        return await asyncio.to_thread(workbench.part, model, folder, cut, node_bitmap)

    async def rehearse(self, model: Path, folder: Path, feeds: Path, names: Collection[str]) -> None:
        self.jobs.append(f"rehearse {len(names)}")

    async def optimise(self, model: Path, folder: Path, cuts: Collection[str]) -> None:
        """Nothing is made: what is opened is what was cut."""


@dataclass
class Device:
    """The other end of a session, as a test sees it."""

    channel: MemoryChannel
    session: Session
    task: asyncio.Task[None]

    async def ask(self, message: Message, payload: Sequence[Buffer] = ()) -> Message:
        self.channel.send(message, payload)
        return await self.next()

    async def next(self) -> Message:
        async with asyncio.timeout(30):
            return (await self.channel.receive()).message

    async def reply(self) -> tuple[Message, Tensors]:
        async with asyncio.timeout(30):
            incoming = await self.channel.receive()
        return incoming.message, decode(incoming.payload, max_bytes=1 << 26) if incoming.payload.nbytes else {}

    async def bring_chunks(self, model: Model) -> ModelReady:
        """The same of a model in one file, offered with its chunks."""
        chunks = list_chunks([model.path], [model.path.stat().st_size])
        return await self._bring(model, msgspec.structs.replace(model.offer, chunks=chunks))

    async def bring(self, model: Model) -> ModelReady:
        """Offer a model, send what is missing, wait until it is ready."""
        return await self._bring(model, model.offer)

    async def _bring(self, model: Model, offer: ModelOffer) -> ModelReady:
        need = await self.ask(offer)
        assert isinstance(need, ModelNeed), need
        for name, start in need.missing:
            data = (model.path.parent / name).read_bytes()
            self.channel.send(
                ModelChunk(digest=model.digest, file=name, offset=start, last=True), [memoryview(data)[start:]]
            )
        ready = await self.next()
        assert isinstance(ready, ModelReady), ready
        return ready

    async def open(self, model: Model, cut: CutCard) -> SegmentReady:
        ready = await self.ask(SegmentOpen(digest=model.digest, cut=cut.id, node_bitmap=cut.node_bitmap))
        assert isinstance(ready, SegmentReady), ready
        return ready


@dataclass
class House:
    """One companion and what is in it."""

    companion: Companion
    workbench: InProcessWorkbench
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def connect(self, name: str = "camera-1", limits: Limits = DEFAULT_LIMITS, *, minor: int = 0) -> Device:
        device, companion = memory_pair(
            hello(minor), hello(), device=PeerIdentity(name=name, role="device"), limits=limits
        )
        session = Session(companion, self.companion)
        task = asyncio.create_task(session.run())
        self.tasks.append(task)
        return Device(channel=device, session=session, task=task)


MakeHouse = Callable[..., House]


@pytest.fixture
async def make_house(tmp_path: Path) -> AsyncIterator[MakeHouse]:
    made: list[House] = []

    def make(*, budget_bytes: int = 1 << 28, inflight_bytes: int = 1 << 26) -> House:
        segments = SegmentStore(OrtEngine(), threads=1, budget_bytes=1 << 28)
        bench = InProcessWorkbench()
        made_segments = Segments(
            tmp_path / "cache", bench, prefer=segments.prefer, let_go=segments.forget, runtime=OrtEngine().name
        )
        house = House(
            companion=Companion(
                store=ModelStore(tmp_path / "state" / "models", budget_bytes=budget_bytes),
                segments=made_segments,
                executor=LocalExecutor(segments),
                admission=Admission(Bounds(inflight_bytes=inflight_bytes, device_bytes=inflight_bytes)),
                metrics=Metrics(),
                decoded_bytes=inflight_bytes,
            ),
            workbench=bench,
        )
        made.append(house)
        return house

    yield make
    for house in made:
        for task in house.tasks:
            task.cancel()
        await asyncio.gather(*house.tasks, return_exceptions=True)
        await house.companion.segments.close()
        house.companion.executor.close()
        house.companion.disk.shutdown()


@pytest.fixture
def house(make_house: MakeHouse) -> House:
    return make_house()


@pytest.fixture
def feeds() -> Tensors:
    """Inputs of `chain`, three rows."""
    generator = np.random.default_rng(7)
    return {
        "x": generator.standard_normal((3, 4)).astype(np.float32),
        "bias": generator.standard_normal(4).astype(np.float32),
    }
