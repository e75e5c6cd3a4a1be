"""`isthmus enroll`: this device's key, made here, and its certificate, from a companion, with a one-time token."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from agent.enrolment import NewIdentity, enrol
from split.errors import IdentityError
from split.identity.contexts import Identity
from split.identity.credentials import Credentials
from split.identity.files import CERT_MODE, make_folder, switch_pair, write_whole
from split.identity.tokens import read_token
from split.profiles.address import HostPort


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token", required=True, help="what `isthmus-cloud token` printed; -: from standard input")
    parser.add_argument(
        "--companion",
        required=True,
        type=_host_port,
        metavar="HOST:PORT",
        help="its enroll_listen, by default port 7444",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help="write where `identity` of this configuration says")
    where.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="write cert.pem, key.pem and ca.pem there (default, without --config: ./identity)",
    )
    parser.add_argument("--force", action="store_true", help="replace an identity that is there")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Enrol and write the files; IsthmusError, and nothing written, when it cannot be."""
    identity = _paths(args)
    token = read_token(sys.stdin.readline() if args.token == "-" else args.token)
    _require_place(identity, force=args.force)  # before the token is used up
    made = asyncio.run(enrol(token, args.companion))
    _write(identity, made)
    warning = Credentials(identity, "device").require()
    if args.json:
        shown = {"name": made.name, "cert": str(identity.cert), "key": str(identity.key), "ca": str(identity.ca)}
        print(json.dumps(shown, indent=2))
    else:
        print(f"enrolled as: {made.name}")
        print(f"certificate: {identity.cert}\nkey (keep it secret): {identity.key}\nauthority: {identity.ca}")
    if warning:
        print(f"isthmus: {warning}", file=sys.stderr)
    return 0


def _paths(args: argparse.Namespace) -> Identity:
    if args.config is None:
        folder = args.output or Path("identity")
        return Identity(cert=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem")
    from agent.config import load_config

    paths = load_config(args.config, os.environ).identity
    if paths is None:
        raise IdentityError(
            f"{args.config} says nothing of `identity`: set identity.cert, identity.key and identity.ca to where the "
            "files shall lie, or give -o DIR"
        )
    return Identity(cert=paths.cert, key=paths.key, ca=paths.ca)


def _require_place(identity: Identity, *, force: bool) -> None:
    for path in (identity.cert, identity.key, identity.ca):
        if path.exists() and not force:
            raise IdentityError(f"{path} exists already and is not overwritten: this device has an identity (--force)")
        make_folder(path.parent)


def _write(identity: Identity, made: NewIdentity) -> None:
    """The authority first: without the pair it serves nobody, and the pair is switched as one."""
    write_whole(identity.ca, made.authority, mode=CERT_MODE)
    switch_pair(identity, cert=made.chain, key=made.key)


def _host_port(text: str) -> HostPort:
    try:
        return HostPort(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
