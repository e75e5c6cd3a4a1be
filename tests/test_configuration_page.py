"""docs/configuration.md: its tables are the structs, its examples are configurations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import agent.config
import cloud.config

PAGE = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text("utf-8")
PARTS = {
    agent.config.AgentConfig: PAGE.split("## The device")[1].split("\n## ")[0],
    cloud.config.CompanionConfig: PAGE.split("## The companion")[1].split("\n## ")[0],
}
LOADERS = {
    agent.config.AgentConfig: agent.config.load_config,
    cloud.config.CompanionConfig: cloud.config.load_config,
}


def stated(default: object) -> str:
    match default:
        case None:
            return "off"
        case ():
            return "`[]`"
        case "":
            return "`''`"
        case bool():
            return f"`{str(default).lower()}`"
        case _:
            return f"`{default}`"


def keys(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Key and default of each value in a struct and its sections."""
    for field in msgspec.structs.fields(struct):
        members: tuple[Any, ...] = get_args(field.type) or (field.type,)
        section = next((m for m in members if isinstance(m, type) and issubclass(m, msgspec.Struct)), None)
        if section is not None:
            yield from keys(section, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", "required" if field.required else stated(field.default)


@pytest.mark.parametrize("struct", PARTS)
def test_the_page_lists_each_key_with_its_default(struct: type[msgspec.Struct]) -> None:
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|", PARTS[struct], re.MULTILINE))
    sections = {key.rpartition(".")[0] for key in rows}
    assert {key: default for key, default in rows.items() if key not in sections} == dict(keys(struct))


@pytest.mark.parametrize("struct", PARTS)
def test_every_example_is_a_configuration(struct: type[msgspec.Struct], tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PARTS[struct], re.DOTALL)
    assert examples
    for number, text in enumerate(examples):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert isinstance(LOADERS[struct](path, {}), struct)
