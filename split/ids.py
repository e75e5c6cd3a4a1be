"""Names with a meaning: a string of one kind cannot stand where another belongs (the type checker sees to it)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final, NewType

ModelName = NewType("ModelName", str)
"""Folder name in the model repository, a `MODEL_NAME`."""

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
MODEL_NAME_IN_WORDS: Final = "1 to 128 letters, digits, '.', '_' or '-', and no '.' in front"
"""What needs no escaping in a URL, a topic, a file name or a label of a metric."""

ModelDigest = NewType("ModelDigest", str)
"""`sha256:` and 64 hex digits over the model's file (and its external data files, by name)."""

CutId = NewType("CutId", str)
"""First 12 hex digits of SHA-256 over the cut's node set (`cut_id`)."""

RequestId = NewType("RequestId", str)
"""The device's id of one request: 16 hex digits, unique within one run of the daemon."""

OFFLOAD_CUT: Final = CutId("offload")
"""What stands in a frame where a cut id would: nothing of the model runs on the device."""

KLT: Final = "klt"
"""The codec whose payloads are read with the model's calibration: its name in plans, on the wire and in contracts."""


def cut_id(node_keys: Iterable[str]) -> CutId:
    """Id of the cut whose device side is exactly these nodes.

    `node_keys`: the first non-empty output name of each node (unique in a graph, since names are in SSA form);
    constants in disguise do not belong to the set, both sides hold them. The order given does not matter.
    """
    joined = "\0".join(sorted(node_keys))
    return CutId(hashlib.sha256(joined.encode()).hexdigest()[:12])
