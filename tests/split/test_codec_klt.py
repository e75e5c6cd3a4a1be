"""split/codec/klt.py: what comes back for what went in, framing, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from split.codec.calibration import CutTables
from split.codec.klt import BoundaryTables, encode_klt
from split.codec.payload import decode, decoded_bytes
from split.errors import CodecError
from tests.split.klt_world import one_map

ENOUGH = 1 << 28


@pytest.mark.parametrize(
    ("layout", "dims", "block"),
    [
        ("NCHW", (1, 80, 14, 14), (7, 7)),
        ("NHWC", (2, 9, 5, 17), (8, 8)),
        ("NTC", (1, 27, 48), (1, 1)),
        ("NCT", (2, 12, 30), (1, 8)),
        ("NC", (3, 96), (1, 1)),
    ],
)
def test_a_finer_step_brings_every_layout_nearer_to_what_went_in(
    layout: str, dims: tuple[int, ...], block: tuple[int, int]
) -> None:
    tables, x = one_map(layout, dims, block)
    errors = []
    for level in (144, 128, 112, 96):
        found = decode(b"".join(encode_klt({"x": x}, tables, level)), max_bytes=ENOUGH, tables=tables)["x"]
        assert found.shape == x.shape
        errors.append(float(np.sqrt(np.mean((found - x) ** 2))))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 2 ** ((96 - 128) / 8)  # an orthogonal transform: the mean error is below the step


def test_framing_of_one_tensor_of_known_shape_takes_less_than_33_bytes() -> None:
    tables, x = one_map("NCHW", (1, 80, 14, 14), (7, 7))
    header, *_ = encode_klt({"x": x}, tables, 128)
    assert len(header) <= 32


def test_what_decoding_takes_is_known_before_and_held_against_the_bound() -> None:
    tables, x = one_map("NCHW", (1, 80, 14, 14), (7, 7))
    payload = b"".join(encode_klt({"x": x}, tables, 128))
    assert decoded_bytes(payload) == x.nbytes
    with pytest.raises(CodecError, match="at most"):
        decode(payload, max_bytes=x.nbytes - 1, tables=tables)


def test_another_calibration_or_none_is_refused() -> None:
    tables, x = one_map("NCHW", (1, 8, 14, 14), (7, 7))
    payload = b"".join(encode_klt({"x": x}, tables, 128))
    other = BoundaryTables(CutTables(tensors=tables.tensors, node_bitmap=""), "f" * 64)
    with pytest.raises(CodecError, match="both sides must hold the same"):
        decode(payload, max_bytes=ENOUGH, tables=other)
    with pytest.raises(CodecError, match="none at hand"):
        decode(payload, max_bytes=ENOUGH)
