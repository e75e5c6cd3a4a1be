"""What is shared over one connection: each model brought to the companion and compared with it (I10), its cuts opened
there. The planner learns each step; the requests are the uplink's.

One task per model. What fails for a reason that may go away is tried again for as long as the connection lives; what
will not go away (`LASTING`) is said once. A cut that fails concerns no other, and what is open is used meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from random import random
from typing import Final

from agent.first_flight import FirstFlight, Opening
from agent.golden import Golden
from agent.planner import Planner
from agent.served_model import ServedModel
from agent.sharing import Answer, Sharing, of_calibration, of_model
from split.codec.golden import SELF_DIFFERENCE_MAX, bound_of, differs
from split.codec.image import image_fingerprint
from split.codec.payload import decode
from split.errors import CompanionRefused, ConnectionLost, IsthmusError, RemoteProtocolError
from split.graph.card import CutCard, digest_of_files
from split.ids import KLT, OFFLOAD_CUT, CutId
from split.plan.plan import REENCODED
from split.runtime.kernels import kernel_answers, kernels_differ
from split.tensor import Tensors
from split.transport.channel import Channel
from split.transport.retry import Backoff
from split.wire.messages import ModelOffer, SegmentOpen

log = logging.getLogger(__name__)

SHORTEST_MS: Final = 1e-6
LONGEST_MS: Final = 1e12
"""What a companion may say that something took, if not 0: a nanosecond; what a record holds, thirty years."""
RETRY_FIRST_S: Final = 1.0
RETRY_CAP_S: Final = 30.0
"""A companion that is short of disk or memory is asked now and then, not pressed."""
GOLDEN_BYTES_MAX: Final = 1 << 26
LASTING: Final = frozenset(
    {
        "DIFFERENT_NUMBERS",
        "DIGEST_MISMATCH",
        "PLAN_MISMATCH",
        "UNSUPPORTED_OP",
        "UNSUPPORTED",
        "INVALID_MODEL",
        "CUT_REFUSED",
        "CODEC_ERROR",
        "INVALID_CALIBRATION",
        "TOO_LARGE",
    }
)
"""Codes that trying again does not mend: they speak of the model, the cut or the two machines."""


class Openings:
    """Lives as long as one connection."""

    def __init__(
        self,
        channel: Channel,
        *,
        planner: Planner,
        golden: Golden,
        draw: Callable[[], float] = random,
        on_open: Callable[[str, str], None] = lambda digest, cut: None,
        flight: FirstFlight,
        asked: Sequence[Opening] = (),
    ) -> None:
        """`asked`: what went with the dial; `flight` learns what may go with the next one."""
        self._channel = channel
        self._planner = planner
        self._golden = golden
        self._draw = draw
        self._on_open = on_open
        """Told, after the planner, the digest and the cut (`OFFLOAD_CUT`: the whole; `KLT`: payloads of that codec)
        that may be asked for now."""
        self._served: dict[str, ServedModel] = {}
        """By name, with the calibration of now."""
        self._there: set[str] = set()
        """Names whose model the companion has."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By the model's name."""
        self._calibrating: dict[str, asyncio.Task[None]] = {}
        """The same, of what brings its calibration."""
        self._not_kept: dict[str, Backoff] = {}
        """Names whose calibration the companion had, and then had no more: how often."""
        self._ended: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._flight = flight
        self._sharing = Sharing(channel, metered_why_not=planner.metered_why_not, asked=asked)

    def begin(self, model: ServedModel) -> None:
        """Share this model, in place of what had its name before."""
        self.drop(model.name)
        if self._stopped:
            return
        self._served[model.name] = model
        self._tasks[model.name] = asyncio.create_task(self._keep(model), name=f"open {model.name}")

    def recalibrated(self, model: ServedModel) -> None:
        """The model of this name has another calibration: bring it, and leave the rest as it is."""
        if self._stopped:
            return
        self._served[model.name] = model
        self._end(self._calibrating.pop(model.name, None))
        self._not_kept.pop(model.name, None)
        if model.name in self._there:
            self._tell_codecs(model)
            self.calibrate(model)

    def calibrate(self, model: ServedModel) -> None:
        """Have the companion read codec klt of this model, if there is a calibration: beside its cuts."""
        self._begin_calibrating(model, lambda: 0.0)

    def calibrate_again(self, model: ServedModel) -> None:
        """The same, where the companion says that it has it no more: at once, and then later and later, since one that
        says it has what it has not costs each request that it refuses a way there and back."""
        backoff = self._not_kept.get(model.name)
        self._begin_calibrating(model, backoff.failed if backoff is not None else lambda: 0.0)
        if backoff is None:
            self._not_kept[model.name] = Backoff(first_s=RETRY_FIRST_S, cap_s=RETRY_CAP_S, draw=self._draw)

    def _begin_calibrating(self, model: ServedModel, delay_s: Callable[[], float]) -> None:
        going_on = self._calibrating.get(model.name)
        if self._stopped or model.sidecar.calibration is None or (going_on is not None and not going_on.done()):
            return
        task = asyncio.create_task(self._keep_calibrated(model, delay_s()), name=f"calibrate {model.name}")
        self._calibrating[model.name] = task

    def drop(self, name: str) -> None:
        """Stop opening this model. Another name of the same model goes on."""
        self._served.pop(name, None)
        self._there.discard(name)
        self._end(self._tasks.pop(name, None))
        self._end(self._calibrating.pop(name, None))
        self._not_kept.pop(name, None)

    def _end(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            self._ended.add(task)
            task.add_done_callback(self._ended.discard)

    def take(self, message: Answer) -> None:
        """An answer came."""
        self._sharing.take(message)

    def stop(self) -> None:
        """The companion takes nothing new on this connection: nothing more is asked."""
        self._stopped = True
        for name in [*self._tasks, *self._calibrating]:
            self.drop(name)

    async def close(self) -> None:
        """`stop`, and wait until all has ended."""
        self.stop()
        if self._ended:
            await asyncio.wait(self._ended)

    async def _keep(self, model: ServedModel) -> None:
        """Bring one model over and open its cuts, until all is done that can be done."""
        if model.privacy == "local-only":
            self._planner.forbid_remote(model.name, "the contract says local-only")
            return
        try:
            if await self._shared(model):
                self._there.add(model.name)
                self._tell_codecs(self._served[model.name])
                self.calibrate(self._served[model.name])
                await self._open_cuts(model)
        except ConnectionLost:
            return
        finally:
            self._golden.forget(model)

    async def _shared(self, model: ServedModel) -> bool:
        """Try until the companion has the model; False when it never will."""
        return await self._tried(
            lambda: self._share(model),
            f"model={model.name} is not shared",
            for_now=partial(self._planner.companion_not_ready, model.name),
            for_good=partial(self._planner.forbid_remote, model.name),
        )

    async def _tried(
        self,
        step: Callable[[], Awaitable[None]],
        failure: str,
        *,
        for_now: Callable[[str], None],
        for_good: Callable[[str], None],
    ) -> bool:
        """Try until it is done; False where that will never be. `for_now`, `for_good`: told why it is not; the log is
        told by `failure`, and only of another reason than the last."""
        backoff = Backoff(first_s=RETRY_FIRST_S, cap_s=RETRY_CAP_S, draw=self._draw)
        said = ""
        while (error := await _failure(step())) is not None:
            if error.code != said:
                log.warning("%s: %s (%s)", failure, error, error.code)
                said = error.code
            if error.code in LASTING:
                for_good(str(error))
                return False
            delay_s = backoff.failed()
            for_now(f"{error}; tried again in {delay_s:.0f} s")
            await asyncio.sleep(delay_s)
        return True

    async def _open_cuts(self, model: ServedModel) -> None:
        """One after the other, those used last first; those that fail for now once more when the others are through.
        The log is told of each cut why, and only of another reason than the last."""
        backoff = Backoff(first_s=RETRY_FIRST_S, cap_s=RETRY_CAP_S, draw=self._draw)
        _, recent = self._planner.recent_cuts(model.name)
        wanted = sorted(model.measured_cuts, key=lambda cut: cut.id not in recent)
        said: dict[CutId, str] = {}
        while True:
            again = []
            for cut in wanted:
                if (error := await _failure(self._open(model, cut))) is None:
                    continue
                if error.code != said.get(cut.id):
                    log.warning("model=%s cut=%s is not open: %s (%s)", model.name, cut.id, error, error.code)
                    said[cut.id] = error.code
                self._planner.segment_not_ready(model.name, cut.id, str(error))
                if error.code not in LASTING:
                    again.append(cut)
            if not again:
                return
            wanted = again
            self._golden.forget(model)
            await asyncio.sleep(backoff.failed())

    async def _share(self, model: ServedModel) -> None:
        kernels = self._channel.peer_hello.kernels
        if model.card.integer and (why := kernels_differ(kernels, kernel_answers())) is not None:
            raise CompanionRefused("DIFFERENT_NUMBERS", f"the companion computes integers differently: {why}")
        same = self._channel.peer_hello.image == image_fingerprint()
        why = None if same else "the companion decodes pictures otherwise than this device"
        self._planner.forbid_encoded(model.name, why)
        offer = ModelOffer(
            digest=model.digest,
            files=model.card.files,
            dims=model.profile.dims if model.profile is not None else {},
            golden=await self._golden.offered(model),
        )
        waits = partial(self._planner.companion_not_ready, model.name)
        answer = await self._sharing.offer(offer, of_model(model.card, waits))
        if not are_times(answer.whole_ms, answer.image_ms):
            raise RemoteProtocolError(f"the companion says it needs {answer.whole_ms}, {answer.image_ms} ms")
        theirs = decode(memoryview(answer.golden), max_bytes=GOLDEN_BYTES_MAX)
        if (why := _difference(model, theirs, await self._golden.run(model, None))) is not None:
            raise CompanionRefused("DIFFERENT_NUMBERS", f"the companion computes this model differently: {why}")
        self._flight.opened(offer)
        self._planner.companion_ready(model.name, answer.whole_ms, answer.image_ms)
        self._on_open(model.digest, OFFLOAD_CUT)

    def _tell_codecs(self, model: ServedModel) -> None:
        """Which of its picture codecs the companion knows."""
        assert model.profile is not None, "a model is shared once it is profiled"
        for codec in {one.codec for one in model.profile.input_codecs} & REENCODED:
            if codec in self._channel.peer_hello.codecs:
                self._planner.codec_ready(model.name, codec)
            else:
                self._planner.codec_not_ready(model.name, codec, _unknown(codec))

    async def _keep_calibrated(self, model: ServedModel, delay_s: float) -> None:
        """Try until the companion has the calibration, from `delay_s` on; what fails costs the codec alone."""
        not_ready = partial(self._planner.codec_not_ready, model.name, KLT)
        if KLT not in self._channel.peer_hello.codecs:
            not_ready(_unknown(KLT))
            return
        if delay_s > 0.0:
            not_ready(f"the companion did not keep the calibration; it is offered again in {delay_s:.0f} s")
            await asyncio.sleep(delay_s)
        with suppress(ConnectionLost):
            await self._tried(
                lambda: self._share_calibration(model),
                f"model={model.name} its calibration is not shared",
                for_now=not_ready,
                for_good=not_ready,
            )

    async def _share_calibration(self, model: ServedModel) -> None:
        source = of_calibration(model.sidecar.data, partial(self._planner.codec_not_ready, model.name, KLT))
        offer = ModelOffer(
            digest=digest_of_files(source.files),
            files=source.files,
            calibrates=model.digest,
            keeps=self._used_beside(model),
        )
        await self._sharing.offer(offer, source)
        self._planner.codec_ready(model.name, KLT)
        self._on_open(model.digest, KLT)

    def _used_beside(self, model: ServedModel) -> tuple[str, ...]:
        """Digests of the calibrations that other names of the same model go on using."""
        others = (one for name, one in self._served.items() if name != model.name and one.digest == model.digest)
        found = (one.sidecar.calibration for one in others)
        return tuple(sorted({f"sha256:{one.digest}" for one in found if one is not None}))

    async def _open(self, model: ServedModel, cut: CutCard) -> None:
        wanted = SegmentOpen(digest=model.digest, cut=cut.id, node_bitmap=cut.node_bitmap)
        answer = await self._sharing.open(wanted)
        if not are_times(answer.tail_ms):
            raise RemoteProtocolError(f"the companion says it needs {answer.tail_ms} ms")
        theirs = decode(memoryview(answer.golden), max_bytes=GOLDEN_BYTES_MAX)
        if (why := _difference(model, theirs, await self._golden.run(model, cut.id))) is not None:
            raise CompanionRefused("DIFFERENT_NUMBERS", f"the companion computes this cut differently: {why}")
        self._flight.opened(wanted)
        self._planner.segment_ready(model.name, cut.id, answer.tail_ms)
        self._on_open(model.digest, cut.id)


def _unknown(codec: str) -> str:
    return f"the companion does not know codec {codec}; update it"


def _difference(model: ServedModel, theirs: Tensors, ours: Tensors) -> str | None:
    """Why golden outputs are not of the same computation, as a sentence; None when they are."""
    assert model.profile is not None, "a model is shared once it is profiled"
    itself = model.profile.self_difference
    why = differs(theirs, ours, bound_of(itself))
    if why is not None and itself > SELF_DIFFERENCE_MAX:
        why += (
            f"; the model is not reproducible (it differs from itself by {itself:.2g} when only the order of its sums "
            "changes), so a companion must answer the same bit for bit"
        )
    return why


def are_times(*ms: float) -> bool:
    """Whether a companion's figures can be how long something took: what is learned from others never goes away. One
    of 10⁻³²⁰ ms is a number, too, and what is held against it infinite."""
    return all(one == 0.0 or SHORTEST_MS <= one <= LONGEST_MS for one in ms)


async def _failure(step: Awaitable[None]) -> IsthmusError | None:
    """Why a step failed, None when it did not. ConnectionLost goes through: what was begun here ends with it."""
    try:
        await step
    except ConnectionLost:
        raise
    except IsthmusError as error:
        return error
    except TimeoutError:
        return IsthmusError("the companion did not answer while the model was opened there")
    except OSError as error:
        return IsthmusError(f"{error.filename or 'a file of the model'} cannot be read: {error.strerror or error}")
    except Exception as error:  # a bug of ours costs this step, not the connection
        log.exception("opening a model failed")
        return IsthmusError(f"an internal error ({type(error).__name__}); the daemon's log says more")
    return None
