"""docs/contracts.md: its table is the structs, its example is a contract."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from split.profiles.contract import load_contract
from split.profiles.contract_schema import contract_schema

PAGE = (Path(__file__).parents[1] / "docs" / "contracts.md").read_text("utf-8")
SCHEMA = contract_schema()


def fields(name: str = "Contract", prefix: str = "") -> Iterator[tuple[str, str]]:
    """Path and default, as the page writes them, of each value below this struct."""
    definition = SCHEMA["$defs"][name]
    for key, rule in definition["properties"].items():
        choices = [*rule.get("anyOf", []), rule, rule.get("items", {})]
        below = next((one["$ref"].rpartition("/")[2] for one in choices if "$ref" in one), None)
        if below is not None:
            yield from fields(below, f"{prefix}{key}{'[]' if rule.get('type') == 'array' else ''}.")
        else:
            yield f"{prefix}{key}", "required" if key in definition["required"] else stated(rule["default"])


def stated(default: Any) -> str:
    if default is None:
        return "none"
    if default == "":
        return "`''`"
    text = default if isinstance(default, str) else json.dumps(default).replace('"', "")
    return f"`{text}`"


def test_the_page_lists_each_field_with_its_default() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| .+ \| ([^|]+) \| `[^|]+` \|$", PAGE, re.MULTILINE)
    assert dict(rows) == dict(fields())
    assert len(rows) == len(dict(rows))


def test_each_example_of_a_field_is_taken(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| .+ \| [^|]+ \| `([^|]+)` \|$", PAGE, re.MULTILINE)
    assert {field for field, _ in rows} == dict(fields()).keys()
    boxes = {"heads": [{"box": "a", "score": "b"}], "format": "xyxy", "scores": "logits", "threshold": 0.5}
    required = {"inputs": {"name": "a"}, "outputs": {"name": "a"}, "encoded": {"resize": 4096, "crop": 8}}
    required |= {"boxes": boxes, "heads": {"box": "a", "score": "b"}}
    path = tmp_path / "contract.yaml"
    for field, example in rows:
        value = yaml.safe_load(example)
        for part in reversed(field.split(".")):
            key = part.removesuffix("[]")
            if isinstance(value, dict):
                value = required.get(key, {}) | value
            value = {key: [value] if part.endswith("[]") else value}
        if ".boxes." in field:
            value["data"]["fidelity"]["measure"] = "boxes"
        path.write_text(yaml.safe_dump(value))
        load_contract(path)


def test_the_example_is_a_contract(tmp_path: Path) -> None:
    text, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "contract.yaml").write_text(text)
    assert load_contract(tmp_path / "contract.yaml").behaviour.latency_p99_ms == 120


def test_each_example_of_boxes_is_taken(tmp_path: Path) -> None:
    _, text = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    examples = re.split(r"^# .*\n", text, flags=re.MULTILINE)[1:]
    assert len(examples) == 4
    for example in examples:
        value = {"data": {"fidelity": {"measure": "boxes", "bound": 0.1} | yaml.safe_load(example)}}
        (tmp_path / "contract.yaml").write_text(yaml.safe_dump(value))
        assert load_contract(tmp_path / "contract.yaml").data.fidelity.boxes is not None
