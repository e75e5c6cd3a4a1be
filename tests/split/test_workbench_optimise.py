"""Optimised segments against the segments as they were cut; what is damaged, foreign or half-written is made again."""

import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from split.codec.golden import golden_inputs
from split.errors import ModelUnavailable
from split.graph.card import ModelCard
from split.runtime.machine import Machine, read_machine
from split.runtime.optimised import (
    Manifest,
    key_of,
    lacking,
    optimised_in,
    place_of,
    read_sound,
)
from split.runtime.segment import OrtEngine, OrtSegment
from split.tensor import Tensors, worst_difference
from split.workbench.cut import prepare
from split.workbench.optimise import Optimiser, hooked, open_halves, optimise

RESIDUAL = """
<ir_version: 8, opset_import: ["" : 17]>
residual (float[N,32,14,14] x) => (float[N,10] y) {
  a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w0)
  r = Relu (a)
  b = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r, w1)
  s = Add (b, r)
  t = Relu (s)
  c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (t, w2)
  u = Add (c, t)
  v = Relu (u)
  g = GlobalAveragePool (v)
  f = Flatten (g)
  y = MatMul (f, w3)
}
"""
RESIDUAL_WEIGHTS = {"w0": (32, 32, 3, 3), "w1": (32, 32, 3, 3), "w2": (32, 32, 3, 3), "w3": (32, 10)}

TOKENS = """
<ir_version: 8, opset_import: ["" : 17]>
tokens (float[B,T,64] x) => (float[B,T,64] y) {
  a = MatMul (x, w0)
  b = Add (a, b0)
  g = Softmax <axis = -1> (b)
  c = MatMul (g, w1)
  d = Add (c, x)
  y = MatMul (d, w2)
}
"""
TOKENS_WEIGHTS = {"w0": (64, 512), "b0": (512,), "w1": (512, 64), "w2": (64, 64)}

BRANCHES = """
<ir_version: 8, opset_import: ["" : 17]>
branches (float[1,64] x) => (float[1,64] y) {
  a = MatMul (x, w0)
  m = ReduceMean <keepdims = 0> (a)
  zero = Constant <value = float {0}> ()
  p = Greater (m, zero)
  b = If (p) <
    then_branch = positive () => (float[1,64] q) { q = MatMul (a, w1) },
    else_branch = negative () => (float[1,64] q) { q = MatMul (a, w2) }
  >
  y = Relu (b)
}
"""
BRANCHES_WEIGHTS = {"w0": (64, 64), "w1": (64, 64), "w2": (64, 64)}

MODELS = {
    "residual": (RESIDUAL, RESIDUAL_WEIGHTS),
    "tokens": (TOKENS, TOKENS_WEIGHTS),
    "branches": (BRANCHES, BRANCHES_WEIGHTS),
}


def write_model(folder: Path, name: str) -> Path:
    text, weights = MODELS[name]
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(3)
    for weight, shape in weights.items():
        value = random.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]))
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), weight))
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def cut(folder: Path, name: str) -> tuple[ModelCard, Path, Tensors]:
    """Card, folder of the halves, inputs."""
    card = prepare(write_model(folder, name), folder / "parts")
    return card, folder / "parts", golden_inputs(card.inputs, {"N": 2, "B": 1, "T": 9})


def make(card: ModelCard, parts: Path, inputs: Tensors) -> None:
    optimise(card, parts, card.cuts, inputs=inputs, engine=OrtEngine(), threads=1)


def key(card: ModelCard) -> str:
    return key_of(card.digest, OrtEngine().name, read_machine())


def sound(card: ModelCard, parts: Path) -> Manifest | None:
    return read_sound(place_of(parts, key(card)), key(card))


def place(card: ModelCard, parts: Path) -> Path:
    return place_of(parts, key(card))


@pytest.mark.parametrize("name", MODELS)
def test_optimised_segments_compute_what_the_plain_model_computes(name: str, tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, name)
    make(card, parts, inputs)
    manifest = sound(card, parts)
    assert manifest is not None
    assert manifest.refused == {}
    assert len(manifest.segments) == 1 + 2 * len(card.cuts) > 1
    engine = OrtEngine()
    expected = engine.open(Path(card.path), threads=1).run(inputs)
    made = optimised_in(parts, Path(card.path), manifest)

    for prepack in (False, True):
        whole = engine.open_optimised(made[Path(card.path)].path, threads=1, prepack=prepack)
        assert worst_difference(whole.run(inputs), expected, card_outputs(card)) <= 1e-5
        for found in card.cuts:
            head = engine.open_optimised(made[parts / f"{found.id}.head.onnx"].path, threads=1, prepack=prepack)
            tail = engine.open_optimised(made[parts / f"{found.id}.tail.onnx"].path, threads=1, prepack=prepack)
            values = inputs | head.run({n: inputs[n] for n in found.head_inputs})
            values |= tail.run({n: values[n] for n in tail.inputs})
            assert worst_difference(values, expected, card_outputs(card)) <= 1e-5


def card_outputs(card: ModelCard) -> list[str]:
    return [spec.name for spec in card.outputs]


def test_what_crosses_a_cut_keeps_its_name_and_layout(tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, "residual")
    make(card, parts, inputs)
    manifest = sound(card, parts)
    assert manifest is not None
    engine = OrtEngine()
    for path, made in optimised_in(parts, Path(card.path), manifest).items():
        plain = engine.open(path, threads=1)
        best = engine.open_optimised(made.path, threads=1, prepack=made.prepacked)
        assert (best.input_specs, best.output_specs) == (plain.input_specs, plain.output_specs)
    for found in card.cuts:
        plain_head = engine.open(parts / f"{found.id}.head.onnx", threads=1)
        head, _, _ = open_halves(found, parts, inputs, Optimiser(card, parts, engine, threads=1).open)
        feeds = {name: inputs[name] for name in found.head_inputs}
        assert worst_difference(head.run(feeds), plain_head.run(feeds), [spec.name for spec in found.boundary]) <= 1e-5


def test_nothing_is_made_of_a_file_that_replaced_the_one_that_was_cut(tmp_path: Path) -> None:
    """Or the first file, put back, would be found under its digest and answer with the other one's weights."""
    card, parts, inputs = cut(tmp_path, "tokens")
    first = Path(card.path).read_bytes()
    model = onnx.load_model_from_string(first)
    for weight in model.graph.initializer:
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(2), weight.name))
    onnx.save(model, card.path)
    with pytest.raises(ModelUnavailable, match=r"model\.onnx was replaced since it was loaded; load it again"):
        make(card, parts, inputs)

    Path(card.path).write_bytes(first)
    expected = OrtEngine().open(Path(card.path), threads=1).run(inputs)
    make(card, parts, inputs)
    manifest = sound(card, parts)
    assert manifest is not None
    assert "whole" in manifest.segments
    best = Optimiser(card, parts, OrtEngine(), threads=1).open("whole", Path(card.path), inputs)
    assert worst_difference(best.run(inputs), expected, card_outputs(card)) <= 1e-5


def test_all_segments_together_hold_every_weight_once(tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, "residual")
    make(card, parts, inputs)
    manifest = sound(card, parts)
    assert manifest is not None
    # Three kernels of 32 × 32 × 3 × 3 and a matrix of 32 × 10 floats, which has no saved layout worth it or one more.
    kernels, matrix = 3 * 32 * 32 * 9 * 4, 32 * 10 * 4
    held = sum(extent.bytes for extent in manifest.weights)
    assert kernels + matrix <= held <= kernels + 4 * matrix
    assert len({extent.blake2b for extent in manifest.weights}) == len(manifest.weights)
    assert all(extent.offset % 4096 == 0 for extent in manifest.weights)


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, "tokens")
    make(card, parts, inputs)
    before = {path: path.stat().st_mtime_ns for path in place(card, parts).glob("*.*")}
    make(card, parts, inputs)
    assert {path: path.stat().st_mtime_ns for path in place(card, parts).glob("*.*")} == before


@pytest.mark.parametrize("victim", ["weights.bin", "whole.onnx", "manifest.json"])
def test_a_damaged_file_is_never_used_and_made_again(victim: str, tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, "tokens")
    make(card, parts, inputs)
    cuts = [found.id for found in card.cuts]
    path = place(card, parts) / victim
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    found = sound(card, parts)
    assert found is None or "whole" not in found.segments
    assert lacking(found, cuts)
    make(card, parts, inputs)
    assert not lacking(sound(card, parts), cuts)


def test_weights_cut_short_are_never_used(tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, "residual")
    make(card, parts, inputs)
    weights = place(card, parts) / "weights.bin"
    os.truncate(weights, weights.stat().st_size - 1)
    assert sound(card, parts) is None
    os.truncate(weights, 0)
    assert sound(card, parts) is None


def test_mending_leaves_what_others_have_mapped_alone(tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, "residual")
    make(card, parts, inputs)
    engine = OrtEngine()
    held = engine.open_optimised(place(card, parts) / "whole.onnx", threads=1, prepack=False)
    expected = held.run(inputs)
    (place(card, parts) / "manifest.json").write_bytes(b"{}")
    make(card, parts, inputs)
    assert worst_difference(held.run(inputs), expected, list(expected)) == 0


def test_segments_of_another_processor_or_runtime_are_not_found_and_removed(tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, "tokens")
    here = read_machine()
    other: Machine = msgspec.structs.replace(here, cpu_features=("sse2",))
    optimiser = Optimiser(card, parts, OrtEngine(), threads=1, machine=other)
    optimiser.open("whole", Path(card.path), inputs)
    theirs = key_of(card.digest, OrtEngine().name, other)
    assert read_sound(place_of(parts, theirs), theirs) is not None
    assert sound(card, parts) is None
    assert key_of(card.digest, "onnxruntime 1.0.0 x86_64", here) != key(card)
    make(card, parts, inputs)
    assert [path.name for path in (parts / "optimised").iterdir()] == [key(card)]


def test_segments_of_halves_that_were_cut_by_other_rules_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, parts, inputs = cut(tmp_path, "tokens")
    make(card, parts, inputs)
    assert sound(card, parts) is not None
    monkeypatch.setattr("split.runtime.optimised.CARD_VERSION", card.version + 1)
    assert sound(card, parts) is None


def test_a_full_disk_is_named_and_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, parts, inputs = cut(tmp_path, "residual")
    optimiser = Optimiser(card, parts, OrtEngine(), threads=1)
    optimiser.open("whole", Path(card.path), inputs)
    before = sound(card, parts)
    weights = (place(card, parts) / "weights.bin").read_bytes()

    def full(path: Path, content: object) -> None:
        raise ModelUnavailable(f"{path} cannot be written: the disk is full; free some space") from OSError(
            errno.ENOSPC, "No space left on device"
        )

    monkeypatch.setattr("split.workbench.optimise.write_whole", full)
    with pytest.raises(ModelUnavailable, match="disk is full"):
        open_halves(card.cuts[0], parts, inputs, optimiser.open)
    assert sound(card, parts) == before
    assert (place(card, parts) / "weights.bin").read_bytes()[: len(weights)] == weights
    monkeypatch.undo()
    make(card, parts, inputs)
    assert not lacking(sound(card, parts), [found.id for found in card.cuts])


def limited(card: ModelCard, parts: Path, inputs: Tensors, bytes_max: int, result: object) -> None:
    """In a process whose files cannot grow beyond `bytes_max`."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, bytes_max))
    try:
        make(card, parts, inputs)
    except ModelUnavailable as error:
        result.put(str(error))  # type: ignore[attr-defined]  # a multiprocessing queue
    else:
        result.put("")  # type: ignore[attr-defined]  # as above


def test_weights_that_do_not_fit_are_refused_with_their_reason(tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, "residual")
    context = multiprocessing.get_context("spawn")
    result = context.SimpleQueue()
    # One kernel of 36 KiB fits, three do not.
    process = context.Process(target=limited, args=(card, parts, inputs, 80_000, result))
    process.start()
    said = result.get()
    process.join(60)
    assert "free" in said or "room" in said
    assert sound(card, parts) in (None, Manifest(key=key(card)))
    make(card, parts, inputs)
    assert not lacking(sound(card, parts), [found.id for found in card.cuts])


def test_two_processes_that_make_the_same_model_at_once_both_succeed(tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, "residual")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=make, args=(card, parts, inputs)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    manifest = sound(card, parts)
    assert not lacking(manifest, [found.id for found in card.cuts])
    assert manifest is not None
    assert len({extent.blake2b for extent in manifest.weights}) == len(manifest.weights)
    assert not list(place(card, parts).glob(".making-*"))


class Confused(OrtEngine):
    """Its optimised segments are another model's, with the same inputs and outputs."""

    def __init__(self, other: Path) -> None:
        super().__init__()
        self.other = other

    def open_optimised(self, path: Path, *, threads: int, spin_us: int = 0, prepack: bool) -> OrtSegment:
        return self.open(self.other, threads=threads, spin_us=spin_us)


def test_an_optimised_segment_that_computes_something_else_is_refused_and_what_was_cut_is_opened(
    tmp_path: Path,
) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        m (float[2] x) => (float[2] y) { s = Abs (x) y = Add (s, TERM) }"""
    paths = []
    for name, word in (("model", "s"), ("other", "x")):
        path = tmp_path / f"{name}.onnx"
        onnx.save(onnx.parser.parse_model(text.replace("TERM", word)), path)
        paths.append(path)
    card = prepare(paths[0], tmp_path / "parts")
    feeds = {"x": np.float32([-1, 2])}
    found = Optimiser(card, tmp_path / "parts", Confused(paths[1]), threads=1).open("whole", paths[0], feeds)
    assert found.run(feeds)["y"].tolist() == [2, 4]
    manifest = sound(card, tmp_path / "parts")
    assert manifest is not None
    assert "differs from what was cut" in manifest.refused["whole"]
    assert not lacking(manifest, [])


def residual_tail(folder: Path) -> tuple[Path, OrtSegment]:
    """The second block of `residual` alone, as a tail: its input goes into a convolution and the sum beside it."""
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    tail (float[N,32,14,14] t) => (float[N,32,14,14] v) {
      c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (t, w2)
      u = Add (c, t)
      r = Relu (u)
      d = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r, w2)
      e = Add (d, r)
      v = Relu (e)
    }
    """
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(4).standard_normal((32, 32, 3, 3)).astype(np.float32) / 17
    model.graph.initializer.append(numpy_helper.from_array(weight, "w2"))
    path = folder / "000000000000.tail.onnx"
    onnx.save(model, path)
    return path, OrtEngine().open(path, threads=1)


def test_a_pool_behind_the_boundary_changes_no_number_not_even_infinite_ones(tmp_path: Path) -> None:
    path, plain = residual_tail(tmp_path)
    model = hooked(onnx.load(path))
    assert model is not None
    assert [node.op_type for node in model.graph.node].count("AveragePool") == 1
    onnx.save(model, tmp_path / "hooked.onnx")
    segment = OrtEngine().open(tmp_path / "hooked.onnx", threads=1)
    assert (segment.input_specs, segment.output_specs) == (plain.input_specs, plain.output_specs)
    x = np.random.default_rng(5).standard_normal((2, 32, 14, 14)).astype(np.float32)
    np.testing.assert_allclose(segment.run({"t": x})["v"], plain.run({"t": x})["v"], rtol=1e-5, atol=1e-5)
    x[0, 3, 2, :3] = [np.nan, np.inf, -np.inf]
    x[1, 7, 13, 13] = np.finfo(np.float32).tiny / 2
    np.testing.assert_allclose(segment.run({"t": x})["v"], plain.run({"t": x})["v"], rtol=1e-5, atol=1e-5)


def test_the_pool_is_taken_where_it_keeps_more_in_the_blocked_layout(tmp_path: Path) -> None:
    card, parts, inputs = cut(tmp_path, "residual")
    make(card, parts, inputs)
    manifest = sound(card, parts)
    assert manifest is not None
    plain = onnx.load(place(card, parts) / "whole.onnx", load_external_data=False)
    if not any(node.op_type == "ReorderInput" for node in plain.graph.node):
        pytest.skip("this machine's runtime has no blocked layout")
    between = {found.id for found in card.cuts if [spec.name for spec in found.boundary] in (["r"], ["t"])}
    assert between
    assert any(manifest.segments[f"{name}.tail"].hooked for name in between)
    assert not any(file.hooked for name, file in manifest.segments.items() if not name.endswith(".tail"))


@pytest.mark.parametrize(
    "text",
    [
        "(float[1,32,4,4] x) => (float[1,32,4,4] y) { y = Reciprocal (x) }",  # tells 0.0 from -0.0
        "(float[1,32] x) => (float[1,32] y) { y = Relu (x) }",  # not picture-like
        "(float16[1,32,4,4] x) => (float16[1,32,4,4] y) { y = Relu (x) }",  # has no blocked kernels
    ],
)
def test_no_pool_where_it_could_not_help_or_would_show(text: str) -> None:
    assert hooked(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> tail {text}')) is None


@pytest.mark.parametrize("name", ["efficientnet-lite0", "silero-vad", "ppocrv4-rec"])
def test_real_models_compute_the_same_optimised(name: str, real_model: Callable[[str], Path], tmp_path: Path) -> None:
    feeds = {
        "efficientnet-lite0": {"input": np.random.default_rng(1).uniform(-1, 1, (1, 3, 224, 224)).astype(np.float32)},
        "silero-vad": {
            "input": np.zeros((1, 576), np.float32),
            "state": np.zeros((2, 1, 128), np.float32),
            "sr": np.array(16000),
        },
        "ppocrv4-rec": {"x": np.random.default_rng(1).uniform(-1, 1, (1, 3, 48, 96)).astype(np.float32)},
    }[name]
    card = prepare(real_model(name), tmp_path, inputs=feeds)
    cuts = card.cuts[:: max(1, len(card.cuts) // 2)][:2]
    optimise(card, tmp_path, cuts, inputs=feeds, engine=OrtEngine(), threads=1)
    manifest = sound(card, tmp_path)
    assert manifest is not None
    assert not lacking(manifest, [found.id for found in cuts])
    assert manifest.refused == {}
    engine = OrtEngine()
    expected = engine.open(Path(card.path), threads=1).run(feeds)
    for found in cuts:
        head, tail, taken = open_halves(found, tmp_path, feeds, Optimiser(card, tmp_path, engine, threads=1).open)
        values = head.run({n: feeds[n] for n in found.head_inputs}) | tail.run(taken)
        assert worst_difference(values, expected, card_outputs(card)) <= 1e-5
