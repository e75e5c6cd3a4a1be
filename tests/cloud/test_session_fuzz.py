"""Any sequence of well-formed messages: the session answers or ends, never fails, and leaves the companion whole."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from split.errors import ChannelError
from split.wire.messages import (
    Cancel,
    Infer,
    ModelChunk,
    ModelNeed,
    ModelOffer,
    Pong,
    Reply,
    SegmentOpen,
)


def any_message(generator: random.Random, model) -> tuple[object, list[bytes]]:
    """A message whose fields are right, nearly right or nonsense."""
    pick = generator.choice
    odd = [
        "",
        "offload",
        "x" * 100,
        "sha256:",
        "\u0000",
        "sha256:" + "0" * 64,
        "0123456789ab",
        "raw",
        "int8",
        "encoded",
    ]
    name, size, sha = model.card.files[0]
    cuts = [*model.card.cuts]
    digest = pick([model.digest, model.digest, pick(odd)])
    cut = pick([pick(cuts).id, "offload", pick(odd)])
    number = pick([0, 1, -1, 2**40, generator.randrange(size + 2)])
    data = generator.randbytes(generator.randrange(200))
    match generator.randrange(8):
        case 0:
            file = (pick([name, pick(odd)]), pick([size, number]), pick([sha, pick(odd)]))
            dims = pick([{}, {"N": number}])
            golden = pick([b"", data])
            return ModelOffer(digest=digest, files=pick([model.card.files, (file,), ()]), dims=dims, golden=golden), []
        case 1:
            return ModelChunk(digest=digest, file=pick([name, pick(odd)]), offset=number, last=pick([True, False])), [
                data
            ]
        case 2:
            start = generator.randrange(size)
            whole = model.path.read_bytes()
            return ModelChunk(digest=digest, file=name, offset=start, last=True), [whole[start:]]
        case 3:
            bitmap = pick([pick(cuts).node_bitmap, pick(odd), "ff", "zz"])
            return SegmentOpen(digest=digest, cut=cut, node_bitmap=bitmap), []
        case 4 | 5:
            return (
                Infer(
                    request_id=pick(["1", "2", "x" * 100]),
                    attempt=number,
                    digest=digest,
                    cut=cut,
                    codec=pick(["raw", "int8", "encoded", pick(odd)]),
                    budget_ms=pick([100.0, -1.0, 1e300, float("nan")]),
                    outputs=pick([(), ("y",), (pick(odd),)]),
                    encoded=pick([{}, {}, {"x": {"kind": pick(odd)}}]),
                    output_codec=pick(["raw", pick(odd)]),
                ),
                [data],
            )
        case 6:
            return Cancel(request_id=pick(["1", "2"]), attempt=number), []
        case _:
            rare = Reply(
                request_id="1",
                attempt=1,
                cut="",
                codec="raw",
                queue_ms=0,
                decode_ms=0,
                tail_ms=0,
                encode_ms=0,
                cloud_ms=0,
            )
            usual = Pong(nonce=1)
            return pick([usual] * 20 + [rare, ModelNeed(digest=digest, missing=())]), []


@pytest.mark.parametrize("seed", range(20))
async def test_any_messages_leave_the_companion_whole(house, chain, feeds, seed, caplog):
    generator = random.Random(seed)  # the seed is in the test's name
    device = house.connect("stranger")
    if seed % 2:
        await device.bring(chain)
    with contextlib.suppress(ChannelError):
        for _ in range(60):
            device.channel.send(*any_message(generator, chain))
            await asyncio.sleep(0)
    await device.channel.close("enough")
    async with asyncio.timeout(60):
        await device.task  # raises what the session failed with
    assert house.companion.admission.inflight_requests == 0
    assert not house.companion.store._users
    good = house.connect("good")
    await good.bring(chain)
    good.channel.send(*chain.infer(feeds))
    assert isinstance((await good.reply())[0], Reply)
