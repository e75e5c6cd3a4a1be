"""PROTOCOL.md says what the code does: messages, fields, bounds, and its example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import split.wire
from cloud.session import CANCELS_REMEMBERED
from split.wire import limits
from split.wire.frames import FrameKind, encode_metadata
from split.wire.messages import Message, Pong, Priority

PAGE = (Path(split.wire.__path__[0]) / "PROTOCOL.md").read_text()
ROWS = {row[0]: row for row in re.findall(r"^\| `([a-z-]+)` \| (D → C|C → D|both) \| (.*?) \| ", PAGE, re.MULTILINE)}


@pytest.mark.parametrize("kind", get_args(Message), ids=lambda kind: str(kind.__name__))
def test_every_message_stands_in_the_table_with_its_fields_in_order(kind: type[msgspec.Struct]) -> None:
    described: Any = ROWS[str(kind.__struct_config__.tag)][2]
    assert re.findall(r"`(\w+)`", described) == list(kind.__struct_fields__)
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    with_default = re.findall(r"`(\w+)`[^`]* = ", described)
    assert [name for name in kind.__struct_fields__ if name not in with_default] == required


def test_the_table_has_no_message_that_is_not_there() -> None:
    assert set(ROWS) == {kind.__struct_config__.tag for kind in get_args(Message)}


def test_the_example_is_what_the_code_makes() -> None:
    example = bytes.fromhex("".join(re.findall(r"^    ([0-9a-f ]+)$", PAGE, re.MULTILINE)))
    assert example[20:] == encode_metadata(Pong(nonce=1))
    assert example[:20] == bytes([1, 0, 0, 0, 7, 0, 0, 0, 15, 0, 0, 0, 15] + [0] * 7)


def test_the_table_of_vectors_names_every_field_they_have() -> None:
    vectors = json.loads((Path(split.wire.__path__[0]) / "vectors.json").read_text())["vectors"]
    described = re.findall(r"^\| `(\w+)` \|", PAGE[PAGE.index("## 12.") :], re.MULTILINE)
    assert set().union(*vectors) - {"receiver"} == set(described)


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    assert f"at most {limits.MAX_FRAME_BYTES - limits.FRAME_HEADER_BYTES:,} " in PAGE
    assert f"1 to {limits.MAX_METADATA_BYTES:,}" in PAGE
    assert f"at most {limits.MAX_HELLO_BYTES:,} bytes of metadata" in PAGE
    assert f"waits at most {limits.HELLO_TIMEOUT_S:g} seconds" in PAGE
    assert f"{limits.MAX_WAITING_PONGS} answers" in PAGE
    assert f"After {limits.MAX_INVALID_MESSAGES:,} invalid messages" in PAGE
    assert f"{limits.DEFAULT_LIMITS.queue_bytes // limits.MIB} MiB, then the program" in PAGE
    assert f"{limits.CONTROL_QUEUE_BYTES // limits.MIB} MiB of priority CONTROL" in PAGE
    assert f"{limits.DEFAULT_LIMITS.unread_bytes // limits.MIB} MiB, then reading stops" in PAGE
    assert f"0 or {limits.MIN_WINDOW_BYTES:,} to 2³²−1" in PAGE
    assert f"a BEGIN costs {limits.MESSAGE_OVERHEAD_BYTES} more" in PAGE
    assert f"the last {CANCELS_REMEMBERED} such" in PAGE
    for kind in FrameKind:
        assert f"| {kind.value} | {kind.name} |" in PAGE
    for priority in Priority:
        assert f"{priority.value} {priority.name}" in PAGE
