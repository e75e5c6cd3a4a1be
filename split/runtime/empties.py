"""Models that onnxruntime dies of when a tensor they take is empty: not with an error, with `std::terminate`.

Of the operators tried with empty batches, sequences and pictures on onnxruntime 1.32, the recurrent kernels do it (they
leave threads behind when they share nothing out among them). One request with a batch of none would end the daemon, or
the companion of every device; so a segment that has such an operator takes no empty tensor.

The runtime does not tell which operators a session has, and the serving processes do not read models; but the name of
an operator stands in the file, whatever else does: field 4 of a node, in any graph, body or function.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

DEADLY: Final = ("LSTM", "GRU", "DynamicQuantizeLSTM")
_OP_TYPE: Final = 4 << 3 | 2
"""NodeProto.op_type: its field's number and that it is counted in bytes (onnx.proto)."""


def deadly_operator(path: Path) -> str | None:
    """The operator for which this model may take no empty tensor; None where it has none of them.

    Reads the file: some ten milliseconds for 100 MB.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for name in DEADLY:
            if content.find(bytes((_OP_TYPE, len(name))) + name.encode()) >= 0:
                return name
    return None
