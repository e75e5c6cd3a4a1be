"""Whether a way is open: one SYN, and whether anything answers. Nothing is said, what is opened is closed at once."""

from __future__ import annotations

import asyncio
import socket


async def knock(address: str, port: int, timeout_s: float) -> bool:
    """`address`: an IP address, since names cannot be looked up where nothing passes. A refusal is an answer, too: what
    says that nothing listens there was reached. Never raises."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    return True
