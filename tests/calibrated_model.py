"""A small picture classifier with a linear bottleneck, and a calibration made for it by hand: no sensitivity, no
transform but PCA of a few inputs, points measured by plain onnxruntime. For tests of what serves such a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from split.codec.calibration import Calibration, Curve, CutTables, Klt, TensorTables, grid_of
from split.codec.fidelity import divergence
from split.codec.klt import BoundaryTables, decode_klt, encode_klt
from split.codec.payload import decode, encode
from split.graph.card import CutCard, ModelCard
from split.ids import CutId
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import Point
from split.tensor import Array, Tensors

SIDE: Final = 16
LEVELS: Final = (144, 136, 128, 120, 112, 104, 96, 80)
"""Steps 2^((level − 128)/8): 4, 2, 1, 1/2 … 1/64."""
MEASURES: Final = ("kl", "relative")
MEAN, STD = 127.5, 51.0
PICTURE: Final = ImageSpec(resize=SIDE, crop=SIDE, mean=(MEAN,) * 3, std=(STD,) * 3)
"""How x is made from a picture."""
PICTURE_LEVELS: Final = (0, 3, 7, 9, 11)
"""Qualities 20, 50, 90, 95, 99 at full size."""


def save_model(path: Path) -> None:
    """x [1, 3, 16, 16] → 3×3 convolution → Relu → 1×1 to 8 channels, the bottleneck → … → y [1, 10]."""
    dice = np.random.default_rng(7)

    def weight(name: str, *shape: int) -> TensorProto:
        scale = np.sqrt(2.0 / np.prod(shape[1:]))
        return numpy_helper.from_array((scale * dice.standard_normal(shape)).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c0"], pads=[1, 1, 1, 1], strides=[2, 2], name="conv0"),
        helper.make_node("Relu", ["c0"], ["r0"], name="relu0"),
        helper.make_node("Conv", ["r0", "w1"], ["narrow"], name="bottleneck"),
        helper.make_node("Conv", ["narrow", "w2"], ["c2"], pads=[1, 1, 1, 1], name="conv2"),
        helper.make_node("Relu", ["c2"], ["r2"], name="relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flat"),
        helper.make_node("MatMul", ["f", "w3"], ["y"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "bottleneck",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        [weight("w0", 32, 3, 3, 3), weight("w1", 8, 32, 1, 1), weight("w2", 32, 8, 3, 3), weight("w3", 32, 10)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def draw_pictures(count: int, seed: int) -> list[Array]:
    """Smooth random pictures, UINT8 [16, 16, 3]: noise with a falling spectrum, little colour."""
    dice, found = np.random.default_rng(seed), []
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE))) + 1.0 / SIDE
    for _ in range(count):
        grey, colour = dice.standard_normal((1, SIDE, SIDE)), dice.standard_normal((3, SIDE, SIDE))
        noise = np.fft.fft2(grey + 0.1 * colour) / frequency**1.5
        picture = np.fft.ifft2(noise).real
        found.append(np.clip(picture / picture.std() * STD + MEAN, 0, 255).astype(np.uint8).transpose(1, 2, 0))
    return found


def draw_inputs(count: int, seed: int) -> list[Tensors]:
    """The same as the model takes them."""
    return [
        {"x": ((picture.transpose(2, 0, 1)[np.newaxis] - MEAN) / STD).astype(np.float32)}
        for picture in draw_pictures(count, seed)
    ]


def whole_of(path: Path, inputs: Sequence[Tensors]) -> list[Tensors]:
    """What plain onnxruntime says of them, unsplit."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [{"y": session.run(["y"], one)[0]} for one in inputs]


def calibrate(card: ModelCard, folder: Path, *, seed: int = 1, count: int = 24) -> Calibration:
    """Of every cut of the card whose boundary is one map; `folder`: where its halves lie."""
    inputs = draw_inputs(count, seed)
    expected = whole_of(Path(card.path), inputs)
    tables: dict[CutId, CutTables] = {}
    curves: dict[CutId, Curve] = {}
    for cut in card.cuts:
        if len(cut.boundary) != 1 or len(cut.boundary[0].shape) != 4 or cut.tail_inputs:
            continue
        name = cut.boundary[0].name
        head = ort.InferenceSession(folder / f"{cut.id}.head.onnx", providers=["CPUExecutionProvider"])
        tail = ort.InferenceSession(folder / f"{cut.id}.tail.onnx", providers=["CPUExecutionProvider"])
        made = [head.run([name], one)[0] for one in inputs]
        tables[cut.id] = _tables(cut, made[::2])
        ready = BoundaryTables(tables[cut.id], "00" * 32)
        points = []
        for level in LEVELS:
            payloads = [b"".join(map(bytes, encode_klt({name: one}, ready, level))) for one in made[1::2]]
            outputs = [
                tail.run(["y"], {name: decode_klt(payload, ready, max_bytes=1 << 20)[name]})[0] for payload in payloads
            ]
            sizes = [len(payload) for payload in payloads]
            points.append(_point(level, sizes, outputs, expected[1::2]))
        curves[cut.id] = _curve(points, inputs=len(made[1::2]))
    pictures = {codec: _of_pictures(Path(card.path), codec, inputs[1::2], expected[1::2]) for codec in ("jpeg", "webp")}
    return Calibration(model=card.digest, inputs=count, tables=tables, curves=curves, pictures=pictures)


def _of_pictures(path: Path, codec: str, inputs: Sequence[Tensors], expected: Sequence[Tensors]) -> Curve:
    points = []
    for level in PICTURE_LEVELS:
        payloads = [b"".join(map(bytes, encode(one, codec, pictures={"x": PICTURE}, level=level))) for one in inputs]
        outputs = whole_of(path, [decode(payload, max_bytes=1 << 20) for payload in payloads])
        points.append(_point(level, list(map(len, payloads)), [one["y"] for one in outputs], expected))
    return _curve(points, inputs=len(inputs))


def _point(level: int, sizes: Sequence[int], outputs: Sequence[Array], expected: Sequence[Tensors]) -> Point:
    pairs = list(zip(outputs, expected, strict=True))
    fidelity = {name: float(np.mean([divergence(name, y, one["y"]) for y, one in pairs])) for name in MEASURES}
    return Point(
        level=level,
        mean_bytes=float(np.mean(sizes)),
        p95_bytes=float(np.quantile(sizes, 0.95)),
        fidelity=fidelity,
        fidelity_high={name: 1.25 * value for name, value in fidelity.items()},
    )


def _curve(points: Sequence[Point], *, inputs: int) -> Curve:
    return Curve(points=tuple(sorted(points, key=lambda point: point.mean_bytes)), inputs=inputs)


def _tables(cut: CutCard, made: Sequence[Array]) -> CutTables:
    """PCA across channels, no DCT, scales as measured."""
    channels = made[0].shape[1]
    columns = np.concatenate([one[0].reshape(channels, -1) for one in made], axis=1).astype(np.float64)
    mean = columns.mean(axis=1)
    centred = columns - mean[:, None]
    _, vectors = np.linalg.eigh(centred @ centred.T / centred.shape[1])
    transform = vectors[:, ::-1].T
    spread = np.abs(transform @ centred).mean(axis=1)
    klt = Klt(
        layout="NCHW",
        transform=transform.astype(np.float32),
        inverse=transform.T.astype(np.float32),
        mean=mean.astype(np.float32),
        block=(1, 1),
        scales=grid_of(spread).reshape(channels, 1, 1),
    )
    return CutTables(tensors=(TensorTables(spec=cut.boundary[0], klt=klt),), node_bitmap=cut.node_bitmap)
