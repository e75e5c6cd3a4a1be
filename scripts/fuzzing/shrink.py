"""Makes a failing model smaller: one output at a time, an earlier one each step, as long as some cut stays wrong.

Nodes that no output needs drop out by themselves, so this is all it takes to see the few that matter.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Final

import onnx
from onnx import helper

from scripts.fuzzing.cuts import Tally, Wrong, judge
from scripts.fuzzing.graphs import RandomGraph, needed_nodes, random_graph, reads

TRIES_MAX: Final = 60
CUTS_MAX: Final = 40


def smaller(failure: Wrong) -> Wrong:
    """The same failure, or one of the same seed in a smaller model."""
    graph = random_graph(failure.seed)
    order = [name for node in graph.proto.graph.node for name in node.output if name]
    best = failure
    with tempfile.TemporaryDirectory(prefix="isthmus-shrink-") as folder:
        for name in order[:TRIES_MAX]:
            found = _fails(_with_output(graph, name), Path(folder))
            if found is not None and len(found.text) < len(best.text):
                best = found
    return best


def _fails(graph: RandomGraph, folder: Path) -> Wrong | None:
    tally = Tally()
    judge(graph, folder, tally, cuts_max=CUTS_MAX)
    return tally.wrong[0] if tally.wrong else None


def _with_output(graph: RandomGraph, name: str) -> RandomGraph:
    """The nodes that `name` needs, with it as the only output."""
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    nodes = needed_nodes(graph.proto.graph.node, [name])
    needed = {name}.union(*(reads(node) for node in nodes))
    del proto.graph.node[:], proto.graph.output[:]
    proto.graph.node.extend(nodes)
    kind = next((output for output in graph.proto.graph.output if output.name == name), None)
    proto.graph.output.append(kind or helper.make_empty_tensor_value_info(name))
    weights = [tensor for tensor in graph.proto.graph.initializer if tensor.name in needed]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(weights)
    return dataclasses.replace(graph, proto=proto)
