"""The ends of the bench `channel` over gRPC streaming; runs in the peers' venv: standard library and grpcio only."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped,import-not-found,unused-ignore]  # in the peers' venv alone

TENSOR = bytes(256 * 1024)
WARM_S = 2.0
NAME = "bench"
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


async def take(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    """Every message is counted; an empty one asks for the counts."""
    arrivals: list[tuple[float, int]] = []
    async for request in requests:
        if request:
            arrivals.append((time.monotonic(), len(request)))
        else:
            yield json.dumps(arrivals).encode()


async def companion(folder: Path, host: str) -> None:
    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(take)  # without serialisers: bytes as they are
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"take": handler}),))
    pair = ((folder / "peer-key.pem").read_bytes(), (folder / "peer.pem").read_bytes())
    port = server.add_secure_port(f"{host}:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


async def goodput(folder: Path, host: str, port: int, seconds: float) -> dict[str, Any]:
    """As `channel_ends.Device.goodput`."""
    credentials = grpc.ssl_channel_credentials((folder / "peer.pem").read_bytes())
    options = [*OPTIONS, ("grpc.ssl_target_name_override", NAME)]
    async with grpc.aio.secure_channel(f"{host}:{port}", credentials, options=options) as channel:
        call = channel.stream_stream("/bench/take")()
        end_s = time.monotonic() + WARM_S + seconds
        while time.monotonic() < end_s:
            await call.write(TENSOR)
        await call.write(b"")
        arrivals = json.loads(await call.read())
        call.cancel()
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
