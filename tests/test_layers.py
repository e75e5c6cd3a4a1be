"""The layers of DESIGN §3 as a table: what a place may not import, and why. A place that is gone fails, too.

A place is a package or module; the rule holds for everything below it, lazy imports included. Imports that only type
checkers see (`if TYPE_CHECKING`) bind nothing at run time and are not counted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]

PURE: Final = "bytes and now_s come in, values go out: no clock, no task, no socket"
SERVING: Final = "a serving process never imports it: cutting is a child process's work, and the import costs 60 MB"
SIDES: Final = "agent and cloud meet only on the wire"
LOWER: Final = "a lower layer does not know the one above"
EFFECTS: Final = "pure code does not know who runs it"

_EFFECTFUL: Final = ("asyncio", "time", "socket", "ssl", "threading", "subprocess", "multiprocessing", "selectors")
_ABOVE_ENGINES: Final = ("split.identity", "split.runtime", "split.transport", "split.workbench", "agent", "cloud")


def _pure(*more: str) -> dict[str, str]:
    return dict.fromkeys(_EFFECTFUL, PURE) | dict.fromkeys((*_ABOVE_ENGINES, *more), EFFECTS)


_NO_MODEL_TOOLS: Final = {"onnx": SERVING, "onnx_ir": SERVING, "torch": SERVING}

FORBIDDEN: Final[dict[str, dict[str, str]]] = {
    "split/errors.py": {"split": LOWER, "agent": LOWER, "cloud": LOWER},
    "split/ids.py": {"split": LOWER, "agent": LOWER, "cloud": LOWER},
    "split/files.py": {"split": LOWER, "agent": LOWER, "cloud": LOWER, "asyncio": "it blocks: threads call it"},
    "split/tensor.py": _pure("split.graph", "split.codec", "split.wire", "split.oip", "split.plan", "split.profiles"),
    "split/profiles": _pure("split.graph", "split.codec", "split.wire", "split.oip", "split.plan") | _NO_MODEL_TOOLS,
    "split/graph": _pure("split.codec", "split.wire", "split.oip", "split.plan") | {"torch": SERVING},
    "split/codec": _pure("split.graph", "split.wire", "split.oip", "split.plan") | _NO_MODEL_TOOLS,
    "split/wire": _pure("split.graph", "split.codec", "split.oip", "split.plan")
    | _NO_MODEL_TOOLS
    | {"numpy": "the protocol carries bytes; what they mean is the codec's business"},
    "split/oip": _pure("split.graph", "split.codec", "split.wire", "split.plan") | _NO_MODEL_TOOLS,
    "split/plan": _pure("split.wire", "split.oip", "split.codec") | _NO_MODEL_TOOLS,
    "split/identity": {"split.runtime": LOWER, "split.transport": LOWER, "agent": LOWER, "cloud": LOWER}
    | _NO_MODEL_TOOLS,
    "split/runtime": {
        "split.transport": "running a segment has nothing to do with carrying bytes",
        "split.wire": "running a segment has nothing to do with carrying bytes",
        "asyncio": "a segment runs on a worker thread; whoever waits for it is another layer",
        "split.workbench": LOWER,
        "agent": LOWER,
        "cloud": LOWER,
    }
    | _NO_MODEL_TOOLS,
    "split/transport": {
        "split.runtime": "carrying bytes has nothing to do with running a segment",
        "split.graph": "carrying bytes has nothing to do with what they mean",
        "split.workbench": LOWER,
        "agent": LOWER,
        "cloud": LOWER,
        "onnxruntime": "only split/runtime imports the runtime",
    }
    | _NO_MODEL_TOOLS,
    "split/workbench": {
        "split.transport": "offline work talks to nobody",
        "agent": LOWER,
        "cloud": LOWER,
    },
    "split/systemd.py": {"split": "it knows nothing of ours", "agent": LOWER, "cloud": LOWER} | _NO_MODEL_TOOLS,
    "agent": {"cloud": SIDES, "onnxruntime": "only split/runtime imports the runtime"} | _NO_MODEL_TOOLS,
    "agent/replay": dict.fromkeys(_EFFECTFUL, PURE),
    "cloud": {"agent": SIDES, "onnxruntime": "only split/runtime imports the runtime"} | _NO_MODEL_TOOLS,
}

EXCEPTIONS: Final[dict[tuple[str, str], str]] = {
    ("split/codec/packing.py", "threading"): "a zstd context per thread; nothing waits for another thread",
    ("split/codec/levels.py", "threading"): "one store for all threads; its lock is held for a few dict operations",
    (
        "split/graph/step.py",
        "subprocess",
    ): "one pass of onnx may hang or crash; nothing else of the file is tried apart",
}
"""(file, import) that a rule would forbid, and why it may stand."""

ALLOWED_BELOW: Final = {"split": ("split.errors", "split.ids")}
"""Words may import words: where a rule forbids `split`, these stay allowed."""


def imports(source: str, package: str) -> Iterator[str]:
    """Every module that the source imports, absolute; names out of `from x import y` count as `x` and `x.y`."""

    def walk(nodes: list[ast.stmt] | list[ast.AST]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*parents, *([node.module] if node.module else [])])
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(list(node.orelse))
            else:
                yield from walk(list(ast.iter_child_nodes(node)))

    yield from walk(list(ast.parse(source).body))


def covers(forbidden: str, module: str) -> bool:
    return module == forbidden or module.startswith(f"{forbidden}.")


@pytest.mark.parametrize("place", FORBIDDEN)
def test_a_place_imports_nothing_that_its_layer_forbids(place: str) -> None:
    path = ROOT / place
    assert path.exists(), f"{place} is gone: take its row out of the table, or put it back"
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files, f"{place} holds no module"
    broken = []
    for file in files:
        name = file.relative_to(ROOT)
        package = ".".join(name.parent.parts)
        for module in imports(file.read_text(), package):
            for forbidden, why in FORBIDDEN[place].items():
                allowed = any(covers(word, module) for word in ALLOWED_BELOW.get(forbidden, ()))
                if covers(forbidden, module) and not allowed and (str(name), module) not in EXCEPTIONS:
                    broken.append(f"{name} imports {module}: {why}")
    assert not broken, "\n".join(sorted(set(broken)))


def test_only_the_runtime_layer_imports_onnxruntime() -> None:
    importers = {
        file.relative_to(ROOT).parts[:2]
        for folder in ("agent", "cloud", "split")
        for file in (ROOT / folder).rglob("*.py")
        if any(covers("onnxruntime", module) for module in imports(file.read_text(), ""))
    }
    assert importers == {("split", "runtime")}


def test_only_the_export_imports_torch() -> None:
    importers = {
        str(file.relative_to(ROOT))
        for folder in ("agent", "cloud", "split")
        for file in (ROOT / folder).rglob("*.py")
        if any(covers("torch", module) or covers("onnxscript", module) for module in imports(file.read_text(), ""))
    }
    assert importers == {"split/workbench/export.py"}


def test_the_reader_of_imports_sees_lazy_relative_and_submodule_imports() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import torch
def lazy():
    import numpy.typing
    from . import frames
    from ..plan import decide
"""
    found = set(imports(source, "split.wire"))
    assert {"numpy.typing", "split.wire.frames", "split.plan.decide"} <= found
    assert "torch" not in found
