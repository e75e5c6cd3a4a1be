"""Sessions over channels in memory: what a device brings, opens and asks, and everything that must be refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import itertools
import threading
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

import split.wire
from cloud.session import MAX_NAME
from split.codec.golden import golden_inputs, sample
from split.codec.image import ImageSpec, prepare_image
from split.codec.payload import decode
from split.errors import ConnectionLost
from split.graph.card import digest_of_files
from split.graph.chunks import list_chunks
from split.tensor import relative_difference
from split.wire.limits import Limits
from split.wire.messages import (
    Cancel,
    Goodbye,
    ModelChunk,
    ModelNeed,
    ModelOffer,
    ModelReady,
    Pace,
    Priority,
    Refused,
    Reply,
    SegmentOpen,
    SegmentReady,
)

CHAIN_AGAIN = """
<ir_version: 8, opset_import: ["" : 17]>
another (float[N, 4] x, float[4] bias) => (float[N, 4] y)
{
    a = Relu (x)
    b = Exp (a)
    c = Sub (b, bias)
    y = Mul (c, a)
}
"""


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert relative_difference(found[name], wanted) <= 1e-5, name


# -- the whole way ----------------------------------------------------------------------------------------------------


async def test_a_model_is_brought_once_and_answers_as_onnxruntime_does(house, chain, feeds):
    device = house.connect()
    ready = await device.bring(chain)
    assert ready.digest == chain.digest
    assert ready.whole_ms > 0
    device.channel.send(*chain.infer(feeds))
    reply, outputs = await device.reply()
    assert isinstance(reply, Reply)
    assert (reply.request_id, reply.attempt, reply.cut, reply.codec) == ("1", 1, "offload", "raw")
    assert reply.cloud_ms >= reply.tail_ms > 0
    assert_same(outputs, chain.whole(feeds))
    assert house.connect("camera-2").channel.peer.role == "companion"
    assert await house.connect("camera-3").ask(chain.offer) == ModelNeed(digest=chain.digest, missing=())


async def test_the_golden_answer_is_that_of_the_built_in_inputs(house, chain):
    ready = await house.connect().bring(chain)
    assert_same(decode(ready.golden, max_bytes=1 << 20), sample(chain.whole(golden_inputs(chain.card.inputs, {}))))


async def test_every_candidate_cut_opens_and_its_tail_finishes_what_the_head_began(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    assert chain.card.cuts
    expected = chain.whole(feeds)
    for cut in chain.card.cuts:
        ready = await device.open(chain, cut)
        assert ready.cut == cut.id
        made = chain.head(cut, feeds)
        boundary = chain.crossing(cut, feeds)
        device.channel.send(*chain.infer(boundary, cut.id))
        reply, outputs = await device.reply()
        assert reply.cut == cut.id
        assert outputs.keys() == set(cut.tail_outputs)
        assert_same(made | outputs, made | expected)
    assert "part" not in house.workbench.jobs  # the candidates were made together


async def test_a_cut_beyond_the_candidates_is_made_when_asked_for(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    cut = chain.card.cuts[0]
    folder = next((house.companion.store._folder.parent.parent / "cache" / "models").iterdir())
    card = msgspec.structs.replace(chain.card, cuts=(), made={})
    (folder / "card.json").write_bytes(msgspec.json.encode(card))
    (folder / f"{cut.id}.tail.onnx").unlink()
    other = house.connect("camera-2")
    await other.bring(chain)
    await other.open(chain, cut)
    assert house.workbench.jobs.count("part") == 1
    await device.open(chain, cut)
    assert house.workbench.jobs.count("part") == 1


async def test_only_the_outputs_wanted_come_back_and_those_of_the_head_are_left_to_the_device(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    device.channel.send(*chain.infer(feeds, outputs=("early",)))
    _, outputs = await device.reply()
    assert_same(outputs, {"early": -np.maximum(feeds["x"], 0)})
    cut = next(cut for cut in chain.every_cut() if cut.head_outputs == ("y",))
    await device.open(chain, cut)
    boundary = chain.crossing(cut, feeds)
    device.channel.send(*chain.infer(boundary, cut.id, outputs=("early", "y")))
    _, outputs = await device.reply()
    assert_same(outputs, {"early": -np.maximum(feeds["x"], 0)})
    device.channel.send(*chain.infer(feeds, outputs=("why",)))
    assert (await device.next()).code == "INVALID_REQUEST"


async def test_an_encoded_picture_is_prepared_here_as_the_device_would(house, make_model, photo):
    model = make_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        pixels (float[N, 3, 8, 8] image) => (float[N, 3, 8, 8] negative) { negative = Neg (image) }"""
    )
    data = photo("rocket.jpg").read_bytes()
    rule = {"kind": "image", "resize": 10, "crop": 8, "mean": [1.0, 2.0, 3.0], "std": [4.0, 5.0, 6.0], "layout": "NCHW"}
    device = house.connect()
    await device.bring(model)
    picture = {"image": np.array([data], dtype=object)}
    device.channel.send(*model.infer(picture, codec="encoded", encoded={"image": rule}))
    reply, outputs = await device.reply()
    assert reply.codec == "encoded"
    assert reply.decode_ms > 0
    spec = ImageSpec(resize=10, crop=8, mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0))
    assert_same(outputs, {"negative": -prepare_image(data, spec)})
    for broken in ({**rule, "crop": 99}, {**rule, "resize": "big"}, {"kind": "sound"}):
        device.channel.send(*model.infer(picture, codec="encoded", encoded={"image": broken}))
        assert (await device.next()).code == "INVALID_REQUEST"
    garbage = {"image": np.array([b"no picture"], dtype=object)}
    device.channel.send(*model.infer(garbage, codec="encoded", encoded={"image": rule}))
    assert (await device.next()).code == "INVALID_REQUEST"


# -- models on their way --------------------------------------------------------------------------------------------


async def test_a_half_sent_model_is_resumed_by_a_later_session_where_it_stopped(house, chain, feeds):
    data = chain.path.read_bytes()
    first = house.connect()
    assert await first.ask(chain.offer) == ModelNeed(digest=chain.digest, missing=(("model.onnx", 0),))
    first.channel.send(ModelChunk(digest=chain.digest, file="model.onnx", offset=0), [data[:100]])
    first.channel.send(ModelChunk(digest=chain.digest, file="model.onnx", offset=100), [data[100:150]])
    await first.channel.close("the device restarts")
    await first.task
    second = house.connect()
    assert await second.ask(chain.offer) == ModelNeed(digest=chain.digest, missing=(("model.onnx", 150),))
    second.channel.send(ModelChunk(digest=chain.digest, file="model.onnx", offset=150, last=True), [data[150:]])
    assert isinstance(await second.next(), ModelReady)


async def test_two_devices_may_send_one_model_at_once(house, chain, feeds):
    data = chain.path.read_bytes()
    one, two = house.connect("camera-1"), house.connect("camera-2")
    await one.ask(chain.offer)
    await two.ask(chain.offer)
    for start in range(0, len(data), 64):
        chunk = ModelChunk(digest=chain.digest, file="model.onnx", offset=start, last=start + 64 >= len(data))
        for device in (one, two):
            device.channel.send(chunk, [data[start : start + 64]])
    for device in (one, two):
        assert isinstance(await device.next(), ModelReady)
        device.channel.send(*chain.infer(feeds))
        _, outputs = await device.reply()
        assert_same(outputs, chain.whole(feeds))
    assert house.workbench.jobs == ["probe", "prepare", f"rehearse {1 + len(chain.card.cuts)}"]


async def test_a_model_offered_again_stays_open_and_is_answered_as_before(house, chain, feeds):
    device = house.connect()
    ready = await device.bring(chain)
    cut = chain.card.cuts[0]
    await device.open(chain, cut)
    assert await device.ask(chain.offer) == ModelNeed(digest=chain.digest, missing=())
    assert await device.next() == ready
    device.channel.send(*chain.infer(chain.crossing(cut, feeds), cut.id))
    reply, _ = await device.reply()
    assert isinstance(reply, Reply)
    assert house.workbench.jobs == ["probe", "prepare", f"rehearse {1 + len(chain.card.cuts)}"]


async def test_a_model_offered_again_with_other_golden_inputs_is_compared_anew_and_stays_open(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    cut = chain.card.cuts[0]
    await device.open(chain, cut)
    assert await device.ask(msgspec.structs.replace(chain.offer, dims={"N": 5})) == ModelNeed(
        digest=chain.digest, missing=()
    )
    ready = await device.next()
    assert_same(
        decode(ready.golden, max_bytes=1 << 20), sample(chain.whole(golden_inputs(chain.card.inputs, {"N": 5})))
    )
    device.channel.send(*chain.infer(chain.crossing(cut, feeds), cut.id))
    reply, _ = await device.reply()
    assert isinstance(reply, Reply)


async def test_a_model_offered_twice_while_it_is_made_ready_is_made_once_and_answers_both(house, chain, feeds):
    device = house.connect()
    await device.ask(chain.offer)
    data = chain.path.read_bytes()
    device.channel.send(ModelChunk(digest=chain.digest, file="model.onnx", offset=0, last=True), [data])
    assert await device.ask(chain.offer) == ModelNeed(digest=chain.digest, missing=())
    assert isinstance(await device.next(), ModelReady)
    device.channel.send(*chain.infer(feeds))
    _, outputs = await device.reply()
    assert_same(outputs, chain.whole(feeds))


async def test_bytes_that_do_not_have_the_offered_hash_are_refused_and_removed(house, chain):
    data = bytearray(chain.path.read_bytes())
    data[50] ^= 1
    device = house.connect()
    await device.ask(chain.offer)
    device.channel.send(ModelChunk(digest=chain.digest, file="model.onnx", offset=0, last=True), [data])
    refused = await device.next()
    assert (refused.code, refused.digest) == ("DIGEST_MISMATCH", chain.digest)
    assert house.companion.store.used_bytes() == 0
    await device.bring(chain)


async def test_files_that_are_not_the_digests_are_refused_before_a_byte_is_sent(house, chain):
    device = house.connect()
    wrong = ModelOffer(digest="sha256:" + "0" * 64, files=chain.card.files)
    assert (await device.ask(wrong)).code == "DIGEST_MISMATCH"
    assert house.companion.store.used_bytes() == 0


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "a\0b", "x" * 300])
async def test_only_plain_file_names_are_taken(house, chain, name):
    offer = ModelOffer(digest=chain.digest, files=((name, *chain.card.files[0][1:]),))
    device = house.connect()
    assert (await device.ask(offer)).code == "INVALID_REQUEST"
    assert isinstance(await device.ask(chain.offer), ModelNeed)


@pytest.mark.parametrize("digest", ["sha256:", "sha256:../../etc", "sha512:" + "0" * 64, "sha256:" + "G" * 64])
async def test_a_digest_that_is_none_is_refused(house, chain, digest):
    assert (await house.connect().ask(ModelOffer(digest=digest, files=chain.card.files))).code == "INVALID_REQUEST"


async def test_a_model_over_the_budget_is_refused_before_a_byte_is_sent_and_the_first_keeps_serving(
    make_house, chain, feeds
):
    house = make_house(budget_bytes=chain.path.stat().st_size + 100)
    device = house.connect()
    await device.bring(chain)
    sha = "1" * 64
    refused = await device.ask(ModelOffer(digest=f"sha256:{sha}", files=(("big.onnx", 101, sha),)))
    assert (refused.code, refused.digest) == ("BUDGET_EXCEEDED", f"sha256:{sha}")
    device.channel.send(*chain.infer(feeds))
    _, outputs = await device.reply()
    assert_same(outputs, chain.whole(feeds))


async def test_o_wi_09_a_model_over_the_budget_is_refused_before_any_byte_and_the_first_keeps_serving(
    make_house, make_model, chain, feeds
):
    """A companion asked to hold more than it may: with 256 MiB for models, and after one of 200 MiB a second."""
    house = make_house(budget_bytes=int(chain.path.stat().st_size * 256 / 200))
    first, second = house.connect("camera-1"), house.connect("camera-2")
    await first.bring(chain)
    other, held_bytes = make_model(CHAIN_AGAIN), house.companion.store.used_bytes()
    assert other.path.stat().st_size > chain.path.stat().st_size * 56 / 200
    refused = await second.ask(other.offer)  # the very first answer: nothing was asked for
    assert isinstance(refused, Refused)
    assert (refused.code, refused.digest) == ("BUDGET_EXCEEDED", other.digest)
    assert "over the companion's models_bytes" in refused.message
    assert house.companion.store.used_bytes() == held_bytes
    first.channel.send(*chain.infer(feeds))
    _, outputs = await first.reply()
    assert_same(outputs, chain.whole(feeds))


async def test_only_what_another_model_does_not_have_is_asked_for(house, make_model, chain):
    await house.connect("camera-1").bring_chunks(chain)
    again = make_model(CHAIN_AGAIN)
    chunks = list_chunks([again.path], [again.path.stat().st_size])
    device = house.connect("camera-2")
    assert await device.ask(again.offer) == ModelNeed(digest=again.digest, missing=(("model.onnx", 0),))
    need = await device.ask(msgspec.structs.replace(again.offer, chunks=chunks))
    size = again.path.stat().st_size
    assert need == ModelNeed(digest=again.digest, missing=(("model.onnx", 0),), lengths=(size,))  # one small chunk
    twin = chain.path.read_bytes()
    same = hashlib.sha256(twin).hexdigest()
    beside = (("odd.onnx", 1, hashlib.sha256(b"x").hexdigest()), ("weights.bin", len(twin), same))
    digest = digest_of_files(beside)
    listed = (1).to_bytes(4, "little") + hashlib.sha256(b"x").digest()
    listed += len(twin).to_bytes(4, "little") + hashlib.sha256(twin).digest()
    offer = ModelOffer(digest=digest, files=beside, chunks=listed)
    assert await device.ask(offer) == ModelNeed(digest=digest, missing=(("odd.onnx", 0),), lengths=(1,))


async def test_a_list_of_chunks_that_makes_no_sense_is_a_typed_refusal(house, chain):
    device = house.connect()
    refused = await device.ask(msgspec.structs.replace(chain.offer, chunks=b"short"))
    assert (type(refused), refused.code, refused.digest) == (Refused, "INVALID_REQUEST", chain.digest)
    assert isinstance(await device.bring(chain), ModelReady)


async def test_a_model_that_nobody_uses_makes_room(make_house, chain):
    house = make_house(budget_bytes=chain.path.stat().st_size + 500)
    device = house.connect()
    await device.bring(chain)
    await device.channel.close("done")
    await device.task
    sha = "1" * 64
    other = house.connect("camera-2")
    answer = await other.ask(ModelOffer(digest=f"sha256:{sha}", files=(("big.onnx", 600, sha),)))
    assert answer == ModelNeed(digest=f"sha256:{sha}", missing=(("big.onnx", 0),))
    assert house.companion.store.held() == (chain.digest,)  # an offer alone drives out nothing
    other.channel.send(ModelChunk(digest=f"sha256:{sha}", file="big.onnx", offset=0), [bytes(100)])
    assert isinstance(await other.ask(ModelOffer(digest=f"sha256:{sha}", files=(("big.onnx", 600, sha),))), ModelNeed)
    assert house.companion.store.held() == ()


async def test_what_was_made_of_a_model_goes_with_it(make_house, make_model, chain, tmp_path):
    other = make_model("""<ir_version: 8, opset_import: ["" : 17]> m (float[4] x) => (float[4] y) { y = Neg (x) }""")
    house = make_house(budget_bytes=chain.path.stat().st_size + 10)
    device = house.connect()
    await device.bring(chain)
    await device.channel.close("done")
    await device.task
    made = tmp_path / "cache" / "models"
    assert [folder.name for folder in made.iterdir()] == [chain.digest.removeprefix("sha256:")[:16]]
    await house.connect().bring(other)
    assert [folder.name for folder in made.iterdir()] == [other.digest.removeprefix("sha256:")[:16]]


async def test_a_full_disk_refuses_the_model_and_the_session_lives(house, chain, monkeypatch):
    def full(*_: object, **__: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    device = house.connect()
    await device.ask(chain.offer)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        refused = await device.ask(ModelChunk(digest=chain.digest, file="model.onnx", offset=0), [b"1234"])
    assert refused.code == "DISK_FULL"
    await device.bring(chain)


async def test_chunks_that_leave_a_gap_run_over_or_were_never_offered_are_refused(house, chain):
    device = house.connect()
    chunk = ModelChunk(digest=chain.digest, file="model.onnx", offset=0)
    assert (await device.ask(chunk, [b"x"])).code == "INVALID_REQUEST"
    size = chain.path.stat().st_size
    for file, offset, data in (
        ("model.onnx", 10, b"gap"),
        ("model.onnx", -1, b"x"),
        ("model.onnx", 0, bytes(size + 1)),
        ("other.onnx", 0, b"x"),
    ):
        await device.ask(chain.offer)
        refused = await device.ask(ModelChunk(digest=chain.digest, file=file, offset=offset), [data])
        assert refused.code == "INVALID_REQUEST", (file, offset)
    await device.bring(chain)


async def test_a_model_the_runtime_has_no_operator_for_is_refused_and_the_next_one_works(house, chain, feeds):
    text = """<ir_version: 8, opset_import: ["" : 17, "no.such" : 1]>
    strange (float[4] x) => (float[4] y) { y = no.such.Thing (x) }"""
    data = onnx.parser.parse_model(text).SerializeToString()
    sha = hashlib.sha256(data).hexdigest()
    device = house.connect()
    await device.ask(ModelOffer(digest=f"sha256:{sha}", files=(("model.onnx", len(data), sha),)))
    refused = await device.ask(ModelChunk(digest=f"sha256:{sha}", file="model.onnx", offset=0, last=True), [data])
    assert refused.code == "UNSUPPORTED_OP"
    await device.bring(chain)
    device.channel.send(*chain.infer(feeds))
    _, outputs = await device.reply()
    assert_same(outputs, chain.whole(feeds))


async def test_bytes_that_are_no_model_are_refused(house, chain):
    data = b"no model at all"
    sha = hashlib.sha256(data).hexdigest()
    device = house.connect()
    await device.ask(ModelOffer(digest=f"sha256:{sha}", files=(("model.onnx", len(data), sha),)))
    refused = await device.ask(ModelChunk(digest=f"sha256:{sha}", file="model.onnx", offset=0, last=True), [data])
    assert refused.code == "INVALID_MODEL"


# -- halves that do not belong together -----------------------------------------------------------------------------


async def test_what_was_not_opened_in_this_session_is_never_answered(house, chain, feeds):
    opened, device = house.connect("camera-1"), house.connect("camera-2")
    await opened.bring(chain)
    cut = chain.card.cuts[0]
    await opened.open(chain, cut)
    device.channel.send(*chain.infer(feeds))
    assert (await device.next()).code == "PLAN_MISMATCH"
    await device.bring(chain)
    device.channel.send(*chain.infer(feeds, cut.id))
    refused = await device.next()
    assert (refused.code, refused.request_id, refused.attempt, refused.cut) == ("PLAN_MISMATCH", "1", 1, cut.id)


@pytest.mark.parametrize(
    "fields",
    [
        {"digest": "sha256:" + "0" * 64},
        {"cut": "0123456789ab"},
        {"codec": "klt9"},
        {"output_codec": "encoded"},
        {"codec": "encoded"},
        {"encoded": {"x": {}}},
    ],
)
async def test_a_frame_that_does_not_match_what_is_open_is_refused(house, chain, feeds, fields):
    device = house.connect()
    await device.bring(chain)
    message, payload = chain.infer(feeds)
    device.channel.send(msgspec.structs.replace(message, **fields), payload)
    assert (await device.next()).code == "PLAN_MISMATCH"


async def test_a_cut_whose_bitmap_means_other_nodes_is_refused(house, chain):
    device = house.connect()
    await device.bring(chain)
    one, two, *_ = chain.card.cuts
    for cut, bitmap in (
        (one.id, two.node_bitmap),
        ("0123456789ab", one.node_bitmap),
        ("../../../etc", one.node_bitmap),
        (chain.every_cut()[-1].id, "ffff"),
    ):
        refused = await device.ask(SegmentOpen(digest=chain.digest, cut=cut, node_bitmap=bitmap))
        assert (refused.code, refused.cut) == ("PLAN_MISMATCH", cut)
    assert isinstance(await device.open(chain, one), SegmentReady)


async def test_the_tail_of_one_cut_does_not_take_the_boundary_of_another(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    cuts = itertools.permutations(chain.every_cut(), 2)
    one, two = next((a, b) for a, b in cuts if a.boundary != b.boundary)
    await device.open(chain, one)
    await device.open(chain, two)
    boundary = chain.crossing(one, feeds)
    device.channel.send(*chain.infer(boundary, two.id))
    assert (await device.next()).code == "PLAN_MISMATCH"


# -- bad requests ---------------------------------------------------------------------------------------------------


async def test_tensors_of_the_wrong_name_type_or_rank_are_refused_by_name(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    for wrong, word in (
        ({"x": feeds["x"]}, "bias"),
        (feeds | {"z": feeds["x"]}, "z"),
        (feeds | {"x": feeds["x"].astype(np.float64)}, "FP32"),
        (feeds | {"x": feeds["x"][0]}, "2 dims"),
        (feeds | {"x": np.zeros((2, 5), np.float32)}, "x"),
    ):
        device.channel.send(*chain.infer(wrong))
        refused = await device.next()
        assert refused.code == "INVALID_REQUEST"
        assert word in refused.message


async def test_a_payload_that_is_none_is_refused_and_the_session_lives(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    message, payload = chain.infer(feeds)
    whole = b"".join(bytes(part) for part in payload)
    for damaged in (b"", b"garbage", whole[:-1], whole + b"x", bytes(len(whole))):
        device.channel.send(message, [damaged])
        assert (await device.next()).code == "CODEC_ERROR"
    device.channel.send(message, payload)
    assert isinstance(await device.next(), Reply)


@pytest.mark.parametrize("budget_ms", [0.0, -5.0])
async def test_work_whose_budget_is_over_is_not_started(house, chain, feeds, budget_ms):
    device = house.connect()
    await device.bring(chain)
    device.channel.send(*chain.infer(feeds, budget_ms=budget_ms))
    assert (await device.next()).code == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("budget_ms", [float("nan"), float("inf")])
async def test_a_budget_that_is_no_number_is_refused(house, chain, feeds, budget_ms):
    device = house.connect()
    await device.bring(chain)
    device.channel.send(*chain.infer(feeds, budget_ms=budget_ms))
    assert (await device.next()).code == "INVALID_REQUEST"


async def test_more_bytes_than_the_bound_are_refused_while_others_are_in_flight(make_house, chain, feeds):
    house = make_house(inflight_bytes=1000)
    device = house.connect()
    await device.bring(chain)
    release = hold(house)
    device.channel.send(*chain.infer(feeds, request_id="a"))
    many = feeds | {"x": np.zeros((60, 4), np.float32)}
    device.channel.send(*chain.infer(many, request_id="b"))
    refused = await device.next()
    assert (refused.code, refused.request_id) == ("OVERLOADED", "b")
    release.set()
    reply = await device.next()
    assert (type(reply), reply.request_id) == (Reply, "a")
    await device.session.drained()
    assert house.companion.admission.inflight_bytes == 0


# -- many at once, and ends -----------------------------------------------------------------------------------------


def hold(house):
    """Keep the companion's worker busy until the returned event is set."""
    release, segments = threading.Event(), house.companion.executor._segments
    get = segments.get

    def blocked(path):
        release.wait(30)
        return get(path)

    segments.get = blocked
    return release


async def seen(device, model):
    """Wait until the session has taken in all that was sent: what is refused at once is refused in order."""
    device.channel.send(*model.infer({}, request_id="barrier", outputs=("none",)))
    assert (await device.next()).request_id == "barrier"


async def test_many_requests_of_two_devices_each_get_their_own_answer(house, chain):
    devices = [house.connect("camera-1"), house.connect("camera-2")]
    for device in devices:
        await device.bring(chain)
    expected = {}
    generator = np.random.default_rng(3)
    for number in range(40):
        feeds = {
            "x": generator.standard_normal((2, 4)).astype(np.float32),
            "bias": generator.standard_normal(4).astype(np.float32),
        }
        request_id = f"{number}"
        expected[request_id] = chain.whole(feeds)
        devices[number % 2].channel.send(*chain.infer(feeds, request_id=request_id))
    for device in devices:
        for _ in range(20):
            reply, outputs = await device.reply()
            assert isinstance(reply, Reply)
            assert_same(outputs, expected.pop(reply.request_id))
        await device.session.drained()
    assert not expected
    assert house.companion.admission.inflight_requests == 0


async def test_a_cancelled_request_is_dropped_and_not_answered(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    release = hold(house)
    for request_id in ("running", "waiting", "kept"):
        device.channel.send(*chain.infer(feeds, request_id=request_id))
    device.channel.send(Cancel(request_id="waiting", attempt=1))
    device.channel.send(Cancel(request_id="never seen", attempt=1))
    await seen(device, chain)
    release.set()
    answered = {(await device.next()).request_id, (await device.next()).request_id}
    assert answered == {"running", "kept"}
    await device.session.drained()
    assert house.companion.admission.inflight_requests == 0


async def test_a_cancel_that_overtakes_its_request_is_remembered_until_the_request_comes(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    device.channel.send(Cancel(request_id="late", attempt=1))
    for attempt in (1, 2):
        device.channel.send(*chain.infer(feeds, request_id="late", attempt=attempt))
    device.channel.send(*chain.infer(feeds, request_id="other"))
    answers = [await device.next() for _ in range(2)]
    assert {(answer.request_id, answer.attempt) for answer in answers} == {("late", 2), ("other", 1)}
    await device.session.drained()
    assert house.companion.admission.inflight_requests == 0


async def test_of_cancels_whose_request_never_comes_the_last_256_are_remembered(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    for number in range(300):
        device.channel.send(Cancel(request_id=f"{number}", attempt=1))
    for request_id in ("44", "43", "299"):
        device.channel.send(*chain.infer(feeds, request_id=request_id))
    assert (await device.next()).request_id == "43", "257th from the end"
    assert len(device.session._requests._cancelled) == 254


async def test_the_same_attempt_twice_gets_one_answer_and_a_new_attempt_its_own(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    release = hold(house)
    for attempt in (1, 1, 2):
        device.channel.send(*chain.infer(feeds, attempt=attempt))
    release.set()
    assert {(await device.next()).attempt, (await device.next()).attempt} == {1, 2}
    device.channel.send(*chain.infer(feeds, request_id="last"))
    assert (await device.next()).request_id == "last"


async def test_a_session_that_dies_mid_request_leaves_nothing(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    release = hold(house)
    for number in range(5):
        device.channel.send(*chain.infer(feeds, request_id=f"{number}"))
    device.channel.send(SegmentOpen(digest=chain.digest, cut=chain.card.cuts[0].id, node_bitmap="00"))
    device.channel.kill()
    async with asyncio.timeout(30):
        await device.task
    release.set()
    companion = house.companion
    assert (companion.admission.inflight_requests, companion.admission.inflight_bytes) == (0, 0)
    assert companion.executor.wait_ms("camera-1") < 1000
    assert not companion.store._users
    again = house.connect()
    await again.bring(chain)
    again.channel.send(*chain.infer(feeds))
    assert isinstance(await again.next(), Reply)


async def test_a_message_no_device_sends_ends_the_session_and_no_other(house, chain, feeds):
    bad, good = house.connect("camera-1"), house.connect("camera-2")
    await good.bring(chain)
    bad.channel.send(ModelNeed(digest=chain.digest, missing=()))
    async with asyncio.timeout(30):
        await bad.task
    assert "ModelNeed" in bad.session._channel.closed_because
    nameless = house.connect("camera-3")
    nameless.channel.send(*chain.infer(feeds, request_id=""))
    async with asyncio.timeout(30):
        await nameless.task
    good.channel.send(*chain.infer(feeds))
    assert isinstance(await good.next(), Reply)


@pytest.mark.parametrize("name", ["", "x" * 129, "x" * 500_000])
@pytest.mark.parametrize("field", ["request_id", "digest", "cut"])
async def test_a_name_too_long_to_be_sent_back_ends_the_session(house, chain, feeds, field, name):
    device = house.connect()
    device.channel.send(*chain.infer(feeds, **{field: name}))
    async with asyncio.timeout(30):
        await device.task
    assert f"one with {len(name)} came" in device.session._channel.closed_because
    assert f"one with {len(name)} came (PROTOCOL_ERROR)" in device.channel.closed_because  # and it is told why


def test_the_protocol_page_names_the_bound_of_names():
    page = Path(split.wire.__path__[0]) / "PROTOCOL.md"
    assert f"1 to {MAX_NAME} characters, else `PROTOCOL_ERROR`" in page.read_text()


async def test_a_refusal_names_what_came_but_not_all_of_it(house, chain):
    device = house.connect()
    await device.bring(chain)
    device.channel.send(*chain.infer({f"{number:04}" + "x" * 4000: np.zeros(1) for number in range(16)}))
    refused = await device.next()
    assert refused.code == "INVALID_REQUEST"
    assert len(refused.message) <= 2000


async def test_a_device_that_understands_it_is_told_each_new_pace_once(house):
    device, old = house.connect(minor=2), house.connect("camera-2", minor=1)
    for work_ms, since_s in ((1.0, 0.0), (1.0, 0.0), (5.0, 0.3), (5.0, 0.0)):
        device.session.tell_pace(work_ms, since_s)
        old.session.tell_pace(work_ms, since_s)
    assert await device.next() == Pace(work_ms=1.0)
    assert await device.next() == Pace(work_ms=5.0, since_ms=300.0)
    for one in (device, old):
        one.session.goodbye("that is all")
        assert await one.next() == Goodbye(reason="that is all")


async def test_who_comes_later_is_told_the_pace_as_it_is(house):
    device = house.connect(minor=2)
    device.session.tell_pace(5.0, 30.0)
    assert await device.next() == Pace(work_ms=5.0), "nothing was said before on this connection"


async def test_after_its_goodbye_a_companion_answers_what_it_took_and_takes_nothing_new(house, chain, feeds):
    device = house.connect()
    await device.bring(chain)
    release = hold(house)
    device.channel.send(*chain.infer(feeds, request_id="taken"))
    await seen(device, chain)
    device.session.goodbye("the companion is stopping")
    assert await device.next() == Goodbye(reason="the companion is stopping")
    device.channel.send(*chain.infer(feeds, request_id="new"))
    refused = await device.next()
    assert (type(refused), refused.code) == (Refused, "MODEL_UNAVAILABLE")
    release.set()
    assert (await device.next()).request_id == "taken"
    await device.session.drained()


@pytest.mark.parametrize(
    ("asked_with", "answered_with"),
    [
        (Priority.CONTROL, Priority.URGENT),  # what costs no credit is for control alone
        (Priority.URGENT, Priority.URGENT),
        (Priority.NORMAL, Priority.NORMAL),
        (Priority.BULK, Priority.BULK),
    ],
)
async def test_a_reply_is_as_urgent_as_its_request(house, chain, feeds, asked_with, answered_with):
    device = house.connect()
    await device.bring(chain)
    device.channel.send(*chain.infer(feeds), priority=asked_with)
    async with asyncio.timeout(30):
        incoming = await device.channel.receive()
    assert isinstance(incoming.message, Reply)
    assert incoming.priority is answered_with


async def test_requests_of_one_model_do_not_wait_for_the_disk_that_looks_at_another(
    house, make_model, chain, feeds, monkeypatch
):
    device, other = house.connect(), make_model(CHAIN_AGAIN)
    await device.bring(chain)
    store, release = house.companion.store, threading.Event()
    offer = store.offer

    def slow(*args):
        release.wait(30)
        return offer(*args)

    monkeypatch.setattr(store, "offer", slow)
    for _ in range(20):  # with cuts behind, as all models of a device come when it has connected anew
        device.channel.send(other.offer)
        device.channel.send(SegmentOpen(digest=other.digest, cut="c" * 12, node_bitmap="00"))
    device.channel.send(*chain.infer(feeds))
    assert isinstance(await device.next(), Reply)
    release.set()
    assert isinstance(await device.next(), ModelNeed)


async def test_a_session_that_ends_while_the_disk_takes_its_offer_uses_nothing_afterwards(house, chain, monkeypatch):
    device = house.connect()
    store, begun, release = house.companion.store, threading.Event(), threading.Event()
    offer = store.offer

    def slow(*args):
        begun.set()
        release.wait(30)
        return offer(*args)

    monkeypatch.setattr(store, "offer", slow)
    device.channel.send(chain.offer)
    device.channel.send(chain.offer)  # waits, and is let fall
    while not begun.is_set():  # noqa: ASYNC110 - a thread decides when
        await asyncio.sleep(0)
    device.channel.kill()
    for _ in range(10):
        await asyncio.sleep(0)
    release.set()
    await asyncio.wait_for(device.task, 30)
    assert not store._users
    assert not store._uploads


async def test_pieces_that_wait_for_the_disk_are_bounded_in_bytes(house, chain, monkeypatch):
    monkeypatch.setattr("cloud.openings.WAITING_BYTES", 1 << 20)
    device = house.connect("camera-1", Limits(unread_bytes=1 << 20))
    await device.ask(chain.offer)
    store, release = house.companion.store, threading.Event()
    monkeypatch.setattr(store, "write", lambda *args: release.wait(30) and False)
    piece = ModelChunk(digest=chain.digest, file="model.onnx", offset=0)
    for _ in range(20):
        device.channel.send(piece, [bytes(1 << 18)])
    for _ in range(200):
        await asyncio.sleep(0)
    held = device.session._openings._waiting_bytes
    assert 1 << 20 < held <= (1 << 20) + (1 << 18) + 4096
    assert device.channel.queued_bytes > 1 << 20  # the rest was not sent
    release.set()
    await device.channel.drain(1)


BIG = {"x": np.ones((5_000, 4), np.float32), "bias": np.zeros(4, np.float32)}
"""80 kB up and twice as much down: more than all of the queue below."""
SMALL_QUEUE = Limits(unread_bytes=1 << 18, queue_bytes=100_000)


async def test_replies_that_are_made_faster_than_the_link_takes_them_wait_and_all_come(house, chain):
    device = house.connect("camera-1", SMALL_QUEUE)
    await device.bring(chain)
    device.session._channel.freeze()
    for number in range(3):
        device.channel.send(*chain.infer(BIG, request_id=f"{number}"))
        await device.channel.drain(1)
    while len(device.session._requests._tasks) > 2 or device.session._requests._held_back_bytes < 320_000:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert house.companion.admission.inflight_requests == 2  # what waits still counts
    device.session._channel.thaw()
    replies = [await device.reply() for _ in range(3)]
    assert {reply.request_id for reply, _ in replies} == {"0", "1", "2"}
    for _, outputs in replies:
        assert_same(outputs, chain.whole(BIG))
    await device.session.drained()
    assert device.session._requests._held_back_bytes == house.companion.admission.inflight_bytes == 0


@pytest.mark.parametrize(
    ("code", "budget_ms", "bound"), [("DEADLINE_EXCEEDED", 500.0, 1 << 25), ("OVERLOADED", 20_000.0, 1)]
)
async def test_a_reply_for_which_the_link_has_no_room_in_time_is_a_refusal_of_that_request_alone(
    house, chain, feeds, monkeypatch, code, budget_ms, bound
):
    monkeypatch.setattr("cloud.requests.HELD_BACK_BYTES", bound)
    device = house.connect("camera-1", SMALL_QUEUE)
    await device.bring(chain)
    device.session._channel.freeze()
    for number, budget in enumerate((20_000.0, 20_000.0, budget_ms)):
        queued_bytes = device.session._channel.queued_bytes
        device.channel.send(*chain.infer(BIG, request_id=f"{number}", budget_ms=budget))
        await device.channel.drain(1)
        while device.session._requests._held_back_bytes < min(number, 1) * 160_000:  # noqa: ASYNC110
            await asyncio.sleep(0)
    while device.session._channel.queued_bytes == queued_bytes:  # noqa: ASYNC110 - until the refusal is among it
        await asyncio.sleep(0)
    device.session._channel.thaw()
    first = await device.next()
    assert isinstance(first, Refused)
    assert (first.request_id, first.code) == ("2", code)
    assert {(await device.next()).request_id for _ in range(2)} == {"0", "1"}
    device.channel.send(*chain.infer(feeds))
    assert isinstance(await device.next(), Reply)


async def test_a_device_that_does_not_read_its_replies_is_cut_off_and_the_others_are_served(house, chain, feeds):
    deaf = house.connect("camera-1", Limits(unread_bytes=1000, queue_bytes=5000))
    good = house.connect("camera-2")
    await deaf.bring(chain)
    with contextlib.suppress(ConnectionLost):
        for number in range(10_000):
            deaf.channel.send(*chain.infer(feeds, request_id=f"{number}"))
            await deaf.channel.drain(1)
    async with asyncio.timeout(30):
        await deaf.task
    assert "does not read" in deaf.session._channel.closed_because
    assert house.companion.admission.inflight_requests == 0
    await good.bring(chain)
    good.channel.send(*chain.infer(feeds))
    assert isinstance(await good.next(), Reply)
