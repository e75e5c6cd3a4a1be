"""A model's contract: what it promises and demands, as written in `contract.yaml` beside its versions (DESIGN §7).

Facts only: nothing here decides. Every struct is checked when built, so that a bad contract cannot exist.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol

import msgspec

from split.errors import ConfigError
from split.profiles.boxes import Boxes, check_boxes
from split.profiles.image_spec import ImageSpec
from split.profiles.load import load_yaml
from split.tensor import NUMPY_DTYPES, TensorSpec

CONTRACT_FILE: Final = "contract.yaml"

Privacy = Literal["any", "no-raw-input", "local-only"]
"""any: everything may leave · no-raw-input: no model input leaves, coded or not · local-only: nothing leaves."""

Codec = Literal["raw", "fp16", "int8", "klt", "encoded", "jpeg", "webp"]
"""Permissions, not offers: a codec that this program does not have is never chosen."""

Measure = Literal["kl", "relative", "rms", "cosine", "top1", "boxes"]

PRIVACY_ORDER: Final[tuple[Privacy, ...]] = ("any", "no-raw-input", "local-only")
"""From the loosest to the strictest."""

ACCELERATOR: Final = re.compile(r"[a-z][a-z0-9_-]*")
_Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
LATENCY_MIN_MS: Final = 0.1
"""No request passes a daemon faster, whatever the model: what is less was meant to be seconds, or is a slip."""
THREADS_MAX: Final = 1024
"""More than the cores of any machine at hand; 100,000 kill the runtime (onnxruntime 1.32), and the daemon with it."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def __post_init__(self) -> None:
        """Refuse NaN and infinity, which pass every bound above (`.nan` and `.inf` are YAML)."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")


class Resource(_Part, frozen=True, kw_only=True):
    memory_bytes: _Count | None = None
    """Bytes of weights that a head may have on the device; none stated: only the device's own budget counts. What runs
    the whole here, local and the way out of a split (`fallback.strategy: local`), is not bound by it."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=THREADS_MAX)] | Literal["auto"] = "auto"
    """Intra-op threads; auto: what affinity and quota leave, as measured."""
    accelerators: tuple[str, ...] = ("cpu",)
    """Where it may run here, first choice first: cpu, cuda, tensorrt, openvino, xnnpack … A host that has none of them
    does not serve it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.accelerators or not all(ACCELERATOR.fullmatch(name) for name in self.accelerators):
            raise ValueError(f"accelerators must be one or more names as cpu, cuda, got {list(self.accelerators)}")


class Weights(_Part, frozen=True, kw_only=True):
    """What counts, relative to each other; only their ratio matters."""

    latency: _NotNegative = 1.0
    """Of the time from request to answer."""
    throughput: _NotNegative = 0.0
    """Of the time that the busiest of device, link and companion spends on a request."""
    energy: _NotNegative = 0.0
    """Of the joules that the device spends above its idle power."""
    cost: _NotNegative = 0.0
    """Of the money: bytes on a metered link, seconds of the companion."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latency + self.throughput + self.energy + self.cost <= 0:
            raise ValueError("at least one weight must be above 0")

    def normalised(self) -> Weights:
        """The same ratios, summing up to 1."""
        stated = (self.latency, self.throughput, self.energy, self.cost)
        scale = 1.0 if math.isfinite(sum(stated)) else max(stated)
        total = sum(weight / scale for weight in stated)
        latency, throughput, energy, cost = (weight / scale / total for weight in stated)
        return Weights(latency=latency, throughput=throughput, energy=energy, cost=cost)


class Fallback(_Part, frozen=True, kw_only=True):
    """What happens when the companion is late or gone."""

    strategy: Literal["local", "fail", "shadow"] = "local"
    """local: the device finishes from the boundary it has; fail: a typed error; shadow: as local, and both ways are run
    on some requests and their answers compared, until they agree less often than `agreement_min`."""
    timeout_ms: _Positive | None = None
    """Longest wait for the companion, inside the deadline; none stated: as long as the local finish still fits."""
    agreement_min: _Ratio = 0.9
    """With shadow: share of compared answers that must agree; where fewer do, the device alone answers. Above 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy == "shadow" and self.agreement_min == 0:
            raise ValueError(
                "agreement_min must be above 0 with strategy shadow: at 0 answers that never agree would do; "
                "leave it out for 0.9"
            )


class Retry(_Part, frozen=True, kw_only=True):
    attempts: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2
    """How often one request may go to a companion in all, while its deadline allows: again only on another connection,
    when the one before took it with it; so bytes are spent twice only then."""


class Behaviour(_Part, frozen=True, kw_only=True):
    latency_p99_ms: Annotated[float, msgspec.Meta(ge=LATENCY_MIN_MS)] | None = None
    """Deadline of a request that names none; none stated: the daemon's `limits.default_deadline_ms`."""
    throughput_min_per_s: _NotNegative = 0.0
    """Requests a second that the service must be able to answer; `isthmus validate` holds it to that, and no
    plan is chosen that keeps device, link or companion longer than this leaves them, while another does not. 0: nothing
    asked."""
    service_class: Literal["gold", "silver", "bronze"] = msgspec.field(name="class", default="silver")
    """Who goes first when there is too much: gold, silver, bronze; and what of a plan's time is held against the
    deadline, its 99.9, 97.7 or 90 % quantile. Where `weights` states nothing, bronze saves joules and money, too."""
    weights: Weights = Weights()
    """What counts, relative to each other; only their ratio matters."""
    fallback: Fallback = Fallback()
    """What happens when the companion is late or gone."""
    retry: Retry = Retry()
    """How often a request may be sent again."""


class InputContract(_Part, frozen=True, kw_only=True):
    name: str
    """As the model has it."""
    dtype: str | None = None
    """As the protocol writes it (FP32, INT64 …); none stated: the model's own."""
    shape: tuple[Annotated[int, msgspec.Meta(ge=-1)], ...] | None = None
    """-1 where any size goes; none stated: the model's own."""
    privacy: Privacy = "any"
    """Of this input; the strictest of the model's, the input's and the request's holds."""
    encoded: ImageSpec | None = None
    """How it is made from a picture that comes as BYTES of shape [1]; none stated: it comes as a tensor only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype is not None and self.dtype not in NUMPY_DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not supported; supported are {', '.join(NUMPY_DTYPES)}")
        if self.shape is not None and 0 in self.shape:
            raise ValueError(f"shape {list(self.shape)} holds a 0; expected sizes, or -1 where any size goes")
        if self.encoded is None:
            return
        if self.dtype not in (None, "FP32"):
            raise ValueError(f"an encoded input must be FP32, got {self.dtype}")
        made = self.encoded.shape
        if self.shape is not None and (
            len(self.shape) != 4 or any(d not in (-1, m) for d, m in zip(self.shape, made, strict=True))
        ):
            raise ValueError(f"its encoded pictures become {list(made)}, which does not fit shape {list(self.shape)}")


class OutputContract(_Part, frozen=True, kw_only=True):
    name: str
    """As the model has it."""
    labels: str | None = None
    """File beside the contract with one label a line, in the order of the last axis."""


class Fidelity(_Part, frozen=True, kw_only=True):
    """How far a lossy plan's outputs may be from the unsplit model's (`split.codec.fidelity` defines the measures)."""

    measure: Measure = "relative"
    """kl: nats of the softmax; relative: max|a − b| / max|b|; rms: ‖a − b‖ / ‖b‖; cosine: 1 − cosine; top1: share of
    other winners; boxes: share of other detections."""
    bound: _NotNegative = 0.0
    """Largest value of the measure; the default allows nothing lossy."""
    boxes: Boxes | None = None
    """With measure boxes, and only there: where detections are, and which are the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measure == "boxes" and self.boxes is None:
            raise ValueError("measure boxes needs boxes beside it, which says where the outputs hold boxes and scores")
        if self.measure != "boxes" and self.boxes is not None:
            raise ValueError(f"boxes goes with measure boxes alone, the measure is {self.measure}; leave it out")

    @property
    def name(self) -> str:
        """What values of this measure are kept under: with other boxes it is another measure."""
        return self.measure if self.boxes is None else self.boxes.name

    @property
    def by(self) -> str | Boxes:
        """What `split.codec.fidelity` judges by."""
        return self.measure if self.boxes is None else self.boxes


class Data(_Part, frozen=True, kw_only=True):
    inputs: tuple[InputContract, ...] = ()
    """What is said of inputs; of one that is not listed the model's own words hold."""
    outputs: tuple[OutputContract, ...] = ()
    """What is said of outputs."""
    privacy: Privacy = "any"
    """Of the model; the strictest of the model's, the input's and the request's holds."""
    depth_min_ratio: _Ratio = 0.0
    """Share of the compute that must be done on the device before anything leaves."""
    codecs: tuple[Codec, ...] = ("raw",)
    """In what form a boundary or input may travel: permissions, not offers; one this program lacks is never chosen."""
    fidelity: Fidelity = Fidelity()
    """How far a lossy plan's outputs may be from the unsplit model's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.codecs:
            raise ValueError("codecs must name at least one (raw); to keep everything here, set privacy: local-only")
        for what, names in (
            ("input", [tensor.name for tensor in self.inputs]),
            ("output", [tensor.name for tensor in self.outputs]),
            ("codec", [str(codec) for codec in self.codecs]),
        ):
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{what} {name!r} is listed twice")


class Contract(_Part, frozen=True, kw_only=True):
    model: str = ""
    """Name in the repository; empty: that of the folder it lies in."""
    resource: Resource = Resource()
    """What it may use of the device."""
    behaviour: Behaviour = Behaviour()
    """What is expected of its answers."""
    data: Data = Data()
    """What goes in and comes out, and what of it may leave."""

    def input(self, name: str) -> InputContract | None:
        """What is said of this input; None when nothing is."""
        return next((tensor for tensor in self.data.inputs if tensor.name == name), None)

    def encoded(self) -> dict[str, ImageSpec]:
        """Input name → how it is made from a picture, for the inputs that come so."""
        return {tensor.name: tensor.encoded for tensor in self.data.inputs if tensor.encoded is not None}

    def strictest_privacy(self) -> Privacy:
        """Over the model and all its inputs."""
        return strictest(self.data.privacy, *(tensor.privacy for tensor in self.data.inputs))


class Signature(Protocol):
    """What a contract is held against: a model card is one."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...

    @property
    def outputs(self) -> Sequence[TensorSpec]: ...


def strictest(*words: Privacy) -> Privacy:
    """The strictest of these privacy words."""
    return max(words, key=PRIVACY_ORDER.index)


def load_contract(path: Path) -> Contract:
    """The contract in the YAML file `path`; ConfigError names file, line, path and what was expected."""
    return load_yaml(path, Contract)


def contract_beside(model_path: Path) -> Contract | None:
    """The contract of a model in a repository (`NAME/contract.yaml`, `NAME/1/model.onnx`); None where there is none.

    ConfigError as `load_contract`.
    """
    version = model_path.absolute().parent
    path = version.parent / CONTRACT_FILE
    # Whatever goes by that name is read: one that cannot be must not pass for none, which forbids nothing.
    return load_contract(path) if version.name.isdigit() and os.path.lexists(path) else None


def default_contract(card: Signature) -> Contract:
    """For a model that has none: its own inputs and outputs, privacy any, codec raw, latency alone counts."""
    return Contract(
        data=Data(
            inputs=tuple(
                InputContract(
                    name=spec.name,
                    dtype=spec.dtype,
                    shape=tuple(d if isinstance(d, int) and d > 0 else -1 for d in spec.shape),
                )
                for spec in card.inputs
            ),
            outputs=tuple(OutputContract(name=spec.name) for spec in card.outputs),
        )
    )


def check_contract(contract: Contract, card: Signature, *, path: Path) -> None:
    """ConfigError, naming `path`, when the contract speaks of tensors that the model does not have or has otherwise."""
    inputs = {spec.name: spec for spec in card.inputs}
    outputs = [spec.name for spec in card.outputs]
    for tensor in contract.data.inputs:
        spec = inputs.get(tensor.name)
        if spec is None:
            raise ConfigError(f"{path}: the model has no input {tensor.name!r}; it has {', '.join(inputs)}")
        if tensor.dtype not in (None, spec.dtype):
            raise ConfigError(
                f"{path}: input {tensor.name!r} is {spec.dtype} in the model, the contract says {tensor.dtype}"
            )
        if tensor.encoded is not None and spec.dtype != "FP32":
            raise ConfigError(
                f"{path}: input {tensor.name!r} is {spec.dtype} in the model; encoded pictures become FP32"
            )
        said = [] if tensor.shape is None else [tensor.shape]
        if tensor.encoded is not None:
            said.append(tensor.encoded.shape)
        for shape in said:
            known = [d if isinstance(d, int) and d > 0 else -1 for d in spec.shape]
            fits = len(shape) == len(known) and all(
                -1 in (want, own) or want == own for want, own in zip(shape, known, strict=True)
            )
            if not fits:
                raise ConfigError(
                    f"{path}: input {tensor.name!r} has shape {known} in the model, the contract says {list(shape)}"
                )
    for output in contract.data.outputs:
        if output.name not in outputs:
            raise ConfigError(f"{path}: the model has no output {output.name!r}; it has {', '.join(outputs)}")
    if contract.data.fidelity.boxes is not None:
        check_boxes(contract.data.fidelity.boxes, card.outputs, where=f"{path}: data.fidelity.boxes")


def load_labels(contract: Contract, folder: Path) -> dict[str, tuple[str, ...]]:
    """Output name → its labels, for the outputs that name a file in `folder` (one label a line, UTF-8).

    ConfigError when a file lies elsewhere, cannot be read or is not text.
    """
    labels: dict[str, tuple[str, ...]] = {}
    for output in contract.data.outputs:
        if output.labels is None:
            continue
        path = folder / output.labels
        if not path.resolve().is_relative_to(folder.resolve()) or (path.exists() and not path.is_file()):
            raise ConfigError(
                f"{path}: the labels of output {output.name!r} must be a file in the model's folder {folder}"
            )
        try:
            labels[output.name] = tuple(path.read_text("utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{path}: the labels of output {output.name!r} cannot be read ({why})") from error
    return labels
