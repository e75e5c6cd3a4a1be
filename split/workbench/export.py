"""From a PyTorch module to an ONNX file that computes the same: `python -P -m split.workbench.export FACTORY …`.

A process of its own, since it runs the user's code and imports torch (no other module of the programs does). The
module is traced by `torch.export` in evaluation mode, the file is run against it before it takes its name, and what
happened is written as one JSON object to `--result`: `{"error": TEXT}` or what `export_module` returns.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from split.errors import EngineFailed, InvalidRequest, IsthmusError, UnsupportedRequest
from split.tensor import NUMPY_DTYPES, Array, TensorSpec, dtype_name, relative_difference

if TYPE_CHECKING:
    from split.graph.model import Model

RELATIVE_DIFFERENCE_MAX: Final = 1e-4
"""Between module and file: two frameworks sum in different orders. Modules of a hundred layers were seen at 1e-6 to
1e-5; a layer exported wrong is off by far more than 1e-4."""
BATCHES: Final = (1, 2, 5)
"""Verified at each; 1 is what most requests have, and the one that tracing likes to fix by mistake."""
TRACED_BATCH: Final = 2
"""torch.export takes a size of 0 or 1 for a constant of the model."""
ONE_FILE_BYTES_MAX: Final = 1_900_000_000
"""Protobuf ends at 2 GiB; above this the weights go to `<file>.data` beside the model."""

Report = dict[str, Any]

_FIXED_BATCH: Final = "--fixed-batch exports it for the given sizes alone"


def parse_input(text: str) -> TensorSpec:
    """`[NAME=]SHAPE[:DTYPE]`, for example `1x3x224x224` or `ids=1x16:INT64`; the empty shape is a scalar.

    No name is the empty name; the default dtype is FP32. InvalidRequest for anything else.
    """
    name, _, rest = text.rpartition("=")
    shape_text, colon, dtype = rest.partition(":")
    dtype = dtype if colon else "FP32"
    if dtype not in NUMPY_DTYPES or dtype == "BYTES":
        known = ", ".join(known for known in NUMPY_DTYPES if known != "BYTES")
        raise InvalidRequest(f"input {text!r} has the element type {dtype!r}; expected one of {known}")
    dims = shape_text.split("x") if shape_text else []
    if not all(dim.isascii() and dim.isdigit() and int(dim) > 0 for dim in dims):
        raise InvalidRequest(
            f"input {text!r} has the shape {shape_text!r}; expected sizes of at least 1 with x between, as 1x3x224x224"
        )
    return TensorSpec(name=name, dtype=dtype, shape=tuple(int(dim) for dim in dims))


def export_module(
    factory: str,
    inputs: Sequence[TensorSpec],
    out: Path,
    *,
    opset: int | None = None,
    fixed_batch: bool = False,
    one_file_bytes_max: int = ONE_FILE_BYTES_MAX,
    on_progress: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Write what `factory` (`PKG.MODULE:NAME`, a module or what returns one) makes, for these inputs, to `out`.

    `inputs`: in the order of `forward`'s parameters, whose names they get where they have none. Unless `fixed_batch`,
    the first dim of the first input is the batch and stays open, in every input that begins with the same size.
    `opset`: None for the one that torch's exporter is built for. `one_file_bytes_max`: more bytes of weights than this
    go to a file of their own, `<out>.data`. Returns `{"inputs", "outputs", "opset", "max_rel", "batches"}`, specs as
    texts. Nothing is written unless the file computes what the module computes.

    UnsupportedRequest without torch; InvalidRequest when the factory, its module or the inputs are wrong, or the module
    cannot be traced; EngineFailed when the file does not run or computes something else.
    """
    from split.graph.load import load_model  # onnx: not for those who only parse inputs

    torch = _import_torch()
    if not out.parent.is_dir():
        raise InvalidRequest(f"the folder {out.parent} of the output file is not there; make it first")
    on_progress("build")
    module = _build(torch, factory)
    specs = _named(module, inputs)
    batched = [not fixed_batch and bool(spec.shape) and spec.shape[0] == specs[0].shape[0] for spec in specs]
    batches = BATCHES if any(batched) else (int(specs[0].shape[0]) if specs[0].shape else 1,)

    def feeds(batch: int) -> list[Array]:
        return [_sample(spec, batch if open_dim else None) for spec, open_dim in zip(specs, batched, strict=True)]

    on_progress("run")
    _forward(torch, module, specs, feeds(int(specs[0].shape[0]) if specs[0].shape else 1))
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        fresh = Path(scratch) / out.name
        on_progress("trace")
        _trace(torch, module, specs, batched, feeds(TRACED_BATCH), fresh, opset, one_file_bytes_max)
        on_progress("verify")
        model = load_model(fresh)
        _as_asked(model, batched, opset)
        report = _verify(torch, module, specs, model, {batch: feeds(batch) for batch in batches})
        # Weights first: a model file whose weights are not there yet would be a broken one.
        for path in sorted(Path(scratch).iterdir(), key=lambda path: path == fresh):
            os.replace(path, out.parent / path.name)
    return report


def _import_torch() -> Any:
    try:
        import onnxscript  # noqa: F401  # torch's exporter is built on it and says so only after the tracing
        import torch
    except ImportError as error:
        raise UnsupportedRequest(
            f"isthmus export needs PyTorch, which cannot be imported here ({error}); "
            "install it with: pip install 'isthmus[torch]'"
        ) from None
    return torch


def _build(torch: Any, factory: str) -> Any:
    """The module in evaluation mode on the CPU."""
    place, _, name = factory.partition(":")
    if not place or not name:
        raise InvalidRequest(f"{factory!r} names no factory; expected PKG.MODULE:NAME, as in my_package.nets:make_net")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(place)
    except ImportError as error:
        raise InvalidRequest(
            f"module {place!r} cannot be imported: {error}; it is looked for in {os.getcwd()}, in $PYTHONPATH and "
            "among the packages installed here"
        ) from error
    except Exception as error:  # whatever the user's code raises
        raise InvalidRequest(f"module {place!r} fails while it is imported: {_said(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidRequest(f"module {place!r} has no {name!r}; expected a function, a class or a module there")
        found = getattr(found, part)
    if not isinstance(found, torch.nn.Module):
        if not callable(found):
            raise InvalidRequest(
                f"{factory} is {_kind(found)}; expected a torch.nn.Module, or a function that makes one"
            )
        try:
            found = found()
        except Exception as error:  # whatever the user's code raises
            raise InvalidRequest(f"{factory}() fails: {_said(error)}; a factory takes no arguments") from error
    if not isinstance(found, torch.nn.Module):
        raise InvalidRequest(f"{factory}() returns {_kind(found)}; expected a torch.nn.Module")
    return found.eval().cpu()


def _named(module: Any, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        positional += [f"input_{at}" for at in range(len(positional), len(inputs))]
    if len(inputs) > len(positional):
        raise InvalidRequest(
            f"{len(inputs)} inputs are given, and {type(module).__name__}.forward takes {len(positional)}: "
            f"{', '.join(positional)}"
        )
    names = [spec.name or name for spec, name in zip(inputs, positional, strict=False)]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"two inputs are called {name!r}; give each --input its own NAME=")
    return [TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape) for name, spec in zip(names, inputs, strict=True)]


def _sample(spec: TensorSpec, batch: int | None) -> Array:
    """Normal floats, integers and booleans 0 or 1 (a valid index, token and mask in most), from a fixed seed."""
    shape = tuple(int(dim) for dim in spec.shape)
    shape = shape if batch is None else (batch, *shape[1:])
    random = np.random.default_rng(7)
    dtype = NUMPY_DTYPES[spec.dtype]
    values = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
    return np.asarray(values).astype(dtype)


def _forward(torch: Any, module: Any, specs: Sequence[TensorSpec], feeds: Sequence[Array]) -> list[Array]:
    """The module's outputs as one flat list, in the order in which torch's exporter numbers them."""
    try:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(array.copy()) for array in feeds))
    except Exception as error:  # whatever the user's code raises
        given = ", ".join(_text(spec.name, array) for spec, array in zip(specs, feeds, strict=True))
        raise InvalidRequest(
            f"{type(module).__name__}.forward does not take {given}: {_said(error)}; see --input [NAME=]SHAPE[:DTYPE]"
        ) from error
    flat = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if leaf is not None]
    for leaf in flat:
        if not isinstance(leaf, torch.Tensor):
            raise InvalidRequest(f"{type(module).__name__}.forward returns {_kind(leaf)}; expected tensors only")
    return [leaf.detach().numpy() for leaf in flat]


def _trace(
    torch: Any,
    module: Any,
    specs: Sequence[TensorSpec],
    batched: Sequence[bool],
    feeds: Sequence[Array],
    path: Path,
    opset: int | None,
    one_file_bytes_max: int,
) -> None:
    batch = torch.export.Dim("batch", min=1)
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                tuple(torch.from_numpy(array) for array in feeds),
                dynamo=True,
                verbose=False,
                opset_version=opset,
                input_names=[spec.name for spec in specs],
                dynamic_shapes=tuple({0: batch} if open_dim else None for open_dim in batched),
            )
    except Exception as error:  # the exporter wraps whatever the tracer raises
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        hint = f"; {_FIXED_BATCH}" if any(batched) else ""
        raise InvalidRequest(f"{type(module).__name__} cannot be traced: {_said(cause)}{hint}") from error
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces of the tracing: paths of this machine, which must not travel
    size = sum(value.const_value.nbytes for value in program.model.graph.initializers.values() if value.const_value)
    program.save(path, external_data=size > one_file_bytes_max)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch tells its logs and the terminal, for pages, what the exception says in a line."""
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _as_asked(model: Model, batched: Sequence[bool], opset: int | None) -> None:
    """InvalidRequest for a wish that the exporter dropped without a word."""
    if opset is not None and model.opset != opset:
        raise InvalidRequest(
            f"torch's exporter made opset {model.opset} where {opset} was asked for; leave --opset out, or take one "
            "that onnxscript converts to"
        )
    for spec, open_dim in zip(model.inputs, batched, strict=True):
        if open_dim and isinstance(spec.shape[0], int):
            raise InvalidRequest(
                f"the batch of input {spec.name!r} is fixed to {spec.shape[0]} by what forward does with it; "
                f"{_FIXED_BATCH}"
            )


def _verify(
    torch: Any, module: Any, specs: Sequence[TensorSpec], model: Model, feeds: dict[int, list[Array]]
) -> Report:
    from split.runtime.segment import OrtEngine

    segment = OrtEngine().open(model.path, threads=1)
    worst = 0.0
    for batch, arrays in feeds.items():
        expected = _forward(torch, module, specs, arrays)
        found = segment.run(dict(zip((spec.name for spec in specs), arrays, strict=True)))
        if len(found) != len(expected):
            raise EngineFailed(
                f"the module has {len(expected)} outputs, its ONNX file {len(found)}; nothing was written"
            )
        for (name, got), wanted in zip(found.items(), expected, strict=True):
            difference = relative_difference(got, wanted)
            if not difference <= RELATIVE_DIFFERENCE_MAX:
                raise EngineFailed(
                    f"output {name!r} of the ONNX file is not that of the module at batch {batch}: {_text(name, got)} "
                    f"against {_text(name, wanted)}, relative difference {difference:.2g}, allowed "
                    f"{RELATIVE_DIFFERENCE_MAX:g}; nothing was written (does it compute with random numbers, or branch "
                    "on values?)"
                )
            worst = max(worst, difference)
    segment.close()
    return {
        "inputs": [_spec_text(spec) for spec in model.inputs],
        "outputs": [_spec_text(spec) for spec in model.outputs],
        "opset": model.opset,
        "max_rel": worst,
        "batches": list(feeds),
    }


def _text(name: str, array: Array) -> str:
    return f"{name} {dtype_name(array.dtype)}[{','.join(map(str, array.shape))}]"


def _spec_text(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype}[{','.join(map(str, spec.shape))}]"


def _kind(thing: object) -> str:
    return f"an object of type {type(thing).__name__}"


def _said(error: BaseException) -> str:
    """Type and first line, with the next one where that only announces it: what tracers say goes on for pages."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _show_progress(stage: str) -> None:
    if sys.stderr.isatty():
        print(f"{stage} …", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 after an error in `--result`."""
    parser = argparse.ArgumentParser(prog="python -P -m split.workbench.export")
    parser.add_argument("factory")
    parser.add_argument("--input", dest="inputs", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--opset", type=int)
    parser.add_argument("--fixed-batch", action="store_true")
    parsed = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # torch warns of its own internals
    result: Report
    try:
        result = export_module(
            parsed.factory,
            [parse_input(text) for text in parsed.inputs],
            parsed.out.absolute(),
            opset=parsed.opset,
            fixed_batch=parsed.fixed_batch,
            on_progress=_show_progress,
        )
    except IsthmusError as error:
        result = {"error": str(error)}
    parsed.result.write_text(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
