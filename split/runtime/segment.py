"""ONNX Runtime behind the `Engine` seam: opens model files, runs them, says what went wrong in one sentence.

Invariants: no thread spins while nothing runs, none is pinned, their number is explicit (automatic counts crash under
cpusets); the vendor's telemetry is off before the import; nothing of ONNX Runtime's own logging reaches stderr.
Together with `profiler.py` the only importer of onnxruntime. Blocking: run it on a worker thread.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from split.errors import ConfigError, EngineFailed, InvalidModel, InvalidRequest, IsthmusError
from split.runtime.allowance import usable_threads as usable_threads
from split.runtime.empties import deadly_operator
from split.runtime.engine import Stop
from split.runtime.node_times import node_times
from split.tensor import NUMPY_DTYPES, Array, Dim, Tensors, TensorSpec

if TYPE_CHECKING:
    import onnxruntime as ort

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # its wheel opens a database below ~/.cache at the first session

_QUIET: Final = 4
"""ORT's severity `fatal`: everything else becomes an exception here."""

_ARENA: Final = {
    "max_mem": 0,
    "arena_extend_strategy": 0,
    "initial_chunk_size_bytes": -1,
    "max_dead_bytes_per_chunk": -1,
}
"""Grows by powers of two: over 60 random shapes it stays within 4 MB, one that grows by what is asked for within 19."""


@functools.cache
def runtime() -> Any:
    """The runtime, imported when the first segment is opened: a process without models saves its 20 MB.

    All sessions share one arena for what they compute, since one runs at a time: nine segments of a ResNet-50 take
    32 MB less than with one each. They do not share threads: the shared pool spins, and that cannot be turned off.
    """
    import onnxruntime as ort

    ort.set_default_logger_severity(_QUIET)
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(place, ort.OrtArenaCfg(_ARENA))
    return ort


def _version() -> str:
    """Of the runtime, without importing it where its distribution has the usual name."""
    try:
        return importlib.metadata.version("onnxruntime")
    except importlib.metadata.PackageNotFoundError:  # a build for an accelerator
        return str(runtime().__version__)


_ELEMENT_TYPES: Final = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
}

PROFILED_RUNS_MAX: Final = 25

CPU_PROVIDER: Final = "CPUExecutionProvider"


_ONE_RELU: Final = bytes.fromhex(
    "08083a350a0e0a0178120179220452656c753a001201675a0f0a0178120a0a08080112040a020801"
    "620f0a0179120a0a08080112040a02080142040a00100d"
)
"""An ONNX model: float[1] x → Relu → float[1] y, opset 13."""
_ONE: Final = np.ones(1, np.float32)


def usable_providers() -> tuple[str, ...]:
    """Execution providers that start here and take a node of a one-operator model; the CPU one is last.

    Some are listed and do nothing (`AzureExecutionProvider` in the plain wheel), others need a driver that is missing.
    """
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = _QUIET
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    usable: dict[str, None] = {}
    for provider in ort.get_available_providers():
        try:
            session = ort.InferenceSession(_ONE_RELU, options, providers=[provider])
        except Exception:  # pybind's exceptions share no base class but this; a driver that is missing is an answer
            continue
        usable |= dict.fromkeys(_landed_on(session))
    return tuple(sorted(usable, key=lambda provider: provider == CPU_PROVIDER))


class OrtEngine:
    """Opens segments in ONNX Runtime.

    `providers`: execution providers, first choice first; the CPU one is always added as the last. ConfigError for one
    that this build of onnxruntime does not have: a silent fall back to the CPU is the classic surprise.
    """

    def __init__(self, providers: Sequence[str] = (CPU_PROVIDER,)) -> None:
        wanted = [provider for provider in providers if provider != CPU_PROVIDER]
        available = runtime().get_available_providers() if wanted else []
        for provider in wanted:
            if provider not in available:
                raise ConfigError(
                    f"execution provider {provider} is not in this build of onnxruntime {_version()}, which has "
                    f"{', '.join(available)}; install the build that has it or remove it from the configuration"
                )
        self._providers = [*dict.fromkeys((*providers, CPU_PROVIDER))]

    @property
    def name(self) -> str:
        """With what it runs on beside the processor: times and results are another engine's."""
        beside = [provider.removesuffix("ExecutionProvider") for provider in self._providers[:-1]]
        return " ".join((f"onnxruntime {_version()} {platform.machine()}", *beside))

    @property
    def accelerated(self) -> bool:
        """Whether the processor takes only what others leave. Nothing is optimised for them beforehand: what the
        runtime saves is fused for the processor."""
        return len(self._providers) > 1

    def open(self, path: Path, *, threads: int, spin_us: int = 0) -> OrtSegment:
        """Open a model file; external data is looked for beside it, never in the working directory.

        `threads`: intra-op threads, ≥ 1. `spin_us`: how long one waits awake for the next operator of a run.
        InvalidModel when the file is not there, is no model, uses operators or element types this runtime does not
        have; EngineFailed when a provider that was asked for does not start.
        """
        return self._opened(path, self._options(threads, spin_us))

    def open_optimised(self, path: Path, *, threads: int, spin_us: int = 0, prepack: bool) -> OrtSegment:
        """Open what `optimise` wrote, as it is: its weights are mapped, shared with every session of the same file.

        `prepack`: let kernels lay out matrices their way at the start (mapped, too, when they were saved like that);
        without it opening is quicker and every run does it. Errors as in `open`.
        """
        options = self._options(threads, spin_us)
        # Optimising again what is optimised fails on names, and would copy the weights.
        options.graph_optimization_level = runtime().GraphOptimizationLevel.ORT_DISABLE_ALL
        if not prepack:
            options.add_session_config_entry("session.disable_prepacking", "1")
        return self._opened(path, options)

    def optimise(self, source: Path, target: Path, *, weights: str, threads: int) -> OrtSegment:
        """Open `source` and write it down as optimised for this machine: `target`, with what has 1 KiB and more in the
        file `weights` beside it, matrices once more as the kernels want them. Errors as in `open`."""
        options = self._options(threads)
        options.optimized_model_filepath = str(target.absolute())
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
        return self._opened(source, options)

    def node_times(
        self, path: Path, feeds: Mapping[str, Array], *, threads: int, budget_s: float
    ) -> list[tuple[str, float]]:
        """(node as it is named after optimising, ms) in the order of execution, by the runtime's own profile.

        At least two runs after a first one, then as many as fit into the budget, at most `PROFILED_RUNS_MAX`; the
        model is opened and closed again. Errors as in `open` and `OrtSegment.run`.
        """
        options = self._options(threads)
        with tempfile.TemporaryDirectory(prefix="isthmus-trace-") as folder:
            options.enable_profiling = True
            options.profile_file_prefix = f"{folder}/trace"
            segment = self._opened(path, options)
            end_at_s = time.monotonic() + budget_s
            for number in range(PROFILED_RUNS_MAX):
                segment.run(feeds)
                if number >= 2 and time.monotonic() >= end_at_s:
                    break
            return node_times(segment.close_profiled().read_bytes())

    def _options(self, threads: int, spin_us: int = 0) -> ort.SessionOptions:
        assert threads >= 1, threads
        assert spin_us >= 0, spin_us
        ort = runtime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = _QUIET
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin_us else "0")
        if spin_us:
            options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin_us))
            # Without it they spin on after the run: six times the CPU per paced request (46 ms instead of 8).
            options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.use_env_allocators", "1")
        return options

    def trim(self) -> None:
        """Give back what the arena holds and no session uses: after a segment was closed."""
        ort = runtime()
        options = self._options(1)
        shrink = ort.RunOptions()
        shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        ort.InferenceSession(_ONE_RELU, options, providers=[CPU_PROVIDER]).run(["y"], {"x": _ONE}, shrink)

    def _opened(self, path: Path, options: ort.SessionOptions) -> OrtSegment:
        if not path.is_file():
            raise InvalidModel(f"{path} is not a file; expected an ONNX model there")
        try:
            session = runtime().InferenceSession(str(path.absolute()), options, providers=self._providers)
        except Exception as error:  # pybind's exceptions share no base class but this
            raise InvalidModel(f"onnxruntime {_version()} refuses {path}: {_sentence(error)}") from None
        session.disable_fallback()
        missing = [provider for provider in self._providers if provider not in session.get_providers()]
        if missing:
            raise EngineFailed(f"{', '.join(missing)} did not start for {path}; check its driver or remove it")
        return OrtSegment(session, path)


class OrtSegment:
    """A head, a tail or a whole model in an ONNX Runtime session. `run` may be called from several threads."""

    def __init__(self, session: ort.InferenceSession, path: Path) -> None:
        self._session: ort.InferenceSession | None = session
        self.path: Final = path
        self.input_specs: Final = tuple(_spec(value, path) for value in session.get_inputs())
        self.output_specs: Final = tuple(_spec(value, path) for value in session.get_outputs())
        self._specs = {spec.name: spec for spec in self.input_specs}
        self._checks = [(spec.name, NUMPY_DTYPES[spec.dtype], spec) for spec in self.input_specs]
        self._plain = all(spec.dtype != "BYTES" for spec in self.input_specs)
        self._outputs = [spec.name for spec in self.output_specs]
        self._texts = frozenset(spec.name for spec in self.output_specs if spec.dtype == "BYTES")
        self._deadly = deadly_operator(path)

    @property
    def inputs(self) -> tuple[str, ...]:
        """As `Segment.inputs`."""
        return tuple(spec.name for spec in self.input_specs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """As `Segment.outputs`."""
        return tuple(self._outputs)

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, stop: Stop | None = None
    ) -> Tensors:
        """Run once; `outputs` names what is wanted (None: everything), in that order.

        Feeds must be exactly the inputs, of their dtype and shape (symbolic dims take any size); any memory layout
        and byte order will do. BYTES: arrays of `bytes` or `str`, UTF-8 (ONNX strings are text); BYTES outputs are
        object arrays of `bytes`. InvalidRequest for feeds the model does not take, EngineFailed for anything else.
        What is stopped ends with the node that runs.
        """
        session = self._session
        if session is None:
            raise EngineFailed(f"segment {self.path} is closed")
        wanted = self._outputs if outputs is None else list(outputs)
        if not wanted:
            return {}
        try:
            options = None
            if stop is not None:
                options = runtime().RunOptions()
                stop.begins(functools.partial(setattr, options, "terminate", True))
            results = session.run(wanted, feeds if self._fits(feeds) else self._prepared(feeds), options)
        except IsthmusError:
            raise
        except Exception as error:  # pybind's exceptions share no base class but this
            unknown = [name for name in wanted if name not in self._outputs]
            if unknown:
                raise InvalidRequest(
                    f"output {unknown[0]!r} is not made here; the outputs are {', '.join(map(repr, self._outputs))}"
                ) from None
            kind = InvalidRequest if type(error).__name__ == "InvalidArgument" else EngineFailed
            raise kind(f"onnxruntime could not run {self.path.name}: {_sentence(error)}") from None
        made = dict(zip(wanted, results, strict=True))
        if self._texts:
            made |= {name: _as_bytes(made[name]) for name in self._texts.intersection(made)}
        return made

    def close_profiled(self) -> Path:
        """Close a segment that was opened with profiling; the file of its trace."""
        assert self._session is not None
        trace = Path(self._session.end_profiling())
        self.close()
        return trace

    def close(self) -> None:
        """Let the session go; a run under way on another thread still ends well."""
        self._session = None

    def _fits(self, feeds: Mapping[str, Array]) -> bool:
        """True when the feeds can go in as they are: the usual case, kept cheap."""
        if not self._plain or type(feeds) is not dict or len(feeds) != len(self._checks):
            return False
        for name, dtype, spec in self._checks:
            array = feeds.get(name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or not array.flags.c_contiguous:
                return False
            if array.shape != spec.shape and self._refusal(spec, array) is not None:
                return False
        return True

    def _prepared(self, feeds: Mapping[str, Array]) -> Tensors:
        """Checked, dense, native-endian feeds; InvalidRequest says what was expected and what came."""
        for name in feeds:
            if name not in self._specs:
                raise InvalidRequest(f"input {name!r} is unknown; the inputs are {', '.join(map(repr, self._specs))}")
        ready: Tensors = {}
        for name, spec in self._specs.items():
            array = feeds.get(name)
            if array is None:
                raise InvalidRequest(f"input {name!r} is missing; the inputs are {', '.join(map(repr, self._specs))}")
            array = np.asarray(array)
            refusal = self._refusal(spec, array)
            if refusal is not None:
                raise InvalidRequest(refusal)
            if spec.dtype == "BYTES":
                ready[name] = _as_text(array, name)
            else:
                # np.require and ascontiguousarray would turn a scalar into a vector.
                ready[name] = np.asarray(array, dtype=NUMPY_DTYPES[spec.dtype], order="C")
        return ready

    def _refusal(self, spec: TensorSpec, array: Array) -> str | None:
        """Why this tensor cannot go in, as a sentence."""
        refusal = spec.refuse(array)
        if refusal is None and self._deadly is not None and array.size == 0 and 0 not in spec.shape:
            return (
                f"tensor {spec.name!r} is empty ({list(array.shape)}), which onnxruntime does not survive in a model "
                f"with the operator {self._deadly}; give it at least one of everything"
            )
        return refusal


def _spec(value: Any, path: Path) -> TensorSpec:
    """The spec of a session's input or output; InvalidModel for what is no tensor of a supported type."""
    element = re.fullmatch(r"tensor\((\w+)\)", value.type)
    if element is None or element[1] not in _ELEMENT_TYPES:
        raise InvalidModel(
            f"{path}: {value.name!r} is a {value.type}; inputs and outputs must be tensors of "
            f"{', '.join(_ELEMENT_TYPES)}"
        )
    shape: list[Dim] = [-1 if dim is None else dim for dim in value.shape]
    return TensorSpec(name=value.name, dtype=_ELEMENT_TYPES[element[1]], shape=tuple(shape))


def _landed_on(session: ort.InferenceSession) -> tuple[str, ...]:
    """Providers that took nodes, in the session's order; what was registered, where the runtime cannot tell."""
    registered = session.get_providers()
    assignment = getattr(session, "get_provider_graph_assignment_info", None)  # since onnxruntime 1.24
    if assignment is None:
        return tuple(registered)
    taken = {subgraph.ep_name for subgraph in assignment()}
    return tuple(provider for provider in registered if provider in taken) or tuple(registered[-1:])


def _as_text(array: Array, name: str) -> Array:
    """Object array of `str`: given `bytes`, ONNX Runtime would feed their Python repr to the model."""
    text = np.empty(array.shape, dtype=object)
    try:
        text.ravel()[:] = [v.decode() if isinstance(v, bytes) else str(v) for v in array.ravel()]
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"tensor {name!r} must hold UTF-8 text, got a byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from None
    return text


def _as_bytes(array: Array) -> Array:
    data = np.empty(array.shape, dtype=object)
    data.ravel()[:] = [v.encode() if isinstance(v, str) else v for v in array.ravel()]
    return data


_NOISE: Final = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : "  # code
    r"|Non-zero status code returned while running "
    r"|Name:'' "
    r"|Status Message: (?:/\S+:\d+ .*? was false\. )?"  # source file, C++ signature, failed condition
    r"|Status Message: "
    r"|/\S+\.(?:cc|h):\d+ \S+(?:\([^)]*\))? ?"
    r"| ?Please fix either the inputs/outputs or the model\."
    r"|This is an invalid model\. "
    r"|Load model from \S+ failed: ?"
)


def _sentence(error: Exception) -> str:
    """ONNX Runtime's message as one sentence: no codes, no C++ signatures, no source paths, at most 300 characters."""
    text = " ".join(_NOISE.sub("", str(error)).split())
    return (text[:297] + "…" if len(text) > 298 else text).strip(" .") or type(error).__name__
