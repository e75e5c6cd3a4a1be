"""Files that are no models, external data that lies or leads away, types nobody can carry: refused with a sentence."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from split.errors import InvalidModel
from split.graph.card import digest_of_files
from split.graph.load import load_model, model_digest
from split.workbench.check import check_cuts

CHAIN = """<ir_version: 8, opset_import: ["" : 18]>
    chain (float[n, 2] x) => (float[n, 2] y) { a = Mul(x, W)  y = Neg(a) }"""


def with_external(folder: Path, **entries: str) -> Path:
    """A model whose weight W lies in `weights.data`, the entries of its external data overridden."""
    proto = onnx.parser.parse_model(CHAIN)
    weight = numpy_helper.from_array(np.float32([3, 4]), "W")
    (folder / "weights.data").write_bytes(b"\0" * 8 + weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in ({"location": "weights.data", "offset": "8", "length": "8"} | entries).items():
        weight.external_data.add(key=key, value=value)
    proto.graph.initializer.append(weight)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder / "model.onnx"


def whole(folder: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"no model at all", "cannot be decoded"),
        (b"\x08\x08", "holds no graph"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InvalidModel, match=words):
        load_model(path)


def test_a_model_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = whole(tmp_path, CHAIN.replace("W)", "x)"))
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(InvalidModel):
            load_model(path)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.onnx"):
        with pytest.raises(InvalidModel, match="is not a file"):
            load_model(path)


@pytest.mark.parametrize(
    "location", ["../weights.data", "/etc/passwd", "sub/weights.data", "", ".", "..", "a\\b", "model.onnx"]
)
def test_external_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "weights.data").write_bytes(b"\0" * 16)
    with pytest.raises(InvalidModel, match="expected the plain name of a file beside the model"):
        load_model(with_external(folder, location=location))


def test_external_data_behind_a_link_is_refused(tmp_path: Path) -> None:
    path = with_external(tmp_path, location="link")
    (tmp_path / "link").symlink_to(tmp_path / "weights.data")
    with pytest.raises(InvalidModel, match="which is a link"):
        load_model(path)


def test_missing_external_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="'gone', which is not there"):
        load_model(with_external(tmp_path, location="gone"))


@pytest.mark.parametrize("entries", [{"offset": "9"}, {"length": "9"}, {"offset": "-8"}, {"offset": "eight"}])
def test_external_data_at_an_impossible_place_is_refused(tmp_path: Path, entries: dict[str, str]) -> None:
    with pytest.raises(InvalidModel, match=r"weight 'W' has its data in 'weights\.data'"):
        load_model(with_external(tmp_path, **entries))


def test_external_data_is_read_and_counts_in_the_digest(tmp_path: Path) -> None:
    path = with_external(tmp_path)
    model = load_model(path)
    assert [node.key for node in model.nodes] == ["a", "y"]
    hashes = [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("model.onnx", "weights.data")]
    expected = hashlib.sha256(f"{hashes[0]}\n{hashes[1]} weights.data".encode()).hexdigest()
    assert model.digest == f"sha256:{expected}"
    assert [(name, size) for name, size, _ in model.files][1] == ("weights.data", 16)
    assert model_digest(path) == (model.digest, model.files)
    (tmp_path / "weights.data").write_bytes(b"\1" * 16)
    assert model_digest(path)[0] != model.digest


def test_the_digest_of_one_file_is_its_sha256_whatever_its_name(tmp_path: Path) -> None:
    path = whole(tmp_path, CHAIN.replace("W)", "x)"))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert model_digest(path)[0] == f"sha256:{sha256}" == digest_of_files([("other.onnx", 1, sha256)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "g (seq(float[3]) s) => (float[3] y) { y = ConcatFromSequence<axis = 0>(s) }",
            r"input 's' .* seq\(tensor\(float",
        ),
        ("g (bfloat16[3] x) => (float[3] y) { y = Cast<to = 1>(x) }", r"input 'x' .* tensor\(bfloat16\)"),
        ("g (float[3] x) => (optional(float[3]) y) { y = Optional(x) }", r"output 'y' .* optional\(tensor\(float"),
        ("g (float x) => (float y) { a = Neg(b)  b = Neg(a)  y = Add(x, b) }", "has a cycle"),
        ("g (float x) => (float y) { a = Neg(q)  y = Add(x, a) }", "needs 'q', which nothing makes"),
        ("g (float x) => (float y) { a = Neg(x)  a = Abs(x)  y = Add(x, a) }", "'a' is redeclared"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidModel, match=words):
        load_model(whole(tmp_path, f'<ir_version: 8, opset_import: ["" : 18]> {text}'))


def test_sparse_constants_become_dense_ones_and_a_model_with_them_is_cut(tmp_path: Path) -> None:
    """ONNX lists the places of values in the flattened tensor, or a row of coordinates for each."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 17]> g (float[2, 3] x) => (float[2, 3] y)
        { a = Neg(x)  b = Add(a, w)  c = Constant <value_int = 0> ()  d = Mul(b, c)  y = Neg(d) }"""
    )
    flat, rows = (
        onnx.helper.make_sparse_tensor(
            numpy_helper.from_array(np.float32([5, 7]), name), numpy_helper.from_array(np.int64(places)), [2, 3]
        )
        for name, places in (("w", [1, 5]), ("c", [[0, 0], [1, 2]]))
    )
    model.graph.sparse_initializer.append(flat)
    attribute = model.graph.node[2].attribute[0]
    attribute.Clear()
    attribute.name, attribute.type = "sparse_value", onnx.AttributeProto.SPARSE_TENSOR
    attribute.sparse_tensor.CopyFrom(rows)
    onnx.save(model, tmp_path / "m.onnx")

    x = np.float32([[1, 2, 3], [4, 5, 6]])
    expected = -((np.float32([[0, 5, 0], [0, 0, 7]]) - x) * np.float32([[5, 0, 0], [0, 0, 7]]))
    cuts = check_cuts(tmp_path / "m.onnx", "all", inputs={"x": x}, outputs_dir=tmp_path)
    assert [cut["max_rel"] for cut in cuts] == [0.0, 0.0, 0.0]
    for cut in cuts:
        found = np.load(tmp_path / f"{cut['id']}.npz")
        np.testing.assert_array_equal(found["y"], expected)


def test_sparse_constants_with_places_they_do_not_have_are_refused(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(CHAIN)
    model.graph.sparse_initializer.append(
        onnx.helper.make_sparse_tensor(
            numpy_helper.from_array(np.float32([5]), "W"), numpy_helper.from_array(np.int64([9])), [2]
        )
    )
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(InvalidModel, match="the sparse constant 'W' is damaged: index 9 is out of bounds"):
        load_model(tmp_path / "m.onnx")


def test_maps_are_refused_with_how_to_export_without_them(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(CHAIN)
    maps = onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(1, []))
    model.graph.output.append(onnx.helper.make_value_info("z", onnx.helper.make_sequence_type_proto(maps)))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(InvalidModel, match="'z' holds maps, expected a tensor; export the model without ZipMap"):
        load_model(tmp_path / "m.onnx")


def nested(levels: int) -> onnx.ModelProto:
    """Functions that call the one below them twice: 2 ** levels nodes when each call is its body."""
    functions = "".join(
        f"""<domain: "own", opset_import: ["" : 17, "own" : 1]> f{level} (x) => (y)
        {{ t = {called}(x)  y = {called}(t) }}"""
        for level in range(levels)
        for called in ["Relu" if level == 0 else f"own.f{level - 1}"]
    )
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 17, "own" : 1]>
        g (float[2] x) => (float[2] y) {{ y = own.f{levels - 1}(x) }} {functions}"""
    )


def test_functions_that_double_with_every_level_are_refused_before_anybody_expands_them(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(nested(5), path)
    assert len(load_model(path).nodes) == 2**5
    onnx.save(nested(40), path)
    with pytest.raises(InvalidModel, match=f"it has {2**40} nodes without them"):
        load_model(path)


def test_functions_that_call_themselves_are_refused_as_the_runtime_does(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = nested(2)
    model.functions[0].node[1].domain, model.functions[0].node[1].op_type = "own", "f1"
    onnx.save(model, path)
    with pytest.raises(InvalidModel, match="its local function 'f1' calls itself"):
        load_model(path)


def test_stale_value_info_does_not_count(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[n, 2] x) => (float[n, 2] y) <float[7, 9] a> { a = Neg(x)  y = Neg(a) }"""
    spec = load_model(whole(tmp_path, text)).spec("a")
    assert not isinstance(spec, str)
    assert spec.shape == ("n", 2)
