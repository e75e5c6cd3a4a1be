"""split/profiles/contract_schema.py: what editors are told is what the loader takes, key by key, rule by rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from split.errors import ConfigError
from split.profiles.contract import load_contract
from split.profiles.contract_schema import contract_schema

PROFILES = Path(__file__).parents[2] / "profiles"
SCHEMA = contract_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

GOOD = """
---
{}
---
model: net
---
resource: {memory_bytes: 1, threads: 4, accelerators: [cuda, cpu]}
---
resource: {memory_bytes: null, threads: auto}
---
behaviour: {latency_p99_ms: 0.1, throughput_min_per_s: 0, class: gold}
---
behaviour: {latency_p99_ms: null, class: bronze}
---
behaviour: {weights: {latency: 0, cost: 0.1}}
---
behaviour: {weights: {throughput: 3}}
---
behaviour: {weights: {}}
---
behaviour: {fallback: {strategy: shadow}}
---
behaviour: {fallback: {strategy: shadow, agreement_min: 1}}
---
behaviour: {fallback: {strategy: fail, timeout_ms: 850, agreement_min: 0}}
---
behaviour: {retry: {attempts: 8}}
---
data: {inputs: [], outputs: []}
---
data: {inputs: [{name: a}, {name: b, dtype: INT64, shape: [-1, 7]}]}
---
data: {inputs: [{name: a, dtype: null, shape: null, encoded: null, privacy: local-only}]}
---
data: {inputs: [{name: a, shape: []}]}
---
data: {inputs: [{name: a, encoded: {resize: 8, crop: 8}}]}
---
data: {inputs: [{name: a, dtype: FP32, shape: [-1, 3, 8, 8], encoded: {kind: image, resize: 4096, crop: 8}}]}
---
data: {inputs: [{name: a, encoded: {resize: 9, crop: 8, mean: [1], std: [2], layout: NHWC}}]}
---
data: {inputs: [{name: a, encoded: {resize: 9, crop: 8, mean: [1, 2, 3]}}]}
---
data: {outputs: [{name: y, labels: labels.txt}, {name: z, labels: null}]}
---
data: {privacy: no-raw-input, depth_min_ratio: 1, codecs: [raw, fp16, int8, klt, encoded]}
---
data: {fidelity: {measure: top1, bound: 0.01}}
---
data: {fidelity: {measure: top1, boxes: null}}
---
data:
  fidelity:
    measure: boxes
    boxes: {heads: [{box: y, score: z}], format: xyxy, scores: logits, threshold: 1}
---
data:
  fidelity:
    measure: boxes
    boxes:
      heads: [{box: [y, 0, 3], score: [y, 5, 84], objectness: [y, 4, 4], label: null}, {box: a, score: b, label: c}]
      format: cxcywh_log
      scores: probabilities
      threshold: 0.3
      overlap: 0.75
      match: overlap
      axis: -2
"""
BAD = """
---
[1]
---
modle: net
---
model: 3
---
resource: {memory: 5}
---
resource: {memory_bytes: 0}
---
resource: {memory_bytes: 1.5}
---
resource: {threads: 0}
---
resource: {threads: 1025}
---
resource: {threads: many}
---
resource: {accelerators: []}
---
resource: {accelerators: [CUDA]}
---
resource: {accelerators: cpu}
---
resource: null
---
behaviour: {service_class: gold}
---
behaviour: {class: platinum}
---
behaviour: {latency_p99_ms: 0}
---
behaviour: {latency_p99_ms: 1.0e-300}
---
behaviour: {throughput_min_per_s: -1}
---
behaviour: {weights: {latency: -1}}
---
behaviour: {weights: {latency: 0}}
---
behaviour: {weights: {latency: 0, energy: 0, cost: 0}}
---
behaviour: {weights: {speed: 1}}
---
behaviour: {fallback: {strategy: pray}}
---
behaviour: {fallback: {timeout_ms: 0}}
---
behaviour: {fallback: {agreement_min: 1.1}}
---
behaviour: {fallback: {strategy: shadow, agreement_min: 0}}
---
behaviour: {fallback: {local: true}}
---
behaviour: {retry: {attempts: 0}}
---
behaviour: {retry: {attempts: 9}}
---
behaviour: {retry: {tries: 1}}
---
data: {privacy: secret}
---
data: {private: any}
---
data: {depth_min_ratio: 1.01}
---
data: {codecs: []}
---
data: {codecs: [zip]}
---
data: {codecs: [raw, raw]}
---
data: {fidelity: {measure: psnr}}
---
data: {fidelity: {bound: -0.1}}
---
data: {fidelity: {limit: 1}}
---
data: {fidelity: {measure: boxes}}
---
data: {fidelity: {measure: boxes, boxes: null}}
---
data: {fidelity: {boxes: {heads: [{box: y, score: z}], format: xyxy, scores: logits, threshold: 1}}}
---
data: {fidelity: {measure: rms, boxes: {heads: [{box: y, score: z}], format: xyxy, scores: logits, threshold: 1}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [], format: xyxy, scores: logits, threshold: 1}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: y}], format: xyxy, scores: logits, threshold: 1}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: "", score: z}], format: xyxy, scores: logits, threshold: 1}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: y, score: ["", 0, 1]}], format: xyxy, scores: logits, threshold: 1}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: [y, 0], score: z}], format: xyxy, scores: logits, threshold: 1}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: [y, -1, 2], score: z}], format: xyxy, scores: logits, threshold: 1}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: y, score: z}], format: xywh, scores: logits, threshold: 1}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: y, score: z}], format: xyxy, scores: softmax, threshold: 1}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: y, score: z}], format: xyxy, scores: logits}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: y, score: z}], format: xyxy, scores: logits, threshold: 0}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: y, score: z}], format: xyxy, scores: logits, threshold: 1.5}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: y, score: z}], format: xyxy, scores: logits, threshold: 1, axis: 1}}}
---
data: {inputs: [{dtype: FP32}]}
---
data: {inputs: [{name: a, dtype: BF16}]}
---
data: {inputs: [{name: a, shape: [0]}]}
---
data: {inputs: [{name: a, shape: [-2]}]}
---
data: {inputs: [{name: a, size: 3}]}
---
data: {inputs: {a: FP32}}
---
data: {inputs: [{name: a, dtype: UINT8, encoded: {resize: 8, crop: 8}}]}
---
data: {inputs: [{name: a, shape: [3, 8, 8], encoded: {resize: 8, crop: 8}}]}
---
data: {inputs: [{name: a, encoded: {crop: 8}}]}
---
data: {inputs: [{name: a, encoded: {resize: 5000, crop: 8}}]}
---
data: {inputs: [{name: a, encoded: {resize: 8, crop: 0}}]}
---
data: {inputs: [{name: a, encoded: {resize: 8, crop: 8, std: [1, 0, 1]}}]}
---
data: {inputs: [{name: a, encoded: {resize: 8, crop: 8, mean: [1]}}]}
---
data: {inputs: [{name: a, encoded: {resize: 8, crop: 8, mean: [1, 2], std: [1, 2]}}]}
---
data: {inputs: [{name: a, encoded: {resize: 8, crop: 8, layout: CHW}}]}
---
data: {inputs: [{name: a, encoded: {kind: sound, resize: 8, crop: 8}}]}
---
data: {inputs: [{name: a, encoded: {resize: 8, crop: 8, colour: BGR}}]}
---
data: {outputs: [{labels: labels.txt}]}
---
data: {outputs: [{name: y, classes: labels.txt}]}
"""
BEYOND_THE_LANGUAGE = """
---
data: {inputs: [{name: a}, {name: a}]}
---
data: {outputs: [{name: a}, {name: a, labels: b}]}
---
data: {inputs: [{name: a, encoded: {resize: 8, crop: 9}}]}
---
data: {inputs: [{name: a, shape: [1, 8, 8, 3], encoded: {resize: 8, crop: 8}}]}
---
behaviour: {weights: {energy: .inf}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: [y, 1, 3], score: z}], format: xyxy, scores: logits, threshold: 1}}}
---
data: {fidelity: {measure: boxes, boxes: 
  {heads: [{box: y, score: [z, 2, 1]}], format: xyxy, scores: logits, threshold: 1}}}
"""


def documents(text: str) -> list[str]:
    return [document.strip() for document in text.split("---\n") if document.strip()]


def loads(tmp_path: Path, text: str) -> bool:
    path = tmp_path / "contract.yaml"
    path.write_text(text)
    try:
        load_contract(path)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("text", documents(GOOD))
def test_schema_and_loader_take_the_same_good_contracts(tmp_path: Path, text: str) -> None:
    assert loads(tmp_path, text)
    assert not list(VALIDATOR.iter_errors(yaml.safe_load(text)))


@pytest.mark.parametrize("text", documents(BAD))
def test_schema_and_loader_refuse_the_same_bad_contracts(tmp_path: Path, text: str) -> None:
    assert not loads(tmp_path, text)
    assert not VALIDATOR.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("text", documents(BEYOND_THE_LANGUAGE))
def test_what_a_schema_cannot_say_the_loader_refuses_alone(tmp_path: Path, text: str) -> None:
    assert not loads(tmp_path, text)
    assert VALIDATOR.is_valid(yaml.safe_load(text))


def test_the_checked_in_copy_is_the_schema() -> None:
    copy = json.loads((PROFILES / "contract.schema.json").read_text("utf-8"))
    assert copy == json.loads(json.dumps(SCHEMA)), "isthmus validate --schema > profiles/contract.schema.json"
    jsonschema.Draft202012Validator.check_schema(copy)
    assert copy["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert copy["$id"].startswith("urn:")


def properties() -> Iterator[tuple[str, dict[str, Any], bool]]:
    for name, definition in SCHEMA["$defs"].items():
        assert definition["additionalProperties"] is False, name
        for key, rule in definition["properties"].items():
            yield f"{name}.{key}", rule, key in definition["required"]


def test_every_key_has_its_meaning_and_a_default_or_is_required() -> None:
    rows = list(properties())
    assert len(rows) > 30
    assert [key for key, rule, _ in rows if not rule.get("description", "").endswith((".", "…"))] == []
    assert [key for key, rule, required in rows if required is ("default" in rule)] == []


@pytest.mark.parametrize("path", sorted((PROFILES / "models").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_contracts_satisfy_the_schema_they_name(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith("# yaml-language-server: $schema=../contract.schema.json\n")
    VALIDATOR.validate(yaml.safe_load(text))
