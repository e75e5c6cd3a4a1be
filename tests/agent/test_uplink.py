"""Connection, set-up and silence in virtual time: the real uplink, dialler, openings and planner; companions that do as
they are told at the other end of channels in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
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
import pytest

from agent.planner import Planner
from agent.served_model import ServedModel
from agent.uplink import SILENCE_S, Uplink
from agent.waiting import Asked
from split.codec.payload import encode
from split.errors import (
    ChannelError,
    CompanionRefused,
    ConnectionLost,
    IdentityError,
    NotReached,
    Overloaded,
    RemoteProtocolError,
)
from split.graph.card import CutCard, ModelCard
from split.ids import CutId, ModelDigest, ModelName
from split.plan.observation import Metered
from split.plan.plan import Placement, Plan, RequestFacts
from split.profiles.contract import Contract, Data
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.runtime.kernels import kernel_answers
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.tensor import TensorSpec
from split.transport.memory import MemoryChannel, memory_pair
from split.transport.retry import Backoff
from split.transport.virtual_time import run_in_virtual_time
from split.wire.limits import CONTROL_QUEUE_BYTES, DEFAULT_LIMITS
from split.wire.messages import (
    Goodbye,
    Hello,
    Infer,
    Message,
    ModelChunk,
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


def hello(max_message_bytes: int = 1 << 20, kernels: dict[str, int] | None = None) -> Hello:
    return Hello(
        major=1,
        minor=0,
        agent="test",
        runtime="test",
        max_message_bytes=max_message_bytes,
        codecs=("raw",),
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
        device, companion = memory_pair(hello(), hello(self.max_message_bytes, self.kernels))
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


# -- set-up -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["OVERLOADED", "DISK_FULL", "BUDGET_EXCEEDED", "INTERNAL"])
def test_a_model_refused_for_a_reason_that_may_go_away_is_offered_again(tmp_path: Path, code: str) -> None:
    async def main() -> None:
        async with running(World(tmp_path, on_offer=refuses(code, 3, takes))) as world:
            await world.until(lambda: f"not now: {code}; tried again in" in world.why())
            await world.until(lambda: world.why() == "")
            assert world.count(ModelOffer) == 4
            assert world.uplink.connects == 1

    run_in_virtual_time(main())


@story
async def test_an_offer_without_an_answer_is_made_again(tmp_path: Path) -> None:
    def silent_once(offer: ModelOffer, before: int) -> Sequence[Message]:
        return takes(offer, before) if before else ()

    async with running(World(tmp_path, on_offer=silent_once)) as world:
        await world.until(lambda: "did not answer" in world.why())
        await world.until(lambda: world.why() == "")


@story
async def test_the_pauses_between_tries_grow_to_half_a_minute_and_no_further(tmp_path: Path) -> None:
    at_s: list[float] = []

    def notes(offer: ModelOffer, before: int) -> Sequence[Message]:
        at_s.append(asyncio.get_running_loop().time())
        return (Refused(code="OVERLOADED", message="no", digest=offer.digest),)

    async with running(World(tmp_path, on_offer=notes, draw=1.0)):
        await asyncio.sleep(200)
    assert [round(later - earlier) for earlier, later in itertools.pairwise(at_s)][:7] == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("code", ["UNSUPPORTED_OP", "DIGEST_MISMATCH", "INVALID_MODEL"])
def test_a_model_refused_for_good_is_offered_once(tmp_path: Path, code: str) -> None:
    async def main() -> None:
        async with running(World(tmp_path, on_offer=refuses(code, 99, takes))) as world:
            await asyncio.sleep(3600)
            assert world.why() == f"not now: {code}"
            assert world.count(ModelOffer) == 1

    run_in_virtual_time(main())


def of_integers(folder: Path) -> ServedModel:
    served = model(folder)
    return dataclasses.replace(served, card=msgspec.structs.replace(served.card, integer=True))


@story
async def test_where_integer_kernels_differ_a_model_of_integers_is_not_shared_and_the_reason_is_shown(
    tmp_path: Path,
) -> None:
    saturating = kernel_answers() | {"MatMulInteger": 1_048_544}
    async with running(World(tmp_path, kernels=saturating), of_integers(tmp_path)) as world:
        await asyncio.sleep(3600)
        assert "computes integers differently: its MatMulInteger answers 1,048,544 where" in world.why()
        assert world.count(ModelOffer) == 0
        assert world.why() == world.planner.snapshot(world.now)["models"]["m"]["local_only_reason"]


@story
async def test_where_integer_kernels_differ_a_model_of_floats_is_shared(tmp_path: Path) -> None:
    async with running(World(tmp_path, kernels={"MatMulInteger": 1_048_544})) as world:
        await asyncio.sleep(10)
        assert world.why() == ""


@story
async def test_where_integer_kernels_answer_alike_a_model_of_integers_is_shared(tmp_path: Path) -> None:
    async with running(World(tmp_path, kernels=kernel_answers()), of_integers(tmp_path)) as world:
        await asyncio.sleep(10)
        assert world.why() == ""


@story
async def test_a_model_computed_differently_is_never_shared_on_this_connection(tmp_path: Path) -> None:
    def differs(offer: ModelOffer, before: int) -> Sequence[Message]:
        return (ModelReady(digest=offer.digest, golden=joined(OTHER), whole_ms=10.0),)

    async with running(World(tmp_path, on_offer=differs)) as world:
        await asyncio.sleep(3600)
        assert "computes this model differently" in world.why()
        assert world.count(ModelOffer) == 1
        assert world.count(SegmentOpen) == 0


def self_differing(folder: Path, by: float) -> ServedModel:
    served = model(folder)
    assert served.profile is not None
    return dataclasses.replace(served, profile=msgspec.structs.replace(served.profile, self_difference=by))


@pytest.mark.parametrize(
    ("self_difference", "off_by", "why"),
    [
        (0.0, 0.9e-5, ""),
        (0.0, 1.1e-5, "allowed is 1e-05"),
        (6e-5, 1.1e-4, ""),  # PP-OCRv4-det, with other sums on either side
        (6e-5, 1.3e-4, "allowed is 0.00012"),
        (0.02, 0.0, ""),  # M-LSD
        (0.02, 2e-7, "not reproducible (it differs from itself by 0.02"),
    ],
)
def test_two_sides_may_be_twice_as_far_apart_as_the_model_is_from_itself(
    tmp_path: Path, self_difference: float, off_by: float, why: str
) -> None:
    theirs = {"y": np.array([1.0, 2.0 * (1 + off_by)], np.float32)}

    def slightly_off(offer: ModelOffer, before: int) -> Sequence[Message]:
        return ModelNeed(digest=offer.digest, missing=()), ModelReady(
            digest=offer.digest, golden=joined(theirs), whole_ms=10.0
        )

    async def main() -> None:
        async with running(World(tmp_path, on_offer=slightly_off), self_differing(tmp_path, self_difference)) as world:
            await asyncio.sleep(100)
            assert why in world.why()
            assert bool(world.why()) is bool(why)
            shown = world.planner.snapshot(world.now)["models"]["m"]
            assert shown["self_difference"] == self_difference

    run_in_virtual_time(main())


@story
async def test_local_only_models_are_never_offered(tmp_path: Path) -> None:
    private = model(tmp_path, contract=Contract(data=Data(privacy="local-only")))
    async with running(World(tmp_path), private) as world:
        await asyncio.sleep(100)
        assert world.why() == "the contract says local-only"
        assert world.count(ModelOffer) == 0


async def test_a_companion_that_refuses_while_it_is_sent_the_files_is_sent_no_more(tmp_path: Path) -> None:
    """In real time: a thread reads the file."""
    size = 8 << 20
    served = model(tmp_path, file_bytes=size)

    def wants_all(offer: ModelOffer, before: int) -> Sequence[Message]:
        need = ModelNeed(digest=offer.digest, missing=(("model.onnx", 0),))
        return need, Refused(code="DISK_FULL", message="full", digest=offer.digest)

    refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    world = World(tmp_path, on_offer=wants_all, draw=0.999)
    world.planner.companion_not_ready = lambda name, why: refused.set_result(why)  # type: ignore[method-assign]
    async with running(world, served):
        async with asyncio.timeout(30):
            assert "full" in await refused
        assert world.count(ModelChunk) < size // (256 * 1024)


async def test_a_model_is_sent_in_pieces_that_the_companion_takes(tmp_path: Path) -> None:
    """In real time: a thread reads the file."""

    def wants_all(offer: ModelOffer, before: int) -> Sequence[Message]:
        return (ModelNeed(digest=offer.digest, missing=(("model.onnx", 0),)),)

    world = World(tmp_path, on_offer=wants_all, max_message_bytes=1 << 16)
    async with running(world, model(tmp_path, file_bytes=300_000)):
        async with asyncio.timeout(30):
            while not any(isinstance(message, ModelChunk) and message.last for message in world.seen):  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert world.count(ModelChunk) == 5  # of at most 61,440 bytes


@pytest.mark.parametrize("code", ["OVERLOADED", "INTERNAL", "STORAGE_FAILED"])
def test_a_cut_that_fails_for_now_keeps_no_other_back_and_is_tried_again(tmp_path: Path, code: str) -> None:
    def busy_with_b(wanted: SegmentOpen, before: int) -> Sequence[Message]:
        if wanted.cut == CUTS[1] and before < 6:
            return (Refused(code=code, message="busy", digest=wanted.digest, cut=wanted.cut),)
        return opens(wanted, before)

    async def main() -> None:
        async with running(World(tmp_path, on_cut=busy_with_b)) as world:
            await world.until(lambda: world.opened() == {CUTS[0], CUTS[2]})
            assert world.planner.snapshot(world.now)["models"]["m"]["cuts_not_open"] == {CUTS[1]: "busy"}
            await world.until(lambda: world.opened() == set(CUTS))
            assert world.planner.snapshot(world.now)["models"]["m"]["cuts_not_open"] == {}
            assert world.why() == ""

    run_in_virtual_time(main())


@story
async def test_a_cut_that_is_never_answered_keeps_no_other_back(tmp_path: Path) -> None:
    def silent_about_a(wanted: SegmentOpen, before: int) -> Sequence[Message]:
        return () if wanted.cut == CUTS[0] else opens(wanted, before)

    async with running(World(tmp_path, on_cut=silent_about_a)) as world:
        await world.until(lambda: world.opened() == {CUTS[1], CUTS[2]})
        assert world.why() == ""


@story
async def test_a_cut_computed_differently_is_left_out_for_good(tmp_path: Path) -> None:
    def differs_at_a(wanted: SegmentOpen, before: int) -> Sequence[Message]:
        golden = joined(OTHER if wanted.cut == CUTS[0] else GOLDEN)
        return (SegmentReady(digest=wanted.digest, cut=wanted.cut, golden=golden, tail_ms=6.0),)

    async with running(World(tmp_path, on_cut=differs_at_a)) as world:
        await asyncio.sleep(600)
        assert world.opened() == {CUTS[1], CUTS[2]}
        assert world.count(SegmentOpen) == 3
        assert "differently" in world.planner.snapshot(world.now)["models"]["m"]["cuts_not_open"][CUTS[0]]


@story
async def test_two_names_of_one_model_are_both_served(tmp_path: Path) -> None:
    """The companion answers the second offer while the first is under way, as it comes: answers say only the digest."""

    async with running(World(tmp_path, delay_s=0.05), model(tmp_path, "m"), model(tmp_path, "n")) as world:
        await world.until(lambda: world.opened("m") == world.opened("n") == set(CUTS), within_s=60)
        assert world.why("m") == world.why("n") == ""


@story
async def test_dropping_one_name_of_a_model_does_not_disturb_the_other(tmp_path: Path) -> None:
    async with running(World(tmp_path, delay_s=0.05)) as world:
        await world.until(lambda: world.count(ModelOffer) == 1)
        world.serve(model(tmp_path, "n"))
        await asyncio.sleep(0.01)
        world.uplink.drop_model(model(tmp_path, "m"))
        await world.until(lambda: world.opened("n") == set(CUTS), within_s=60)


# -- goodbye ----------------------------------------------------------------------------------------------------------


@story
async def test_after_a_goodbye_nothing_new_goes_there_whatever_still_comes(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=("one:1", "two:1"))) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        first = world.ask()
        await world.until(lambda: world.count(Infer) == 1)
        world.companion_end.send(Goodbye(reason="maintenance"))
        await world.until(lambda: "maintenance" in world.why())
        offers = world.count(ModelOffer)
        world.companion_end.send(ready(ModelOffer(digest=DIGEST, files=())))
        world.uplink.suspect()
        world.serve(model(tmp_path, "late"))
        await asyncio.sleep(1.0)  # pongs come
        assert "maintenance" in world.why()
        assert world.count(ModelOffer) == offers
        with pytest.raises(ConnectionLost, match="maintenance"):
            world.ask()
        world.answer("1")
        reply = await first
        np.testing.assert_array_equal(reply.outputs["y"], GOLDEN["y"])
        # Nothing is awaited any more: hung up, and the other companion is used.
        took_s = await world.until(lambda: world.opened("m") == world.opened("late") == set(CUTS))
        assert took_s < 2.0
        assert [address for address, _, _ in world.connected] == ["one:1", "two:1"]


@story
async def test_a_companion_that_says_goodbye_and_then_nothing_is_left_all_the_same(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.why() == "")
        lost = world.ask()
        world.companion_end.send(Goodbye(reason="maintenance"))
        world.companion_end.freeze()
        with pytest.raises(ConnectionLost):
            await lost
        await world.until(lambda: world.why() == "", within_s=5)


# -- silence ----------------------------------------------------------------------------------------------------------


@story
async def test_set_up_that_goes_on_during_a_silence_leaves_other_models_ready(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        world.uplink.suspect()
        assert "does not answer in time" in world.why()
        world.serve(model(tmp_path, "n"))
        await world.until(lambda: world.opened("n") == set(CUTS))
        assert world.opened("m") == set(CUTS)
        assert world.uplink.connects == 1


@story
async def test_a_companion_that_was_frozen_is_used_again_on_the_old_connection_as_soon_as_it_speaks(
    tmp_path: Path,
) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        world.companion_end.freeze()
        world.dead = {HOST}
        world.uplink.suspect()
        await asyncio.sleep(60)
        assert world.uplink.state == "silent"
        assert len(world.dialled) > 5
        world.companion_end.thaw()
        await world.until(lambda: world.opened() == set(CUTS), within_s=0.3)
        await asyncio.sleep(0.5)
        world.dead = set()
        dialled = len(world.dialled)
        await asyncio.sleep(60)
        assert (len(world.dialled), world.uplink.connects) == (dialled, 1)


@story
async def test_an_answer_that_takes_long_on_a_slow_link_is_no_silence(tmp_path: Path) -> None:
    async with running(World(tmp_path, delay_s=SILENCE_S - 1.0)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        await asyncio.sleep(600)  # idle pings
        assert len(world.dialled) == 1


@story
async def test_a_link_slower_than_that_ends_the_replacing_by_itself(tmp_path: Path) -> None:
    async with running(World(tmp_path, delay_s=SILENCE_S + 3.0)) as world:
        await asyncio.sleep(600)
        settled = len(world.dialled)
        assert settled <= 3
        await world.until(lambda: world.opened() == set(CUTS))
        await asyncio.sleep(600)
        assert world.uplink.connects <= 3


@pytest.mark.parametrize("broken_s", [0.5, 3.0, 4.9, 5.3, 7.9, 20.0, 77.7, 300.0])
@pytest.mark.parametrize("addresses", [1, 3])
def test_remote_use_is_back_within_five_seconds_of_a_dead_way_that_heals(
    tmp_path: Path, broken_s: float, addresses: int
) -> None:
    """No RST: both ends stay open and nothing arrives. The worst draw of every back-off; the other addresses lead
    nowhere all the time."""
    others = tuple(f"nowhere:{n}" for n in range(1, addresses))

    async def main() -> None:
        world = World(tmp_path, companions=(*others, HOST), dead=set(others), draw=0.999)
        async with running(world):
            await world.until(lambda: world.opened() == set(CUTS))
            _, device, companion = world.connected[-1]
            waiting = world.ask()  # traffic: without it nobody would notice
            device.freeze()
            companion.freeze()
            world.dead.add(HOST)
            await asyncio.sleep(broken_s)
            world.dead.discard(HOST)
            asyncio.get_running_loop().call_later(broken_s, device.thaw)  # TCP sends again: its timer has doubled
            asyncio.get_running_loop().call_later(broken_s, companion.thaw)
            await world.until(lambda: world.opened() == set(CUTS), within_s=5.0)
            waiting.cancel()

    run_in_virtual_time(main())


@pytest.mark.parametrize("down_s", [0.1, 1.0, 2.3, 33.3, 100.0])
def test_remote_use_is_back_within_five_seconds_of_a_restart(tmp_path: Path, down_s: float) -> None:
    async def main() -> None:
        async with running(World(tmp_path, draw=0.999)) as world:
            await world.until(lambda: world.opened() == set(CUTS))
            await asyncio.sleep(10)
            world.refused = {HOST}
            world.companion_end.kill()
            await asyncio.sleep(down_s)
            world.refused = set()
            await world.until(lambda: world.opened() == set(CUTS), within_s=5.0)

    run_in_virtual_time(main())


# -- dialling ---------------------------------------------------------------------------------------------------------


@story
async def test_of_two_companions_that_answer_one_is_used_and_the_other_hung_up_on(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=("one:1", "two:1", "three:1"), dead={"one:1"})) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        assert world.uplink.address == "two:1"
        world.companion_end.kill()
        await world.until(lambda: world.uplink.connects == 2)
        assert world.uplink.address == "three:1"
        await asyncio.sleep(5)
        used = world.companion_end
        assert [end.closed_because is None for _, _, end in world.connected] == [
            end is used for _, _, end in world.connected
        ]


@story
async def test_what_was_learned_of_one_companion_and_its_link_is_not_taken_for_anothers(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=("one:1", "two:1"))) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        await asyncio.sleep(30)  # pings
        world.planner.observe_cloud("m", Plan(placement=Placement.OFFLOAD, codec="raw"), 500.0, 10.0)
        assert world.planner.snapshot(world.now)["link"]["rtt_ms"] < 1.0
        world.delay_s, world.refused = 1.0, {"one:1"}
        world.companion_end.kill()
        await world.until(lambda: world.uplink.connects == 2)
        assert world.planner.snapshot(world.now)["link"] == {}
        await world.until(lambda: world.why() == "")
        chosen = world.planner.decide(
            "m", dataclasses.replace(TENSOR, mode=Placement.OFFLOAD), edge_queue_ms=0.0, now_s=world.now
        ).chosen
        assert chosen.stages_ms["cloud_queue"] == 0.0
        assert world.planner.snapshot(world.now)["link"]["rtt_ms"] > 500.0


@story
async def test_the_status_names_every_address_that_cannot_be_reached(tmp_path: Path) -> None:
    world = World(tmp_path, companions=("one:1", "two:1"), refused={"one:1", "two:1"})
    async with running(world):
        await world.until(lambda: world.uplink.state.startswith("cannot connect"))
        assert world.uplink.state == world.why() == "cannot connect: one:1 refused (REFUSED); two:1 refused (REFUSED)"


@story
async def test_a_certificate_that_is_refused_everywhere_is_not_shown_twice_a_second(tmp_path: Path) -> None:
    world = World(tmp_path, wrong={HOST})
    async with running(world):
        await asyncio.sleep(300)
        assert 3 <= len(world.dialled) <= 6
        assert "another CA" in world.why()


@story
async def test_o_wi_16_of_one_live_and_three_dead_companions_the_live_one_is_used_within_600_ms(tmp_path: Path) -> None:
    drops, resets, impostor, live = "drops:1", "resets:1", "impostor:1", "live:1"
    world = World(
        tmp_path,
        companions=(drops, resets, impostor, live),
        dead={drops},
        refused={resets},
        wrong={impostor},
        handshake_s=0.12,  # at 40 ms a round trip
        draw=0.999,
    )
    async with running(world):
        assert await world.until(lambda: world.uplink.state == "connected") <= 0.6
        assert world.uplink.address == live
        dialled = len(world.dialled)
        await asyncio.sleep(30)
        assert len(world.dialled) == dialled  # no need for the others
        assert {one.address: one.code for one in world.uplink.unreached} == {
            drops: "TIMEOUT",
            resets: "REFUSED",
            impostor: "SECURITY",
        }
        # Without the live one all are dialled, each at its own pace: a wrong certificate every minute.
        world.refused.add(live)
        world.companion_end.kill()
        await asyncio.sleep(600)
        at_s = {name: [at for at, address in world.dialled if address == name] for name in world.companions}
        assert min(later - earlier for earlier, later in itertools.pairwise(at_s[impostor])) >= 60.0
        assert 8 <= len(at_s[impostor]) <= 11
        for name in (resets, live):
            assert 600 / 1.65 <= len(at_s[name]) <= 600 / 1.6  # 1.5 s and the handshake
        assert "another CA (SECURITY)" in world.why()


@story
async def test_a_wrong_certificate_waits_out_its_minute_however_often_the_network_changes(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=("impostor:1", HOST), wrong={"impostor:1"}, refused={HOST})) as world:
        for _ in range(50):
            await asyncio.sleep(1.0)
            world.uplink.network_changed()
        await asyncio.sleep(5.0)
        assert [address for _, address in world.dialled].count("impostor:1") == 1
        assert [address for _, address in world.dialled].count(HOST) > 50


@story
async def test_with_another_certificate_the_minute_of_the_wrong_one_is_over_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, wrong={HOST})
    async with running(world):
        await asyncio.sleep(20.0)
        assert len(world.dialled) == 1
        world.identity_is = "renewed"
        await asyncio.sleep(1.5)
        assert len(world.dialled) == 2
        await asyncio.sleep(40.0)
        assert len(world.dialled) == 2  # that one is wrong, too, and waits its own minute
        world.wrong.clear()
        world.identity_is = "renewed again"
        await world.until(lambda: world.uplink.state == "connected", within_s=1.5)


@pytest.mark.parametrize("why", ["TIMEOUT", "REFUSED", "SECURITY"])
def test_o_wi_17_a_port_that_opens_after_a_minute_is_used_and_until_then_the_reason_is_shown(
    tmp_path: Path, why: str
) -> None:
    async def main() -> None:
        world = World(tmp_path, draw=0.999)
        closed = {"TIMEOUT": world.dead, "REFUSED": world.refused, "SECURITY": world.wrong}[why]
        closed.add(HOST)
        async with running(world):
            for _ in range(60):
                await asyncio.sleep(1.0)
                assert world.placement("m", CUTS[0]) == "local"
                assert world.now < 5.0 or f"({why})" in world.uplink.state == world.why()
            closed.clear()
            bound_s = 10.0 if why != "SECURITY" else 65.0
            assert await world.until(lambda: world.opened() == set(CUTS)) <= bound_s
            assert world.uplink.unreached == []

    run_in_virtual_time(main())


@story
async def test_o_wi_14_after_each_restart_with_other_models_the_view_is_the_companions(tmp_path: Path) -> None:
    """Twenty restarts, A, A and B, B in turn: what is not there any more is not asked for, within two seconds."""
    a, b = (
        model(tmp_path / name, name, digest=ModelDigest("sha256:" + name * 64))
        for name in ("a", "b")
        if not (tmp_path / name).mkdir()  # type: ignore[func-returns-value]  # None: it is there now
    )
    sets = itertools.cycle([{a.digest}, {a.digest, b.digest}, {b.digest}])
    held = next(sets)

    def holds(offer: ModelOffer, before: int) -> Sequence[Message]:
        if offer.digest not in held:
            return (Refused(code="BUDGET_EXCEEDED", message="no room", digest=offer.digest),)
        return takes(offer, before)

    def known_to_be_there() -> bool:
        return {one.digest for one in (a, b) if not world.why(one.name)} == held

    world = World(tmp_path, on_offer=holds, draw=0.999)
    async with running(world, a, b):
        for _ in range(20):
            await world.until(known_to_be_there, within_s=2.0)
            await asyncio.sleep(2.0)  # and stays so
            assert known_to_be_there()
            for one in (a, b):
                assert world.placement(one.name, CUTS[0]) == ("split" if one.digest in held else "local")
            world.companion_end.kill()
            held = next(sets)


@story
async def test_o_wi_13_one_task_owns_reconnection_and_the_daemon_ends_while_it_waits_for_data(tmp_path: Path) -> None:
    def reconnecting() -> list[str]:
        names = [task.get_name() for task in asyncio.all_tasks()]
        return sorted(name for name in names if name in ("uplink", "heartbeat", "receive") or "dial" in name)

    world = World(tmp_path)
    async with running(world):
        await world.until(lambda: world.why() == "")
        assert reconnecting() == ["heartbeat", "receive", "uplink"]
        waiting = world.ask()
        world.companion_end.freeze()
        world.dead.add(HOST)
        await asyncio.sleep(SILENCE_S + 2.0)
        # The heartbeat has one dial beside the silent connection, and nobody else has any.
        assert reconnecting() == ["dial beside", f"dial {HOST}", "heartbeat", "receive", "uplink"]
        began_s = world.now
        await world.uplink.close()
        assert world.now - began_s <= 5.0
        assert reconnecting() == []
        with pytest.raises(ConnectionLost):
            await waiting


@pytest.mark.parametrize("rtt_s", [0.04, 0.25, 0.6, 1.0, 1.3])
def test_a_link_of_long_round_trips_connects(tmp_path: Path, rtt_s: float) -> None:
    async def main() -> None:
        async with running(World(tmp_path, handshake_s=3 * rtt_s)) as world:
            await world.until(lambda: world.uplink.state == "connected", within_s=9.0)
            # And what was learned of it is kept.
            connected = len(world.dialled)
            world.companion_end.kill()
            await world.until(lambda: world.uplink.connects == 2)
            assert len(world.dialled) == connected + 1

    run_in_virtual_time(main())


@story
async def test_o_wi_02_where_the_companion_stops_reading_the_queue_is_bounded_and_new_requests_run_here(
    tmp_path: Path,
) -> None:
    """A thousand requests of a MiB, none of which gets through."""
    world = World(tmp_path, max_message_bytes=1 << 28)
    async with running(world):
        await world.until(lambda: world.opened() == set(CUTS))
        _, device, companion = world.connected[-1]
        device.freeze()
        refused = 0
        for _ in range(1000):
            try:
                world.ask(size=1 << 20)
            except Overloaded:
                refused += 1
            assert device.queued_bytes <= DEFAULT_LIMITS.queue_bytes + CONTROL_QUEUE_BYTES
        assert 992 <= refused < 1000
        # What is queued before it counts in the prediction of every further one.
        await asyncio.sleep(1.0)
        facts = RequestFacts(budget_ms=10_000.0, mode=Placement.OFFLOAD)
        queued = world.planner.decide("m", facts, edge_queue_ms=0.0, now_s=world.now).chosen.stages_ms["up"]
        for name in range(1, 1001):
            world.uplink.abandon(str(name))
        assert device.queued_bytes < 1 << 20
        free = world.planner.decide("m", facts, edge_queue_ms=0.0, now_s=world.now).chosen.stages_ms["up"]
        assert queued > 2 * free
        companion.kill()


# -- sent again -------------------------------------------------------------------------------------------------------


@story
async def test_o_wi_12_a_reply_to_an_attempt_that_counts_no_more_is_no_answer(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        asked = world.asked(attempts=3)
        await world.until(lambda: world.count(Infer) == 1)
        world.companion_end.kill()
        await world.until(lambda: world.count(Infer) == 2)
        assert "reset" in asked.lost.result()
        world.answer("1", attempt=1, tail_ms=111.0)
        world.answer("1", attempt=3, tail_ms=333.0)
        stale = Refused(code="UNKNOWN_MODEL", message="stale", request_id="1", attempt=1)
        world.companion_end.send(stale)
        await asyncio.sleep(1.0)
        assert not asked.reply.done()
        world.answer("1", attempt=2, tail_ms=222.0)
        assert (await asked.reply).reply.tail_ms == 222.0
        world.answer("1", attempt=2, tail_ms=222.0)  # twice
        await asyncio.sleep(1.0)
        assert world.uplink.inflight == 0


@story
async def test_what_a_connection_took_with_it_goes_to_another_companion(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=("one:1", "two:1"))) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        split, whole = world.asked(attempts=2, cut=CUTS[2]), world.asked(attempts=2)
        await world.until(lambda: world.count(Infer) == 2)
        world.refused.add("one:1")
        world.companion_end.kill()
        await world.until(lambda: world.count(Infer) == 4)
        assert world.uplink.address == "two:1"
        # Each as soon as what it needs is open there: the whole is before the cuts.
        assert [(one.request_id, one.attempt) for one in world.seen if isinstance(one, Infer)][2:] == [
            ("2", 2),
            ("1", 2),
        ]
        for name in ("1", "2"):
            world.uplink.abandon(name)
        assert world.uplink.inflight == 0
        assert not split.reply.done()
        assert not whole.reply.done()


@story
async def test_nothing_is_sent_again_that_would_come_too_late(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        too_little, here_before = world.asked(attempts=2, budget_ms=900.0, cloud_ms=1000.0), world.asked(attempts=2)
        here_before.here_at_s = world.now + 0.01
        in_time = world.asked(attempts=2, cloud_ms=1000.0)
        await world.until(lambda: world.count(Infer) == 3)
        world.companion_end.kill()
        await world.until(lambda: world.count(Infer) == 4)
        await asyncio.sleep(5.0)
        for asked in (too_little, here_before):
            with pytest.raises(ConnectionLost, match="too late"):
                await asked.reply
        assert world.count(Infer) == 4
        assert not in_time.reply.done()


@story
async def test_what_nobody_waits_for_any_more_is_not_sent_again(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        world.asked(attempts=2)
        await world.until(lambda: world.count(Infer) == 1)
        world.companion_end.kill()
        await world.until(lambda: world.uplink.state != "connected")
        assert world.uplink.inflight == 1
        world.uplink.abandon("1")
        await world.until(lambda: world.opened() == set(CUTS))
        assert (world.count(Infer), world.uplink.inflight) == (1, 0)


# -- a network that changes -------------------------------------------------------------------------------------------


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection is one from 10.1.0.2 to 192.0.2.1."""
    monkeypatch.setattr(MemoryChannel, "ends", property(lambda channel: ("10.1.0.2", "192.0.2.1")))


def changes(world: World, leads_from: str | None) -> None:
    """The kernel says that something about the network is different."""
    world.uplink._source_towards = lambda host: leads_from
    world.uplink.network_changed()


def test_a_change_of_the_network_ends_every_pause_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(World(tmp_path, refused={HOST}, draw=0.999)) as world:
            await asyncio.sleep(60)
            await world.until(lambda: world.uplink.unreached[0].next_try_s > 1.4)
            world.refused.clear()
            changes(world, "10.2.0.2")
            assert await world.until(lambda: world.uplink.state == "connected") <= 0.02

    run_in_virtual_time(main())


def test_a_dial_that_hangs_on_the_old_network_holds_up_none_on_the_new_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(World(tmp_path, dead={HOST}, draw=0.999)) as world:
            await asyncio.sleep(0.1)  # the first SYN is lost
            world.dead.clear()
            changes(world, "10.2.0.2")
            assert await world.until(lambda: world.uplink.state == "connected") <= 0.02
            await asyncio.sleep(10)
            assert [end.closed_because for _, end, _ in world.connected].count(None) == 1

    run_in_virtual_time(main())


def test_a_device_whose_address_has_changed_dials_beside_at_once_and_changes_over(
    tmp_path: Path, at_home: None
) -> None:
    async def main() -> None:
        hurried: list[float] = []
        async with running(World(tmp_path)) as world:
            world.uplink.on_silence = lambda: hurried.append(world.now)
            await world.until(lambda: world.opened() == set(CUTS))
            world.ask()
            _, old, there = world.connected[-1]
            old.freeze()
            there.freeze()  # nothing comes through under the old address
            changed_at_s = world.now
            changes(world, "10.2.0.2")
            await world.until(lambda: world.opened() == set(CUTS) and world.uplink.connects == 2, within_s=0.1)
            assert hurried == pytest.approx([changed_at_s], abs=0.001)  # what waited begins on the device at once

    run_in_virtual_time(main())


def test_a_change_that_does_not_concern_the_way_to_the_companion_leaves_the_connection(
    tmp_path: Path, at_home: None
) -> None:
    async def main() -> None:
        async with running(World(tmp_path)) as world:
            await world.until(lambda: world.opened() == set(CUTS))
            changes(world, "10.1.0.2")
            changes(world, None)  # out of reach; what there is may still heal
            await asyncio.sleep(10)
            assert len(world.dialled) == 1
            changes(world, "10.1.0.2")  # back again, and TCP's timer has grown meanwhile
            await world.until(lambda: world.uplink.connects == 2, within_s=0.1)

    run_in_virtual_time(main())


# -- requests ---------------------------------------------------------------------------------------------------------


@story
async def test_a_request_too_large_for_the_companion_is_a_failed_road_and_no_mistake_of_the_callers(
    tmp_path: Path,
) -> None:
    async with running(World(tmp_path, max_message_bytes=1 << 17)) as world:
        await world.until(lambda: world.why() == "")
        with pytest.raises(CompanionRefused, match="the peer takes at most 131072") as caught:
            world.ask(size=1 << 17)
        assert caught.value.code == "TOO_LARGE"
        assert world.uplink.inflight == 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("of", ["queue_ms", "decode_ms", "tail_ms", "encode_ms", "cloud_ms"])
def test_a_reply_whose_times_are_none_is_no_answer_and_teaches_nothing(tmp_path: Path, of: str, wrong: float) -> None:
    async def main() -> None:
        async with running(World(tmp_path)) as world:
            await world.until(lambda: world.opened() == set(CUTS))
            before = world.planner.snapshot(world.now)
            asked = world.ask()
            await world.until(lambda: world.count(Infer) == 1)
            world.answer("1", **{of: wrong})
            with pytest.raises(RemoteProtocolError, match="not usable: it says that it took"):
                await asked
            after = world.planner.snapshot(world.now)
            assert after["models"] == before["models"]
            assert after["link"]["up_mbit_s"] == before["link"]["up_mbit_s"]

    run_in_virtual_time(main())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_a_companion_that_needs_no_time_or_all_of_it_shares_nothing(tmp_path: Path, wrong: float) -> None:
    def wrong_whole(offer: ModelOffer, before: int) -> Sequence[Message]:
        return (msgspec.structs.replace(ready(offer), whole_ms=wrong),)

    def wrong_tail(wanted: SegmentOpen, before: int) -> Sequence[Message]:
        golden = joined(GOLDEN)
        return (SegmentReady(digest=wanted.digest, cut=wanted.cut, golden=golden, tail_ms=wrong),)

    async def main() -> None:
        async with running(World(tmp_path / "a", on_offer=wrong_whole)) as world:
            await world.until(lambda: "says it needs" in world.why())
        async with running(World(tmp_path / "b", on_cut=wrong_tail)) as world:
            await world.until(lambda: world.why() == "")
            await asyncio.sleep(60)
            assert world.opened() == set()

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    run_in_virtual_time(main())


@story
async def test_requests_wait_behind_those_before_them_and_not_behind_the_files_of_a_model(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.why() == "")
        ahead = world.planner._ahead_bytes
        _, device, _ = world.connected[-1]
        device.freeze()
        device.send(ModelChunk(digest=DIGEST, file="f", offset=0), [bytes(1 << 19)], priority=Priority.BULK)
        assert ahead() == 0
        world.ask(size=30_000)
        assert ahead() == 30_000
        world.ask(size=10_000)
        assert ahead() == 40_000
        world.uplink.abandon("1")
        assert ahead() == 10_000
        device.thaw()
        await asyncio.sleep(0.01)
        assert ahead() == 0


@story
async def test_the_replies_that_requests_under_way_will_bring_are_not_promised_to_others(tmp_path: Path) -> None:
    """Three requests of 100 bytes each and replies of `answered` bytes, with just enough left for two of them."""
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        first = world.ask()
        world.answer("1")
        answered = sum(map(len, encode(GOLDEN, "raw")))
        await first
        world.metered = Metered(left_bytes=100 + 2 * answered)
        world.ask()
        world.ask()
        with pytest.raises(Overloaded, match=f"would move {100 + 3 * answered} bytes"):
            world.ask()
        world.uplink.abandon("2")
        world.ask()


@story
async def test_lateness_is_not_put_down_to_the_link_where_the_companion_was_expected_to_compute(
    tmp_path: Path,
) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.why() == "")
        await asyncio.sleep(1.0)
        before = world.planner.snapshot(world.now)["link"]["rtt_ms"]
        world.ask(cloud_ms=1_000.0)
        await asyncio.sleep(1.0)
        world.uplink.abandon("1")
        assert world.planner.snapshot(world.now)["link"]["rtt_ms"] == pytest.approx(before, abs=0.1)
        world.ask(cloud_ms=0.0)
        await asyncio.sleep(1.0)
        world.uplink.abandon("2")
        assert world.planner.snapshot(world.now)["link"]["rtt_ms"] > before + 0.1


@story
async def test_without_companions_nothing_is_dialled_and_the_reason_is_shown(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=())) as world:
        await asyncio.sleep(10)
        assert world.dialled == []
        assert world.why() == world.uplink.state == "no companion configured"


@story
async def test_a_refusal_that_nobody_waits_for_any_more_is_no_line_in_the_log(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.why() == "")
        reply = world.ask()
        await world.until(lambda: world.count(Infer) == 1)
        world.companion_end.send(Refused(code="DEADLINE_EXCEEDED", message="too late", request_id="1", attempt=1))
        await world.until(reply.done)
        del reply
        gc.collect()
    assert said == []
