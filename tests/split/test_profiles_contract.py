"""split/profiles/contract.py: the whole contract, its defaults, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from split.errors import ConfigError
from split.graph.card import ModelCard
from split.ids import ModelDigest
from split.profiles.contract import (
    Contract,
    Weights,
    check_contract,
    default_contract,
    load_contract,
    load_labels,
    strictest,
)
from split.tensor import TensorSpec

WHOLE = """\
model: efficientnet-lite0
resource:  {memory_bytes: 500000000, threads: auto, accelerators: [cpu]}
behaviour:
  latency_p99_ms: 120
  throughput_min_per_s: 0
  class: silver
  weights: {latency: 1, throughput: 0, energy: 0, cost: 0}
  fallback: {strategy: local, timeout_ms: 850, agreement_min: 0.92}
  retry: {attempts: 1}
data:
  inputs:
    - name: input
      dtype: FP32
      shape: [-1, 3, 224, 224]
      privacy: any
      encoded: {kind: image, resize: 256, crop: 224, mean: [127, 127, 127], std: [128, 128, 128], layout: NCHW}
  outputs: [{name: logits, labels: labels.txt}]
  privacy: any
  depth_min_ratio: 0.0
  codecs: [raw, fp16, int8, klt, encoded]
  fidelity: {measure: kl, bound: 0.05}
"""


def contract_of(tmp_path: Path, text: str) -> Contract:
    path = tmp_path / "contract.yaml"
    path.write_text(text)
    return load_contract(path)


def card(**fields: Any) -> ModelCard:
    return ModelCard(
        digest=ModelDigest("sha256:" + "0" * 64),
        path="/m/model.onnx",
        files=(),
        inputs=(
            TensorSpec(name="input", dtype="FP32", shape=("N", 3, 224, 224)),
            TensorSpec(name="ids", dtype="INT64", shape=(-1, 7)),
        ),
        outputs=(TensorSpec(name="logits", dtype="FP32", shape=("N", 1000)),),
        nodes=1,
        opset=17,
        cuts=(),
        **fields,
    )


def test_every_key_of_the_published_contract_is_read(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, WHOLE)
    assert contract.model == "efficientnet-lite0"
    assert contract.resource.memory_bytes == 500_000_000
    assert contract.behaviour.latency_p99_ms == 120
    assert contract.behaviour.service_class == "silver"
    assert contract.behaviour.fallback.timeout_ms == 850
    assert contract.behaviour.fallback.agreement_min == 0.92
    assert contract.data.codecs == ("raw", "fp16", "int8", "klt", "encoded")
    assert (contract.data.fidelity.measure, contract.data.fidelity.bound) == ("kl", 0.05)
    assert contract.encoded()["input"].mean == (127, 127, 127)
    assert contract.input("nothing") is None
    check_contract(contract, card(), path=tmp_path)


def test_an_empty_contract_allows_everything_to_leave_raw_and_nothing_lossy(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, "")
    assert contract.data.privacy == "any"
    assert contract.data.codecs == ("raw",)
    assert contract.data.fidelity.bound == 0
    assert contract.behaviour.latency_p99_ms is None
    assert contract.behaviour.weights == Weights(latency=1, throughput=0, energy=0, cost=0)


def test_shadow_is_a_way_to_fall_back_and_wants_nine_answers_of_ten_to_agree(tmp_path: Path) -> None:
    fallback = contract_of(tmp_path, "behaviour: {fallback: {strategy: shadow}}").behaviour.fallback
    assert (fallback.strategy, fallback.agreement_min) == ("shadow", 0.9)


@pytest.mark.parametrize(
    ("above", "place", "known"),
    [
        ("", "", "model, resource, behaviour, data"),
        ("resource:\n ", "resource.", "memory_bytes, threads, accelerators"),
        ("behaviour:\n ", "behaviour.", "latency_p99_ms, throughput_min_per_s, class, weights, fallback, retry"),
        ("behaviour:\n weights:\n  ", "behaviour.weights.", "latency, throughput, energy, cost"),
        ("behaviour:\n fallback:\n  ", "behaviour.fallback.", "strategy, timeout_ms, agreement_min"),
        ("behaviour:\n retry:\n  ", "behaviour.retry.", "attempts"),
        ("data:\n ", "data.", "inputs, outputs, privacy, depth_min_ratio, codecs, fidelity"),
        ("data:\n inputs:\n  - name: a\n    ", "data.inputs[0].", "name, dtype, shape, privacy, encoded"),
        (
            "data:\n inputs:\n  - name: a\n    encoded:\n      ",
            "data.inputs[0].encoded.",
            "kind, resize, crop, mean, std, layout",
        ),
        ("data:\n outputs:\n  - name: a\n    ", "data.outputs[0].", "name, labels"),
        ("data:\n fidelity:\n  ", "data.fidelity.", "measure, bound, boxes"),
    ],
)
def test_an_unknown_key_is_refused_at_every_level_with_its_line_and_what_is_known_there(
    tmp_path: Path, above: str, place: str, known: str
) -> None:
    text = above + "oddity: 1\n"
    line = text.count("\n")
    said = f"{tmp_path / 'contract.yaml'}:{line}: {place}oddity: unknown key; known here are {known}"
    with pytest.raises(ConfigError, match="^" + re.escape(said) + "$"):
        contract_of(tmp_path, text)


def test_the_default_contract_is_the_models_own_signature() -> None:
    contract = default_contract(card())
    assert [(i.name, i.dtype, i.shape) for i in contract.data.inputs] == [
        ("input", "FP32", (-1, 3, 224, 224)),
        ("ids", "INT64", (-1, 7)),
    ]
    assert [output.name for output in contract.data.outputs] == ["logits"]
    assert contract.encoded() == {}
    check_contract(contract, card(), path=Path("contract.yaml"))


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("behaviour:\n  weights: {latency: -1}\n", 2, "behaviour.weights.latency: expected float >= 0.0, got -1"),
        ("behaviour: {weights: {latency: 0}}\n", 1, "behaviour.weights: at least one weight must be above 0"),
        ("behaviour: {weights: {energy: .nan}}\n", 1, "behaviour.weights.energy: expected float >= 0.0, got nan"),
        ("behaviour: {weights: {energy: .inf}}\n", 1, "energy must be a finite number, got inf"),
        ("behaviour:\n  latency_p99_ms: 0\n", 2, "behaviour.latency_p99_ms: expected float >= 0.1, got 0"),
        ("behaviour: {latency_p99_ms: 1.0e-300}\n", 1, "behaviour.latency_p99_ms: expected float >= 0.1"),
        ("behaviour: {latency_p99_ms: soon}\n", 1, "behaviour.latency_p99_ms: expected float"),
        ("behaviour: {class: platinum}\n", 1, "behaviour.class: expected one of bronze, gold, silver, got 'platinum'"),
        ("behaviour: {service_class: gold}\n", 1, "behaviour.service_class: unknown key"),
        ("behaviour: {fallback: {strategy: pray}}\n", 1, "expected one of fail, local, shadow, got 'pray'"),
        ("behaviour: {fallback: {agreement_min: 1.5}}\n", 1, "agreement_min: expected float <= 1.0, got 1.5"),
        (
            "behaviour: {fallback: {strategy: shadow, agreement_min: 0}}\n",
            1,
            "agreement_min must be above 0 with strategy",
        ),
        ("behaviour: {retry: {attempts: 0}}\n", 1, "behaviour.retry.attempts: expected int >= 1, got 0"),
        ("resource: {memory_bytes: 1GB}\n", 1, "resource.memory_bytes: expected int"),
        ("resource: {threads: many}\n", 1, "resource.threads: expected one of a whole number, auto, got 'many'"),
        ("resource: {accelerators: []}\n", 1, "accelerators must be one or more names"),
        (
            "data:\n  codecs:\n  - raw\n  - zip\n",
            4,
            "data.codecs[1]: expected one of encoded, fp16, int8, jpeg, klt, raw, webp, got 'zip'",
        ),
        ("data: {codecs: []}\n", 1, "codecs must name at least one"),
        ("data: {codecs: [raw, raw]}\n", 1, "codec 'raw' is listed twice"),
        ("data: {privacy: secret}\n", 1, "data.privacy: expected one of any, local-only, no-raw-input, got 'secret'"),
        ("data: {depth_min_ratio: 2}\n", 1, "data.depth_min_ratio: expected float <= 1.0, got 2"),
        (
            "data: {fidelity: {measure: psnr}}\n",
            1,
            "data.fidelity.measure: expected one of boxes, cosine, kl, relative, rms, top1",
        ),
        ("data: {fidelity: {bound: -0.1}}\n", 1, "data.fidelity.bound: expected float >= 0.0, got -0.1"),
        ("data: {inputs: [{dtype: FP32}]}\n", 1, "data.inputs[0]: the key name is required"),
        ("data: {inputs: [{name: a}, {name: a}]}\n", 1, "input 'a' is listed twice"),
        ("data: {inputs: [{name: a, dtype: BF16}]}\n", 1, "data.inputs[0]: dtype 'BF16' is not supported"),
        ("data: {inputs: [{name: a, shape: [0]}]}\n", 1, "data.inputs[0]: shape [0] holds a 0"),
        ("data: {inputs: [{name: a, shape: [-2]}]}\n", 1, "data.inputs[0].shape[0]: expected int >= -1, got -2"),
        ("data: {inputs: [{name: a, encoded: {kind: sound}}]}\n", 1, "data.inputs[0].encoded.kind: "),
        ("data: {inputs: [{name: a, encoded: {resize: 8, crop: 9}}]}\n", 1, "expected 1 ≤ crop ≤ resize"),
        ("data: {inputs: [{name: a, dtype: UINT8, encoded: {resize: 8, crop: 8}}]}\n", 1, "must be FP32, got UINT8"),
        ("data: {inputs: [{name: a, shape: [1, 8, 8, 3], encoded: {resize: 8, crop: 8}}]}\n", 1, "does not fit shape"),
    ],
)
def test_a_contract_that_makes_no_sense_is_refused_with_its_place(
    tmp_path: Path, text: str, line: int, sentence: str
) -> None:
    where = re.escape(f"{tmp_path / 'contract.yaml'}:{line}: ")
    with pytest.raises(ConfigError, match=where + ".*" + re.escape(sentence)):
        contract_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data: {inputs: [{name: inptu}]}", "the model has no input 'inptu'; it has input, ids"),
        ("data: {outputs: [{name: scores}]}", "the model has no output 'scores'; it has logits"),
        ("data: {inputs: [{name: input, dtype: FP16}]}", "input 'input' is FP32 in the model, the contract says FP16"),
        ("data: {inputs: [{name: input, shape: [1, 3, 192, 192]}]}", "the contract says [1, 3, 192, 192]"),
        ("data: {inputs: [{name: input, shape: [3, 224, 224]}]}", "the contract says [3, 224, 224]"),
        ("data: {inputs: [{name: input, encoded: {resize: 200, crop: 192}}]}", "the contract says [1, 3, 192, 192]"),
        ("data: {inputs: [{name: ids, encoded: {resize: 8, crop: 8}}]}", "encoded pictures become FP32"),
    ],
)
def test_a_contract_for_another_model_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    contract = contract_of(tmp_path, text)
    with pytest.raises(ConfigError, match=r"contract\.yaml: .*" + re.escape(sentence)):
        check_contract(contract, card(), path=tmp_path / "contract.yaml")


def test_the_strictest_privacy_word_holds(tmp_path: Path) -> None:
    assert strictest("any", "no-raw-input") == "no-raw-input"
    assert strictest("local-only", "no-raw-input", "any") == "local-only"
    text = "data: {privacy: any, inputs: [{name: a}, {name: b, privacy: no-raw-input}]}"
    assert contract_of(tmp_path, text).strictest_privacy() == "no-raw-input"


def test_weights_keep_their_ratios_and_sum_up_to_one() -> None:
    assert Weights(latency=3, energy=1).normalised() == Weights(latency=0.75, energy=0.25)
    assert Weights(latency=1e308, energy=1e308).normalised() == Weights(latency=0.5, energy=0.5)
    assert Weights(latency=5e-324).normalised() == Weights()


def test_labels_are_read_one_a_line_from_beside_the_contract(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, "data: {outputs: [{name: logits, labels: labels.txt}, {name: other}]}")
    (tmp_path / "labels.txt").write_text("tench\ngoldfish, Carassius auratus\nhaè\n", "utf-8")
    assert load_labels(contract, tmp_path) == {"logits": ("tench", "goldfish, Carassius auratus", "haè")}
    (tmp_path / "labels.txt").unlink()
    with pytest.raises(ConfigError, match=r"labels\.txt: the labels of output 'logits' cannot be read"):
        load_labels(contract, tmp_path)


def test_a_contract_survives_json(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, WHOLE)
    assert msgspec.json.decode(msgspec.json.encode(contract), type=Contract) == contract


def test_the_contract_of_the_demonstration_model_is_a_contract() -> None:
    contract = load_contract(Path(__file__).parents[2] / "profiles" / "models" / "efficientnet-lite0.yaml")
    spec = contract.encoded()["input"]
    assert spec.shape == (1, 3, 224, 224)
    assert (spec.mean, spec.std) == ((127,) * 3, (128,) * 3)
    check_contract(contract, card(), path=Path("efficientnet-lite0.yaml"))
