"""`isthmus`: the daemon and the tools. Data on stdout, everything else on stderr.

Exit status: 0, 1 failed, 2 usage, 78 bad configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from split.errors import ConfigError, IsthmusError

EX_CONFIG = 78  # sysexits.h

COMMANDS = {
    "cuts": "where a model can be parted, and what would travel",
    "check": "run head ∘ tail against the whole for each cut",
    "profile": "measure this device on a model",
    "calibrate": "learn from inputs how to code what crosses the cuts, and what that costs",
    "plan": "what would be chosen, stage by stage, and why",
    "infer": "send one request to the running daemon",
    "status": "the daemon now",
    "explain": "why a request went where it went",
    "audit": "what other ways of deciding would have made of recorded traffic",
    "export": "a PyTorch module to ONNX, verified (needs the extra torch)",
    "fingerprint": "what this device is and can do",
    "validate": "hold a contract against a running service, or the model beside it",
    "enroll": "get this device's certificate from a companion, with a one-time token",
}
"""Each is a module of `agent.commands`, imported only when it is called: `status` need not wait for onnx."""


NUMPY_THREADS = ("OPENBLAS_NUM_THREADS", "1")
"""Before numpy is imported, here and in child processes. Its matrix products are small ones (codec klt's transforms),
and BLAS threads that meet busy cores spin until they get one: decoding 16,000 coefficients then took 37 ms instead of
0.14 (median of 60, two cores that eight processes share)."""


def main() -> None:
    """Entry point of the program `isthmus`."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    if "fingerprint" not in sys.argv[1:2]:  # which measures all cores
        os.environ.setdefault(*NUMPY_THREADS)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Exit status of one call."""
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    parser = argparse.ArgumentParser(prog="isthmus", description="Edge-cloud split inference: the device side.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    agent = commands.add_parser("agent", help="the daemon", description="Run the daemon until it is stopped.")
    agent.add_argument("--config", type=Path, required=True, metavar="FILE", help="its configuration (YAML)")
    agent.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    modules: dict[str, ModuleType] = {}
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            modules[name] = importlib.import_module(f"agent.commands.{name}")
            modules[name].add_arguments(command)
    parsed = parser.parse_args(arguments)
    try:
        if parsed.version:
            from agent.version import VERSION

            print(f"isthmus {VERSION}")
            return 0
        if parsed.command is None:
            parser.print_help(sys.stderr)
            return 2
        if parsed.command == "agent":
            return _agent(parsed)
        return int(modules[parsed.command].run(parsed))
    except ConfigError as error:
        _complain(error)
        return EX_CONFIG
    except IsthmusError as error:
        _complain(error)
        return 1
    except BrokenPipeError:  # `isthmus cuts … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _complain(error: IsthmusError) -> None:
    """Some of it may be a service's own words: none of them reaches the terminal as control characters."""
    from agent.log_lines import printable

    print("\n".join(map(printable, f"isthmus: {error}".split("\n"))), file=sys.stderr)


def _agent(parsed: argparse.Namespace) -> int:
    from agent.config import load_config
    from agent.daemon import run as run_daemon
    from agent.log_lines import log_to_stderr

    log_to_stderr(parsed.log_level)
    asyncio.run(run_daemon(load_config(parsed.config, os.environ)))
    return 0


if __name__ == "__main__":
    main()
