"""What a companion is asked directly behind our Hello, without waiting for its own: the models and cuts that it had
open for us when it was there last. If it still holds them, remote use is back after three round trips instead of five.

Only asked, never believed: each answer is compared as any other (I10), and what is refused is asked again in its turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from split.wire.credit import cost
from split.wire.frames import encode_metadata
from split.wire.limits import EARLY_BYTES
from split.wire.messages import ModelOffer, SegmentOpen

MESSAGES_MAX: Final = 32
"""A companion opens 64 models and cuts at a time for one device, and what is asked later must find room, too."""

Opening = ModelOffer | SegmentOpen


class FirstFlight:
    """Lives as long as the daemon."""

    def __init__(self) -> None:
        self._offers: dict[str, ModelOffer] = {}
        """By digest: as it was asked when the companion had the model ready."""
        self._cuts: dict[tuple[str, str], SegmentOpen] = {}

    def opened(self, asked: Opening) -> None:
        """The companion's answer to this was right."""
        match asked:
            case ModelOffer():
                self._offers[asked.digest] = asked
            case SegmentOpen():
                self._cuts[asked.digest, asked.cut] = asked

    def forget(self, digest: str) -> None:
        """The model has become another one, or is not served any more."""
        self._offers.pop(digest, None)
        for key in [key for key in self._cuts if key[0] == digest]:
            del self._cuts[key]

    def pack(self, wanted: Iterable[tuple[str, Iterable[str]]]) -> list[Opening]:
        """The offers of these digests, then their cuts, those named first before others; as much as may go early."""
        models = [(self._offers[digest], cuts) for digest, cuts in dict(wanted).items() if digest in self._offers]
        asked: list[Opening] = [offer for offer, _ in models]
        asked += [
            self._cuts[key] for offer, cuts in models for cut in cuts if (key := (offer.digest, cut)) in self._cuts
        ]
        packed, left_bytes = list[Opening](), EARLY_BYTES
        for one in asked[:MESSAGES_MAX]:
            cost_bytes = cost(len(encode_metadata(one)), begins=True)
            offered = isinstance(one, ModelOffer) or any(one.digest == other.digest for other in packed)
            if offered and cost_bytes <= left_bytes:
                packed.append(one)
                left_bytes -= cost_bytes
        return packed
