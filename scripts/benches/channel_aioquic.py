"""The two ends of the bench `channel` over QUIC; runs in the peers' venv: standard library and aioquic only."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

from aioquic.asyncio import connect, serve  # type: ignore[import-not-found,unused-ignore]  # in the peers' venv alone
from aioquic.quic.configuration import QuicConfiguration  # type: ignore[import-not-found,unused-ignore]  # as above

TENSOR = bytes(256 * 1024)
WARM_S = 2.0
NAME = "bench"
WINDOW_BYTES = 16 << 20
LENGTH = struct.Struct("<I")


def configuration(*, is_client: bool) -> Any:
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=["bench"],
        max_data=WINDOW_BYTES,
        max_stream_data=WINDOW_BYTES,
        server_name=NAME if is_client else None,
    )


async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Every message is answered with the time and size of its arrival: QUIC here has no other back-pressure."""
    try:
        while True:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            await reader.readexactly(size)
            writer.write(struct.pack("<dI", time.monotonic(), size))
    except asyncio.IncompleteReadError:
        return


async def companion(folder: Path, host: str) -> None:
    setup = configuration(is_client=False)
    setup.load_cert_chain(folder / "peer.pem", folder / "peer-key.pem")
    tasks: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(take(reader, writer)))

    server = await serve(host, 0, configuration=setup, stream_handler=begin)
    print(json.dumps({"port": server._transport.get_extra_info("sockname")[1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


async def goodput(folder: Path, host: str, port: int, seconds: float) -> dict[str, Any]:
    """As `channel_ends.Device.goodput`, four tensors outstanding."""
    setup = configuration(is_client=True)
    setup.load_verify_locations(str(folder / "peer.pem"))
    arrivals: list[tuple[float, int]] = []
    async with connect(host, port, configuration=setup) as client:
        reader, writer = await client.create_stream()
        end_s, sent = time.monotonic() + WARM_S + seconds, 0
        while time.monotonic() < end_s:
            while sent - len(arrivals) < 4:
                writer.write(LENGTH.pack(len(TENSOR)) + TENSOR)
                sent += 1
            arrivals.append(struct.unpack("<dI", await reader.readexactly(12)))
    began_s = arrivals[0][0] + WARM_S
    kept = [one for one in arrivals if began_s <= one[0] <= began_s + seconds]
    rate = sum(size for _, size in kept[1:]) / (kept[-1][0] - kept[0][0])
    return {"bytes_per_s": rate, "tensors": len(kept)}


async def device(folder: Path, host: str, port: int) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        _, arguments = json.loads(line)
        print(json.dumps(await goodput(folder, host, port, **arguments)), flush=True)


if __name__ == "__main__":
    role, place, address, *ports = sys.argv[1:]
    if role == "companion":
        asyncio.run(companion(Path(place), address))
    else:
        asyncio.run(device(Path(place), address, int(ports[0])))
