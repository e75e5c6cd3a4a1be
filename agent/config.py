"""The device daemon's configuration: one YAML file, checked in full before anything starts (DESIGN §7).

Relative paths are relative to the file's folder. `ISTHMUS__SECTION__KEY=value` in the environment overrides one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from split.profiles.address import HostPort
from split.profiles.device import device_names
from split.profiles.load import load_yaml

_Bytes = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Listen(_Section, frozen=True, kw_only=True):
    http: HostPort | None = HostPort("127.0.0.1:8080")
    """Open Inference Protocol over HTTP. Callers are not authenticated: on another address than loopback, which the log
    warns of, everybody who reaches it may ask. Port 0: the system chooses, the log names it."""
    unix: Path | None = None
    """The same on a UNIX socket; off by default, its folder decides who may call (made for the daemon's user and group
    where it is not there)."""
    grpc: HostPort | None = None
    """The same over gRPC: not in this version, a value is refused."""

    def __post_init__(self) -> None:
        if self.grpc is not None:
            raise ValueError("grpc is not in this version; set it to null or leave it out, and use http or unix")
        if self.http is None and self.unix is None:
            raise ValueError("at least one of http and unix must be set, or nobody can ask anything")


class IdentityFiles(_Section, frozen=True, kw_only=True):
    """PEM files; no defaults, since a guessed key is no identity."""

    cert: Path
    """This device's certificate."""
    key: Path
    """Its private key."""
    ca: Path
    """The authority that the companion's certificate must come from."""


class Limits(_Section, frozen=True, kw_only=True):
    default_deadline_ms: Annotated[float, msgspec.Meta(gt=0, le=86_400_000)] = 30_000.0
    """Milliseconds for a request that names no deadline and whose contract names none: longer than any model that is
    worth serving on a device takes, short enough that a stuck caller is told so."""
    inflight_bytes: _Bytes = 256 << 20
    """Bytes of requests being answered (bodies, tensors, payloads, in one sum); more are refused as overload. 256 MiB:
    some four hundred 224 × 224 pictures as tensors, a quarter of a 1 GB board."""


class Workbench(_Section, frozen=True, kw_only=True):
    timeout_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 300.0
    """Seconds for cutting or measuring one model in its child process, and for opening it; each takes seconds to a
    minute, and what needs five minutes hangs and is ended."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=256 << 20)] | None = None
    """Bytes of memory that the child process may fill; off: 4 GiB and 8 for each byte of the model's files, at most
    three quarters of what the machine has."""


class Link(_Section, frozen=True, kw_only=True):
    probe_bytes_per_hour: Annotated[int, msgspec.Meta(ge=0)] = 2_000_000
    """Bytes that probes of an idle link may cost; 2 MB an hour are 4.4 kbit/s. Beside it 2 % of the bytes that requests
    moved may be spent, 2 MB of them saved at most. 0: only real traffic teaches."""
    probe_joules_per_hour: _NotNegative = 360.0
    """Joules that sending and receiving them may cost, where the radio's power is known; 360 an hour are 0.1 W on
    average."""
    metered_bytes_per_month: _Bytes | None = None
    """Bytes that may cross the link to companions in a calendar month (UTC), both ways: requests, replies, models,
    probes. When they are used up everything runs here until the next month. None stated: counted, not bounded."""
    metered_interfaces: tuple[str, ...] = ()
    """Network interfaces whose bytes count towards that, as `wwan0`; empty: all."""
    price_per_gb: _NotNegative = 0.0
    """Money per 10⁹ bytes, in the unit the contract's `cost` weight is meant for; 0: nothing to save."""
    price_per_companion_s: _NotNegative = 0.0
    """Money per second that a companion computes, in the same unit; 0: nothing to save."""


class Power(_Section, frozen=True, kw_only=True):
    battery_ratio_min: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.15
    """Below this charge (0…1), while nothing charges it, energy counts before latency; 0.15: where desktops start to
    save. No battery: unused."""


class Emulation(_Section, frozen=True, kw_only=True):
    slowdown: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 1.0
    """Every device stage is held (slowdown − 1) × its measured time, asleep, and replies say so. 1.0: no emulation."""


class Record(_Section, frozen=True, kw_only=True):
    enabled: bool = False
    """Whether what happens to requests (sizes, times, link and load; no contents) is kept on disk, in
    `state_dir/record`, for `isthmus audit`: 1 MB an hour at most. The last hour is in memory in any case."""
    days: Annotated[int, msgspec.Meta(ge=1, le=366)] = 7
    """Days' worth of hours that are kept, 24 MB each at most; a week shows what weekends are like."""


class AgentConfig(_Section, frozen=True, kw_only=True):
    models: Path
    """Model repository: `<name>/<version>/model.onnx`."""
    state_dir: Path
    """What must survive a restart: counted bytes, the record of traffic, the device's fingerprint."""
    cache_dir: Path
    """What can be made again: segments, optimised models, what was measured of them."""
    listen: Listen = Listen()
    companions: tuple[HostPort, ...] = ()
    """Tried in this order; empty: everything runs here."""
    identity: IdentityFiles | None = None
    """Required where companions are set."""
    mqtt: Any = None
    """Commands over MQTT: not in this version, a value is refused."""
    limits: Limits = Limits()
    budget_bytes: _Bytes = 1 << 30
    """Bytes that opened segments may take in memory; beyond it the least used are closed. 1 GiB fits a 2 GB board."""
    workbench: Workbench = Workbench()
    link: Link = Link()
    power: Power = Power()
    record: Record = Record()
    spot_check_every: Annotated[int, msgspec.Meta(ge=0)] = 200
    """One in so many answers that came over a lossy codec is computed again, unsplit, when the device is idle, and held
    against the contract's bound of fidelity. 200: half a per cent of the compute; 0: none."""
    device: str | None = None
    """Profile whose power figures hold for this board (`profiles/devices`). Off: recognised by its device tree, else
    the generic one of its architecture; what the board measures itself goes before."""
    emulation: Emulation = Emulation()

    def __post_init__(self) -> None:
        if self.device is not None and self.device not in device_names():
            raise ValueError(f"there is no device profile {self.device!r}; there are {', '.join(device_names())}")
        if self.mqtt is not None:
            raise ValueError("mqtt is not in this version; set it to null or leave it out")
        if self.companions and self.identity is None:
            raise ValueError("identity (cert, key, ca) is required where companions are set; see isthmus enroll")
        for companion in self.companions:
            if companion.port == 0:
                raise ValueError(f"companion {companion} has port 0; expected the port it listens on")


def load_config(path: Path, env: Mapping[str, str]) -> AgentConfig:
    """The configuration in `path` with the overrides in `env`.

    ConfigError names the file and line (or the variable), the path of the key and what was expected.
    """
    return load_yaml(path, AgentConfig, env=env)
