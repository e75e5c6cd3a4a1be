"""PROTOCOL.md says what the code does: messages, fields, bounds, and its example."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

import split.wire
from cloud.requests import CANCELS_REMEMBERED
from split.codec import golden
from split.graph.card import digest_of_files
from split.graph.cuts import bitmap_of
from split.ids import cut_id
from split.tensor import TensorSpec
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
    assert f"together cost at most {limits.EARLY_BYTES:,}" in PAGE
    assert f"| {limits.EARLY_BYTES:,} bytes in all" in PAGE
    assert f"a BEGIN costs {limits.MESSAGE_OVERHEAD_BYTES} more" in PAGE
    assert f"the last {CANCELS_REMEMBERED} such" in PAGE
    assert f"at most {golden.SAMPLE_ELEMENTS:,}, at least 1" in PAGE
    assert f"fit in {golden.SAMPLES_BYTES:,} bytes" in PAGE


def test_the_values_of_the_page_written_down_again_from_it_are_those_of_the_code() -> None:
    """§13 in other words than the code's, as somebody would who has only the page."""
    assert cut_id(["b", "a", "É"]) == hashlib.sha256("a\0b\0É".encode()).hexdigest()[:12]
    assert bitmap_of(0b1_0000_0101, 9) == "0501"
    files = (("m.onnx", 1, "a" * 64), ("w.bin", 2, "b" * 64))
    assert digest_of_files(files[:1]) == "sha256:" + "a" * 64
    joined = "a" * 64 + "\n" + "b" * 64 + " w.bin"
    assert digest_of_files(files) == "sha256:" + hashlib.sha256(joined.encode()).hexdigest()
    state, words = int.from_bytes(hashlib.sha256(b"x").digest()[:8], "little"), []
    for _ in range(6):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        words.append(z ^ (z >> 31))
    for dtype, expected in (
        ("FP32", [(word >> 40) / 2**23 - 1 for word in words]),
        ("INT64", [word >> 63 for word in words]),
        ("BYTES", [b"01"[word >> 63 :][:1] for word in words]),
    ):
        spec = TensorSpec(name="x", dtype=dtype, shape=("n", 3))
        made = golden.golden_inputs([spec], {"n": 2})["x"]
        assert made.shape == (2, 3)
        assert made.reshape(-1).tolist() == expected
    sampled = golden.sample({"y": np.arange(10_000, dtype=np.float32), "z": np.arange(3, dtype=np.int64)})
    assert sampled["y"].tolist() == list(range(0, 10_000, 3))  # ⌈10,000 / 4,096⌉
    assert sampled["z"].tolist() == [0, 1, 2]
    for kind in FrameKind:
        assert f"| {kind.value} | {kind.name} |" in PAGE
    for priority in Priority:
        assert f"{priority.value} {priority.name}" in PAGE
