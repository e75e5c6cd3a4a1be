"""Options that several tools have, checked while the command line is read: what is malformed is a mistake of usage."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from agent.http_client import DEFAULT_URL, DaemonClient
from split.errors import InvalidRequest


def add_url_argument(parser: argparse.ArgumentParser) -> None:
    """`--url`, which `DaemonClient` takes."""
    parser.add_argument(
        "--url", type=daemon_url, default=DEFAULT_URL, help="http://HOST:PORT or unix:///PATH (default: %(default)s)"
    )


def positive(text: str) -> float:
    """A finite number above 0; for argparse's `type`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def within(least: float, most: float) -> Callable[[str], float]:
    """A number in these bounds, which are what a model of links and devices can still be asked; for argparse's
    `type`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a number from {least:g} to {most:g}, got {text!r}")
        return value

    return number


def not_negative(text: str) -> float:
    """A finite number, 0 or more; for argparse's `type`."""
    return 0.0 if text.strip() in ("0", "0.0") else positive(text)


def service_url(text: str) -> str:
    """As `daemon_url`, for `--service`."""
    return daemon_url(text, option="--service")


def daemon_url(text: str, *, option: str = "--url") -> str:
    """An address that `DaemonClient` takes; for argparse's `type`."""
    try:
        DaemonClient(text, option=option)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
