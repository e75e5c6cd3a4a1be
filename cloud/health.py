"""Health and metrics over plain HTTP for the machines around: `/v2/health/live`, `/v2/health/ready`, `/metrics`.

Not for devices: nothing here is authenticated, so it listens on loopback unless the configuration says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from cloud.metrics import Metrics
from split.errors import ChannelError
from split.profiles.address import HostPort


class HealthServer:
    """`start` once, `stop` once; `live` and `ready` are asked at each request."""

    def __init__(self, *, metrics: Metrics, live: Callable[[], bool], ready: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._live = live
        self._ready = ready
        self._runner: web.AppRunner | None = None
        self.port = 0
        """Where it listens, once started."""

    async def start(self, address: HostPort) -> None:
        """ChannelError when the address cannot be listened on."""
        app = web.Application()
        app.router.add_get("/v2/health/live", self._get_live)
        app.router.add_get("/v2/health/ready", self._get_ready)
        app.router.add_get("/metrics", self._get_metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, address.host, address.port).start()
        except OSError as error:
            await runner.cleanup()
            raise ChannelError(
                f"http: {address} cannot be listened on ({error.strerror}); choose another port"
            ) from error
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get_live(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._live() else 503)

    async def _get_ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._ready() else 503)

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )
