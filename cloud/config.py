"""The companion's configuration: one YAML file, checked in full before anything starts (DESIGN §7).

Relative paths are relative to the file's folder. `ISTHMUS__SECTION__KEY=value` in the environment overrides one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from split.profiles.address import HostPort
from split.profiles.load import load_yaml

_Bytes = Annotated[int, msgspec.Meta(ge=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class IdentityFiles(_Section, frozen=True, kw_only=True):
    """PEM files; no defaults, since a guessed key is no identity. `isthmus-cloud init` makes them."""

    cert: Path
    """This companion's certificate."""
    key: Path
    """Its private key."""
    ca: Path
    """The authority that device certificates must come from."""


class Limits(_Section, frozen=True, kw_only=True):
    inflight_bytes: _Bytes = 256 << 20
    """Bytes of requests being answered (as decoded), over all devices; more are refused as overload. 256 MiB: some four
    hundred 224 × 224 pictures as tensors."""
    device_bytes: _Bytes = 64 << 20
    """The same of one device, and the largest message it may send. 64 MiB: a hundred such pictures. A device that sends
    without end, or several messages at once, holds a few times this."""
    connections: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 64
    """Sessions at once, each of one or two TLS connections; more are refused as overload. A device holds one or two."""


class CompanionConfig(_Section, frozen=True, kw_only=True):
    state_dir: Path
    """What must survive a restart: the authority, models sent by devices."""
    cache_dir: Path
    """What can be made again: tails, optimised models."""
    identity: IdentityFiles
    listen: HostPort = HostPort("0.0.0.0:7443")
    """Where devices dial in (TLS, both sides authenticated); port 0: the system chooses."""
    enroll_listen: HostPort | None = HostPort("0.0.0.0:7444")
    """Where devices enrol (`isthmus enroll`), open only while a one-time token of `isthmus-cloud token` lives; port 0:
    the system chooses, the log names it. null: never."""
    certificate_days: Annotated[float, msgspec.Meta(gt=0, le=3650)] = 30.0
    """Days that a certificate made at enrolment or renewal is good; renewed after two thirds. 30: a device may be off
    for ten days, and a key that was copied and not revoked is of no use after a month."""
    budget_bytes: _Bytes = 4 << 30
    """Bytes that opened segments may take in memory; beyond it the least used are closed. 4 GiB fits a small server."""
    models_bytes: _Bytes = 16 << 30
    """Bytes that models sent by devices may take on disk, in state_dir; beyond it those that no device uses are
    removed, oldest first, and a model that still does not fit is refused. 16 GiB: some hundred ResNet-50."""
    http: HostPort | None = HostPort("127.0.0.1:8081")
    """Health and metrics; loopback, since callers are not authenticated. null: off."""
    limits: Limits = Limits()
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Threads that run a segment; auto: what affinity and quota leave."""


def load_config(path: Path, env: Mapping[str, str]) -> CompanionConfig:
    """The configuration in `path` with the overrides in `env`.

    ConfigError names the file and line (or the variable), the path of the key and what was expected.
    """
    return load_yaml(path, CompanionConfig, env=env)
