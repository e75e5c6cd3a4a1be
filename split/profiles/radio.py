"""What moving bytes costs a board beyond its idle draw, by kind of link. Constants with their sources.

Power while bytes cross is linear in the rate: base + slope × Mbit/s (Huang et al., MobiSys 2012, eq. 1).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec


class LinkKind(StrEnum):
    ETHERNET = "ethernet"
    WIFI = "wifi"
    LTE = "lte"


class Radio(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of link. Watts above an idle board whose link is up; slopes in watts per Mbit/s."""

    base_w: float
    """While bytes cross, whatever their rate."""
    send_w_per_mbit_s: float
    receive_w_per_mbit_s: float
    wait_w: float
    """Between a request's last byte up and its reply's first byte down: how awake the radio stays."""
    source: str


_HUANG: Final = "Huang et al., A Close Examination of Performance and Power Characteristics of 4G LTE, MobiSys 2012"

RADIOS: Final = {
    LinkKind.ETHERNET: Radio(
        base_w=0.05,
        send_w_per_mbit_s=0.001,
        receive_w_per_mbit_s=0.001,
        wait_w=0.0,
        source="estimate: a wired PHY draws nearly the same idle and busy; 0.15 W more at 100 Mbit/s",
    ),
    LinkKind.WIFI: Radio(
        base_w=0.13286,
        send_w_per_mbit_s=0.28317,
        receive_w_per_mbit_s=0.13701,
        wait_w=0.1193,
        source=f"{_HUANG}, tables 3 and 4 (phones of 2011; 802.11ac and later need less per bit)",
    ),
    LinkKind.LTE: Radio(
        base_w=1.28804,
        send_w_per_mbit_s=0.43839,
        receive_w_per_mbit_s=0.05197,
        wait_w=1.06,
        source=f"{_HUANG}, tables 3 and 4: while a request waits the modem is in its tail of 11.6 s",
    ),
}
"""mW there, W here. The slopes were measured up to some 20 Mbit/s; `RATE_MAX_MBIT_S` bounds what they are used for."""

RATE_MAX_MBIT_S: Final = 20.0
"""Beyond, the line has no measurement behind it (at 200 Mbit/s it would have a phone's Wi-Fi draw 57 W): the power is
taken to stay as it is there."""
