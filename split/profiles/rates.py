"""How fast a machine does what models are made of, as measured by the runtime itself: values and their file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

KINDS: Final = ("gemm_fp32", "gemm_int8", "conv_fp32", "conv_int8")


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work. 10⁹ operations a second, a multiply-add is two; None where the runtime cannot do it."""

    one: float | None
    """On one thread."""
    all: float | None
    """On all threads worth starting."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """512 × 512 × 512 matrix product and 3 × 3 convolution of 64 to 64 channels over 56 × 56; best of several."""

    threads: int
    """Behind `Rate.all`."""
    gemm_fp32: Rate
    gemm_int8: Rate
    conv_fp32: Rate
    conv_int8: Rate


def write_rates(rates: Rates, path: Path) -> None:
    """As JSON; OSError where it cannot be written."""
    path.write_bytes(msgspec.json.encode(rates))


def read_rates(path: Path) -> Rates:
    """What `write_rates` wrote; msgspec.MsgspecError or OSError otherwise."""
    return msgspec.json.decode(path.read_bytes(), type=Rates)
