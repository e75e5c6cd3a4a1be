"""Where a model may be cut and what crosses there; `candidates.py` says which places are worth measuring.

A cut is a set of nodes on the device side, closed under "needs"; here it is a bit mask over `Model.nodes`. A value that
the tail reads and the head makes is in the boundary, whatever it is called and whether or not it is an output too.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from split.errors import CutRefused
from split.graph.card import CutCard
from split.graph.cost import node_flops
from split.graph.exposure import shown_inputs
from split.graph.model import Model, read_values
from split.graph.quantised import inside_groups
from split.graph.quirks import misread
from split.ids import CutId, cut_id
from split.tensor import NAME_BYTES_MAX, RANK_MAX, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One place to part a model. Illegal ones say why (`reason`) and keep their names for listings."""

    id: CutId
    mask: int
    """Bit `GraphNode.bit` is set for each node on the device side."""
    nodes: int
    boundary: tuple[str, ...]
    """In the order in which the head makes them."""
    head_inputs: tuple[str, ...]
    head_outputs: tuple[str, ...]
    """Model outputs the device has after the head: made there, or inputs and constants handed through."""
    tail_inputs: tuple[str, ...]
    tail_outputs: tuple[str, ...]
    reason: str = ""
    """Why this cut may not be made, as a sentence; empty for a legal one."""

    @property
    def legal(self) -> bool:
        return not self.reason


def cut_from_mask(model: Model, mask: int, *, refused: Mapping[str, str] | None = None) -> Cut:
    """The cut whose device side is this set; CutRefused when the set is not closed under "needs" or no set of nodes.

    `refused`: what `troubles` says of this model, for those who ask about many cuts.
    """
    if mask < 0 or mask >> len(model.nodes):
        raise CutRefused(f"the cut names nodes that {model.path.name} does not have: it has {len(model.nodes)}")
    walk = _Walk(model, refused)
    tail_made: set[str] = set()
    for node in model.nodes:
        if mask >> node.bit & 1:
            missing = next((name for name in node.reads if name in tail_made), None)
            if missing is not None:
                raise CutRefused(f"the cut keeps {node.key!r} on the device but not {missing!r}, which it needs")
            walk.take(node.bit)
        else:
            tail_made.update(node.makes)
    return walk.cut()


def cut_from_nodes(model: Model, keys: Iterable[str]) -> Cut:
    """The cut whose device side is the nodes with these keys; CutRefused for a key that is none, or for an open set."""
    bits = {node.key: node.bit for node in model.nodes}
    mask = 0
    for key in keys:
        if key not in bits:
            raise CutRefused(f"{key!r} is not the key of a node of {model.path.name} that computes with its inputs")
        mask |= 1 << bits[key]
    return cut_from_mask(model, mask)


def cut_at(model: Model, names: Iterable[str]) -> Cut:
    """The smallest cut after which the device has these tensors; CutRefused for a name that is no activation."""
    makers = {name: node for node in model.nodes for name in node.makes}
    mask = 0
    waiting = list(names)
    for name in waiting:
        if name in model.constants:
            raise CutRefused(f"{name!r} is a constant of {model.path.name}, both sides have it; cut at an activation")
        if name not in model.values:
            raise CutRefused(f"{name!r} is not a top-level tensor of {model.path.name}; cut at one that a node makes")
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is not None and not mask >> maker.bit & 1:
            mask |= 1 << maker.bit
            waiting.extend(maker.reads)
    return cut_from_mask(model, mask)


def all_prefix_cuts(model: Model) -> list[Cut]:
    """The cut after each node but the last in topological order, refused ones too: `len(model.nodes) - 1` cuts."""
    walk = _Walk(model)
    cuts = []
    for node in model.nodes[:-1]:
        walk.take(node.bit)
        cuts.append(walk.cut())
    return cuts


def compute_shares(model: Model, cuts: Sequence[Cut]) -> list[float]:
    """Estimated share of the model's compute in each head, 0…1."""
    cost = {node.bit: flops for node, flops in zip(model.nodes, node_flops(model), strict=True)}
    total = sum(cost.values()) or 1.0
    shares = []
    before, done = 0, 0.0
    for cut in cuts:  # one cut differs from the next by few nodes
        done += sum(cost[bit] for bit in _bits(cut.mask & ~before)) - sum(
            cost[bit] for bit in _bits(before & ~cut.mask)
        )
        before = cut.mask
        shares.append(min(max(done / total, 0.0), 1.0))
    return shares


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def crossing_bytes(model: Model, cut: Cut) -> int:
    """Bytes that travel uncoded at the dims one works with: the boundary and the inputs the tail needs."""
    return sum(model.nbytes(name) for name in (*cut.boundary, *cut.tail_inputs))


def weights_of(model: Model, numbers: Iterable[int]) -> dict[str, int]:
    """Constants that these of `model.nodes` read, bodies included, and their bytes."""
    names = (str(value.name) for number in numbers for value in read_values(model.nodes[number].source))
    return {name: model.nbytes(name) for name in dict.fromkeys(names) if name in model.constants}


def boundary_specs(model: Model, cut: Cut) -> tuple[TensorSpec, ...]:
    """Specs of a legal cut's boundary as it travels; CutRefused with the reason for one that is not legal."""
    if cut.reason:
        raise CutRefused(f"cut {cut.id}: {cut.reason}")
    specs = [model.crossing(name) for name in cut.boundary]
    return tuple(spec for spec in specs if isinstance(spec, TensorSpec))


def cut_card(model: Model, cut: Cut, share: float) -> CutCard:
    """What the serving processes keep of a legal cut; CutRefused with the reason for one that is not."""
    shown = shown_inputs(model)
    crossing = (*cut.boundary, *cut.tail_inputs)
    return CutCard(
        id=cut.id,
        boundary=boundary_specs(model, cut),
        shown_inputs=tuple(sorted(frozenset[str]().union(*(shown.get(name, ()) for name in crossing)))),
        head_inputs=cut.head_inputs,
        head_outputs=cut.head_outputs,
        tail_inputs=cut.tail_inputs,
        tail_outputs=cut.tail_outputs,
        nodes=cut.nodes,
        compute_share=round(share, 6),
        head_weight_bytes=sum(
            weights_of(model, (at for at, node in enumerate(model.nodes) if cut.mask >> node.bit & 1)).values()
        ),
        node_bitmap=bitmap_of(cut.mask, len(model.nodes)),
    )


def bitmap_of(mask: int, nodes: int) -> str:
    """Hex bitmap, bit 0 of byte 0 first (`CutCard.node_bitmap`)."""
    return mask.to_bytes((nodes + 7) // 8, "little").hex()


def mask_of(bitmap: str) -> int:
    """The mask of a `node_bitmap`; CutRefused when it is no hex."""
    try:
        return int.from_bytes(bytes.fromhex(bitmap), "little")
    except ValueError:
        raise CutRefused(f"the node bitmap {bitmap[:40]!r} is not hexadecimal") from None


class _Walk:
    """The live set while nodes move to the device side one after the other, in topological order."""

    def __init__(self, model: Model, refused: Mapping[str, str] | None = None) -> None:
        self._model = model
        self._nodes = {node.bit: node for node in model.nodes}
        self._readers = Counter(name for node in model.nodes for name in node.reads)
        self._inputs = tuple(spec.name for spec in model.inputs)
        makers = {name for node in model.nodes for name in node.makes}
        self._passed = tuple(name for name in model.output_names if name not in makers)
        self._trouble = troubles(model) if refused is None else refused
        self._mask = 0
        self._keys: list[str] = []
        self._live: dict[str, None] = {}
        self._read: set[str] = set()
        self._made: set[str] = set()
        self._outputs = {name: None for name in model.output_names if name in makers}

    def take(self, bit: int) -> None:
        node = self._nodes[bit]
        self._mask |= 1 << bit
        insort(self._keys, node.key)
        for name in node.reads:
            self._readers[name] -= 1
            self._read.add(name)
            if not self._readers[name]:
                self._live.pop(name, None)
        for name in node.makes:
            if self._readers[name]:
                self._live[name] = None
            if name in self._outputs:
                self._made.add(name)

    def cut(self) -> Cut:
        passing = frozenset[str]() if self._mask else frozenset(self._passed)
        tail_inputs = tuple(name for name in self._inputs if self._readers[name] or name in passing)
        kept = self._made.union(self._passed) if self._mask else frozenset[str]()
        handed = [name for name in self._passed if self._mask and name in self._inputs]
        return Cut(
            id=cut_id(self._keys),
            mask=self._mask,
            nodes=len(self._keys),
            boundary=tuple(self._live),
            head_inputs=tuple(name for name in self._inputs if name in self._read or name in handed),
            head_outputs=tuple(name for name in self._model.output_names if name in kept),
            tail_inputs=tail_inputs,
            tail_outputs=tuple(name for name in self._model.output_names if name not in kept),
            reason=self._reason(tail_inputs),
        )

    def _reason(self, tail_inputs: Iterable[str]) -> str:
        if self._model.no_cuts_reason:
            return self._model.no_cuts_reason
        for name in (*self._live, *tail_inputs):
            if name in self._trouble:
                return self._trouble[name]
        return ""


def troubles(model: Model) -> dict[str, str]:
    """Values that cannot cross a boundary → why, as a sentence."""
    found = {**misread(model), **inside_groups(model)}
    found |= {name: text for name in model.values if (text := _trouble(model, name))}
    return found


def _trouble(model: Model, name: str) -> str:
    """Why a value cannot cross a boundary on account of its type or name, as a sentence; '' when it can."""
    if not 1 <= len(name.encode()) <= NAME_BYTES_MAX:
        return (
            f"tensor {name[:40]!r}… has a name of {len(name.encode())} bytes; what crosses has {NAME_BYTES_MAX} at most"
        )
    spec = model.spec(name)
    if isinstance(spec, str):
        return f"tensor {name!r} {spec}"
    if spec.dtype == "BYTES":
        return f"tensor {name!r} holds strings, which do not cross a boundary"
    if len(spec.shape) > RANK_MAX:
        return f"tensor {name!r} has {len(spec.shape)} dims; what crosses has {RANK_MAX} at most"
    if name in model.output_names and model.crossing(name) != spec:
        return f"tensor {name!r} is a 16-bit output that the tail needs unrounded; cut elsewhere"
    return ""
