"""`isthmus-cloud`: the companion and its authority. Data on stdout, everything else on stderr; exit 0, 1 failed,
2 usage, 78 bad config. The runtime is imported only by `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from split.errors import ConfigError, IsthmusError

EX_CONFIG = 78  # sysexits.h


def main() -> None:
    """Entry point of the program `isthmus-cloud`."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before onnxruntime is imported, here and in child processes
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is; why: `agent/cli.py`
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Exit status of one call."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except ConfigError as error:
        print(f"isthmus-cloud: {error}", file=sys.stderr)
        return EX_CONFIG
    except IsthmusError as error:
        print(f"isthmus-cloud: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="isthmus-cloud", description="Edge-cloud split inference: the cloud side.")
    from cloud.version import VERSION

    parser.add_argument("--version", action="version", version=f"isthmus-cloud {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="the companion", description="Run the companion until it is stopped.")
    serve.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    serve.set_defaults(run=_serve)
    init = commands.add_parser(
        "init",
        help="make the private authority and this companion's certificate",
        description="Make a private certificate authority in <state_dir>/authority and this companion's certificate at "
        "the paths that `identity` names. Nothing that exists is overwritten.",
    )
    init.add_argument("--name", default="companion", help="the companion's name: a-z, 0-9 and - (default: companion)")
    init.set_defaults(run=_init)
    issue = commands.add_parser(
        "issue",
        help="make a device's certificate as files",
        description="Make cert.pem, key.pem and ca.pem for a device; bring the folder to it over a safe way.",
    )
    issue.add_argument("name", metavar="NAME", help="the device's name: a-z, 0-9 and -")
    issue.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder for the three files")
    issue.set_defaults(run=_issue)
    token = commands.add_parser(
        "token",
        help="make a one-time token with which one device enrols",
        description="Print a token that lets one device enrol (`isthmus enroll`), once, before it expires. Whoever has "
        "it can become that device: carry it as you would a password.",
    )
    token.add_argument("--name", default="", help="the device's name: a-z, 0-9 and - (default: made up)")
    token.add_argument("--ttl", type=_span_s, default=3600.0, metavar="TIME", help="as 90s, 30m, 1h, 2d (default: 1h)")
    token.add_argument("--json", action="store_true", help="print JSON")
    token.set_defaults(run=_token)
    revoke = commands.add_parser(
        "revoke",
        help="take a device's certificates back",
        description="Add certificates to the revocation list. A running companion ends those devices' sessions within "
        "seconds. There is no way back but enrolling anew.",
    )
    revoke.add_argument("who", metavar="NAME|SERIAL", help="a device's name (all its certificates) or a serial in hex")
    revoke.set_defaults(run=_revoke)
    for command in (serve, init, issue, token, revoke):
        command.add_argument("--config", type=Path, required=True, metavar="FILE", help="the companion's configuration")
    return parser


def _serve(parsed: argparse.Namespace) -> int:
    from cloud.config import load_config

    config = load_config(parsed.config, os.environ)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine())
    logging.basicConfig(level=parsed.log_level.upper(), handlers=[handler])
    from cloud.daemon import serve

    asyncio.run(serve(config))
    return 0


def _init(parsed: argparse.Namespace) -> int:
    from cloud.config import load_config
    from cloud.identity import make_identity

    made = make_identity(load_config(parsed.config, os.environ), parsed.name)
    for what, path in made:
        print(f"{what}: {path}")
    print(f"next: isthmus-cloud serve --config {parsed.config}")
    print(f"then: isthmus-cloud token --config {parsed.config}   (for each device; or isthmus-cloud issue NAME -o DIR)")
    return 0


def _issue(parsed: argparse.Namespace) -> int:
    from cloud.config import load_config
    from cloud.identity import authority_folder
    from cloud.register import Register
    from split.identity.certificates import LEAF_DAYS

    config = load_config(parsed.config, os.environ)
    register = Register(authority_folder(config))
    identity = register.issue(parsed.name, "device", parsed.output, days=LEAF_DAYS)
    print(f"certificate: {identity.cert}\nkey (keep it secret): {identity.key}\nauthority: {identity.ca}")
    print("next: bring the three files to the device and name them under `identity` in its configuration")
    return 0


def _token(parsed: argparse.Namespace) -> int:
    from cloud.config import load_config
    from cloud.identity import make_token

    config = load_config(parsed.config, os.environ)
    token = make_token(config, name=parsed.name, ttl_s=parsed.ttl)
    assert config.enroll_listen is not None, "make_token has refused that"
    until = datetime.fromtimestamp(token.expires_at_s, UTC)
    if parsed.json:
        shown = {"token": token.text(), "name": parsed.name or None, "expires": f"{until:%Y-%m-%dT%H:%M:%SZ}"}
        print(json.dumps(shown, indent=2))
        return 0
    print(token.text())
    port = config.enroll_listen.port or "PORT"
    print(f"good once, until {until:%Y-%m-%d %H:%M} UTC, while `isthmus-cloud serve` runs; next:", file=sys.stderr)
    print(f"isthmus enroll --token TOKEN --companion HOST:{port} --config FILE   (on the device)", file=sys.stderr)
    return 0


def _revoke(parsed: argparse.Namespace) -> int:
    from cloud.config import load_config
    from cloud.identity import authority_folder
    from cloud.register import Register

    config = load_config(parsed.config, os.environ)
    for serial in Register(authority_folder(config)).revoke(parsed.who, now_s=time.time()):
        print(f"revoked: {serial}")
    return 0


def _span_s(text: str) -> float:
    """Seconds in `90s`, `30m`, `1h` or `2d`, from one second to thirty days; for argparse's `type`."""
    unit_s = {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(text[-1:], 0)
    try:
        seconds = float(text[:-1]) * unit_s
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 30 * 86_400:
        raise argparse.ArgumentTypeError(f"expected a time from 1s to 30d, as 90s, 30m, 1h or 2d, got {text!r}")
    return seconds


class OneLine(logging.Formatter):
    """One record, one line, whatever a peer put into a message; UTC, tracebacks folded in."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


if __name__ == "__main__":
    main()
