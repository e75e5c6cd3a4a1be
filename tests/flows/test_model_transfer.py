"""A model on its way between the device's openings and the companion's store, in virtual time, over a link of the
test's making: cuts, requests that overtake it, metered bytes."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.first_flight import FirstFlight
from agent.openings import Openings
from agent.planner import Planner
from agent.served_model import ServedModel
from agent.sharing import BULK_WINDOW_BYTES, CHUNK_BYTES
from cloud.store import ModelStore
from cloud.uploads import Wanted
from split.codec.payload import encode
from split.errors import ChannelError, CompanionRefused
from split.graph.card import ModelCard
from split.ids import ModelDigest, ModelName
from split.plan.observation import Metered
from split.profiles.contract import Contract
from split.profiles.measured import CodecCosts, ModelProfile
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.tensor import TensorSpec
from split.transport.memory import memory_pair
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import (
    Hello,
    Infer,
    Message,
    ModelChunk,
    ModelNeed,
    ModelOffer,
    ModelReady,
    Priority,
    Refused,
)

GOLDEN = {"y": np.array([1.0], np.float32)}
NOISE = np.random.default_rng(11).integers(0, 256, 3_000_000, dtype=np.uint8).tobytes()
FRAME_BYTES = 64 * 1024


def hello() -> Hello:
    return Hello(major=1, minor=0, agent="test", runtime="test", max_message_bytes=1 << 26, codecs=("raw",))


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time does not wait for threads: what they would do is done at once."""

    async def inline(work: Callable[..., Any], *given: Any) -> Any:
        return work(*given)

    monkeypatch.setattr(asyncio, "to_thread", inline)


class Golden:
    """Nothing is run: what both sides compute is the same."""

    async def offered(self, model: ServedModel) -> bytes:
        return b""

    async def run(self, model: ServedModel, cut: object) -> Any:
        return GOLDEN

    def forget(self, model: ServedModel) -> None:
        pass


def served(folder: Path, data: bytes, name: str = "m") -> ServedModel:
    path = folder / f"{name}.onnx"
    path.write_bytes(data)
    sha = hashlib.sha256(data).hexdigest()
    spec = TensorSpec(name="x", dtype="FP32", shape=(1,))
    card = ModelCard(
        digest=ModelDigest(f"sha256:{sha}"),
        path=str(path),
        files=((path.name, len(data), sha),),
        inputs=(spec,),
        outputs=(spec,),
        nodes=1,
        opset=17,
        cuts=(),
    )
    profile = ModelProfile(
        digest=card.digest,
        runtime="test",
        fingerprint="test",
        dims={},
        threads=1,
        whole_ms=100.0,
        image_ms=0.0,
        input_codecs=(CodecCosts(codec="raw", bytes=4, encode_ms=0.0, decode_ms=0.0),),
        encoded_bytes=0,
        output_bytes=4,
        cuts=(),
    )
    return ServedModel(
        name=ModelName(name),
        version="1",
        card=card,
        contract=Contract(),
        images={},
        labels={},
        folder=folder,
        profile=profile,
        store=SegmentStore(OrtEngine(), threads=1, budget_bytes=1),
    )


class Link:
    """A device with these openings, a companion with this store, between them so many bytes a second."""

    def __init__(self, store: ModelStore, planner: Planner, rate_bytes_per_s: float = 1e6) -> None:
        self.store, self.planner = store, planner
        self.came: list[Message] = []
        self.chunk_bytes = 0
        self.device, self._companion = memory_pair(
            hello(),
            hello(),
            delay=lambda size, arrive: asyncio.get_running_loop().call_later(size / rate_bytes_per_s, arrive),
        )
        self.openings = Openings(self.device, planner=planner, golden=Golden(), draw=lambda: 0.5, flight=FirstFlight())  # type: ignore[arg-type]
        planner.connected(max_message_bytes=1 << 26)
        self._tasks = [asyncio.create_task(self._answers()), asyncio.create_task(self._companion_serves())]

    async def _answers(self) -> None:
        try:
            while True:
                self.openings.take((await self.device.receive()).message)  # type: ignore[arg-type]  # only answers come
        except ChannelError:
            return

    async def _companion_serves(self) -> None:
        offers: dict[str, ModelOffer] = {}
        try:
            while True:
                incoming = await self._companion.receive()
                self.came.append(incoming.message)
                match incoming.message:
                    case ModelOffer() as offer:
                        offers[offer.digest] = offer
                        self._companion.send(self._offered(offer))
                        self._ready_if_whole(offer.digest)
                    case ModelChunk(digest=digest, offset=offset):
                        self.chunk_bytes += incoming.payload.nbytes
                        if self.store.write(digest, "cam", 0, offset, incoming.payload):
                            self._ready_if_whole(digest)
        except ChannelError:
            for digest in offers:
                self.store.release(digest, "cam")

    def _offered(self, offer: ModelOffer) -> Message:
        try:
            wanted = self.store.offer(offer.digest, "cam", offer.files, offer.chunks) or Wanted()
        except CompanionRefused as error:
            return Refused(code=error.code, message=str(error), digest=offer.digest)
        missing = tuple((offer.files[index][0], at) for index, at in wanted.missing)
        return ModelNeed(digest=offer.digest, missing=missing, lengths=wanted.lengths)

    def _ready_if_whole(self, digest: str) -> None:
        if self.store.finish(digest, "cam"):
            golden = b"".join(bytes(part) for part in encode(GOLDEN, "raw"))
            self._companion.send(ModelReady(digest=digest, golden=golden, whole_ms=10.0))

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(100_000):
            while not true():  # noqa: ASYNC110 - virtual time, costs nothing
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        self.device.kill()
        await self.openings.close()
        await asyncio.gather(*self._tasks)


def knowing(*models: ServedModel, **options: Any) -> Planner:
    planner = Planner(**options)
    for model in models:
        assert model.profile is not None
        planner.add_model(model.name, model.card, model.profile, model.contract)
    return planner


def test_a_model_gets_through_a_link_that_is_cut_again_and_again_and_sends_each_byte_about_once(tmp_path: Path) -> None:
    async def main() -> None:
        model, rng = served(tmp_path, NOISE), random.Random(3)
        planner = knowing(model)
        cuts = sent = 0
        while planner.local_only_reason("m") or not cuts:
            store = ModelStore(tmp_path / "models", budget_bytes=10_000_000)  # the companion starts anew, too
            link = Link(store, planner)
            link.openings.begin(model)
            after = rng.randrange(100_000, 900_000)
            link.device.kill(after_bytes=after)
            await link.until(lambda link=link: bool(link.device.closed_because) or not planner.local_only_reason("m"))
            sent += link.chunk_bytes
            cuts += 1
            await link.end()
        assert store.path(model.digest).read_bytes() == NOISE
        assert cuts > 4
        assert sent <= len(NOISE) + cuts * CHUNK_BYTES

    run_in_virtual_time(main())


def test_a_second_version_is_shared_for_what_differs(tmp_path: Path) -> None:
    async def main() -> None:
        old, new = served(tmp_path, NOISE, "old"), served(tmp_path, b"a node more" + NOISE, "new")
        planner = knowing(old, new)
        link = Link(ModelStore(tmp_path / "models", budget_bytes=10_000_000), planner)
        link.openings.begin(old)
        await link.until(lambda: not planner.local_only_reason("old"))
        before = link.device.sent_bytes
        link.openings.begin(new)
        await link.until(lambda: not planner.local_only_reason("new"))
        assert link.device.sent_bytes - before < 16 * 16 * 1024 + 20_000
        await link.end()

    run_in_virtual_time(main())


def test_a_request_overtakes_a_model_that_is_on_its_way(tmp_path: Path) -> None:
    async def main() -> None:
        model = served(tmp_path, NOISE)
        planner = knowing(model)
        link = Link(ModelStore(tmp_path / "models", budget_bytes=10_000_000), planner, rate_bytes_per_s=100_000)
        link.openings.begin(model)
        await link.until(lambda: link.chunk_bytes > 500_000)
        for request in range(5):
            assert link.device.queued_bytes <= BULK_WINDOW_BYTES + 2 * CHUNK_BYTES
            infer = Infer(request_id=str(request), attempt=1, digest="d", cut="offload", codec="raw", budget_ms=1e3)
            asked_at_s, came = asyncio.get_running_loop().time(), len(link.came)
            link.device.send(infer, [bytes(1000)], priority=Priority.NORMAL)
            await link.until(lambda infer=infer: infer in link.came)
            # At most the frame that is on the link is ahead of it, two if the last of one chunk is.
            assert asyncio.get_running_loop().time() - asked_at_s <= (2 * FRAME_BYTES + 2000) / 100_000
            assert link.came.index(infer) - came <= 1
        assert planner.local_only_reason("m")  # and the model is still on its way
        await link.until(lambda: not planner.local_only_reason("m"))
        await link.end()

    run_in_virtual_time(main())


def test_a_model_waits_where_the_month_has_not_enough_bytes_left_and_goes_on_with_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        model, left = served(tmp_path, NOISE), [1_000_000.0]
        planner = knowing(model, metered=lambda: Metered(left_bytes=left[0]))
        link = Link(ModelStore(tmp_path / "models", budget_bytes=10_000_000), planner)
        link.openings.begin(model)
        await asyncio.sleep(5_000)
        assert link.chunk_bytes == 0
        assert [type(message) for message in link.came] == [ModelOffer, ModelOffer]
        assert "waits: it would move 3000000 bytes, of this month's metered bytes 1000000 are left" in (
            planner.local_only_reason("m")
        )
        left[0] = 1e9
        await link.until(lambda: link.chunk_bytes > 1_000_000)
        left[0] = 0.0  # requests have used it up: the model rests where it is
        await asyncio.sleep(1_000)
        rested = link.chunk_bytes
        await asyncio.sleep(1_000)
        assert rested == link.chunk_bytes < len(NOISE)
        left[0] = 1e9
        await link.until(lambda: not planner.local_only_reason("m"))
        assert link.chunk_bytes == len(NOISE)
        await link.end()

    run_in_virtual_time(main())


@pytest.mark.parametrize(
    "odd", [((("model.onnx", 0),), (5,)), ((("m.onnx", 0),), (5, 5)), ((("m.onnx", 1),), (3_000_000,))]
)
def test_a_companion_that_wants_what_is_not_there_gets_nothing(
    tmp_path: Path, odd: tuple[tuple[tuple[str, int], ...], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        model = served(tmp_path, NOISE)
        planner = knowing(model)
        link = Link(ModelStore(tmp_path / "models", budget_bytes=10_000_000), planner)
        missing, lengths = odd
        monkeypatch.setattr(
            link, "_offered", lambda offer: ModelNeed(digest=offer.digest, missing=missing, lengths=lengths)
        )
        link.openings.begin(model)
        await link.until(lambda: "the companion wants" in planner.local_only_reason("m"))
        assert link.chunk_bytes == 0
        await link.end()

    run_in_virtual_time(main())
