"""The table of codecs against the other places that list them."""

from __future__ import annotations

from typing import get_args

from split.codec.payload import SPOKEN
from split.codec.picture import PICTURE_CODECS
from split.oip.options import CODECS
from split.plan.plan import (
    CODEC_KINDS,
    LOSSLESS_CODECS,
    NEEDS_CALIBRATION,
    OF_PICTURES,
    REENCODED,
    WITH_LEVELS,
)
from split.profiles.contract import Codec


def test_every_codec_of_a_contract_a_request_and_a_payload_has_its_row() -> None:
    assert set(CODEC_KINDS) == set(get_args(Codec)) == set(CODECS) == set(SPOKEN)


def test_what_each_is() -> None:
    assert {"raw", "encoded"} == LOSSLESS_CODECS
    assert {"encoded", "jpeg", "webp"} == OF_PICTURES
    assert set(PICTURE_CODECS) == {"jpeg", "webp"} == REENCODED
    assert WITH_LEVELS == ("klt", "jpeg", "webp")
    assert {"klt"} == NEEDS_CALIBRATION
