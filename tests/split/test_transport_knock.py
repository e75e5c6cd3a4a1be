"""One SYN, and whether anything answers it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from split.transport.knock import knock


async def test_what_listens_and_what_refuses_was_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert await knock("127.0.0.1", port, 1.0)
    assert await knock("127.0.0.1", port, 1.0), "refused: the way is open"


async def test_what_answers_nothing_was_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        held = [socket.socket() for _ in range(4)]
        try:
            for one in held:  # a full backlog lets SYNs fall
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            assert not await knock("127.0.0.1", full.getsockname()[1], 0.05)
        finally:
            for one in held:
                one.close()


async def test_a_bad_address_is_no_answer() -> None:
    assert not await knock("no address", 1, 0.05)


async def test_one_that_nobody_waits_for_any_more_leaves_no_socket() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        held = [socket.socket() for _ in range(4)]
        try:
            for one in held:
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            task = asyncio.create_task(knock("127.0.0.1", full.getsockname()[1], 60.0))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            for one in held:
                one.close()
