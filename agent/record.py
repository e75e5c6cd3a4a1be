"""The format of a record of traffic (`docs/audit.md`): what `recorder.py` writes and `isthmus audit` reads.

A record is a row of zstandard frames, each of them JSON lines, so that `zstd -dc FILE` shows all that was recorded.
Each frame carries its length and a checksum: what a crash has torn off ends the record and costs nothing before it.
No I/O, no clock. Numbers, and the names that the operator gave his models: no tensors, no texts of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, Literal

import msgspec
import zstandard

from split.errors import IsthmusError

FORMAT: Final = 1
FRAME_BYTES_MAX: Final = 4 << 20
"""Of one frame, unpacked: a frame has ten seconds of requests, some 40 KB, and the tables they use."""
FILE_BYTES_MAX: Final = 24_000_000
"""Of what is read at once: a day of full hours, 900,000 requests of 1 KB in memory."""

STAGES: Final = (
    *("queue", "activate", "image", "head", "encode", "network", "cloud_queue", "cloud_decode", "tail", "decode"),
    "local_tail",
)
"""Measured stages in the order of `Request.stages_ms`; `head` is the whole where the whole ran here."""


_Number = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
"""What a file says is not trusted."""


class BadRecord(IsthmusError):
    """A file that is no record of traffic, or of another format."""

    code = "BAD_RECORD"
    status = 400


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="head", tag_field="is"):
    """What holds for all that follows, until the next one (each start of the daemon writes one)."""

    format: int
    agent: str
    """Name and version of the program."""
    started_s: Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
    """Wall clock at the zero of `Request.at_s`, seconds since 1970 at UTC."""
    slowdown: Annotated[float, msgspec.Meta(ge=1.0, le=1e6)]
    """`emulation.slowdown`; 1.0: none."""
    price_per_gb: _Number
    """`link.price_per_gb`; 0.0: none was set."""
    price_per_companion_s: _Number


class PlanCosts(msgspec.Struct, frozen=True, array_like=True):
    """What one plan costs with device, companion and link as they were profiled: ms, bytes."""

    plan: str
    """placement, cut and codec as `isthmus plan` prints them"""
    head_ms: _Number
    """Device: the head, or the whole for local."""
    encode_ms: _Number
    up_bytes: _Number
    """0 for the encoded input, whose size each request brings."""
    cloud_decode_ms: _Number
    tail_ms: _Number
    """Companion: the tail, or the whole for offload."""
    down_bytes: _Number
    decode_ms: _Number
    """Device: of the reply."""
    finish_ms: _Number
    """Device: what is missing if the companion fails."""
    allowed: _Count
    """At how many of the privacy levels any, no-raw-input, local-only the contract allows it."""
    fidelity: float | None
    """By the contract's measure; None: lossless, or not measured."""


class DevicePower(msgspec.Struct, frozen=True, kw_only=True):
    """What the device draws above idle (`split.plan.power.Power`), at the link's rates when this was written."""

    compute_w: _Number
    send_w: _Number
    receive_w: _Number
    wait_w: _Number
    measured: bool
    source: str


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """What the contract asks of a model's answers, as far as it decides between plans (`split.profiles.contract`)."""

    weights: tuple[_Number, _Number, _Number, _Number]
    """latency, throughput, energy, cost; not all 0."""
    service_class: Literal["gold", "silver", "bronze"]
    strategy: Literal["local", "fail", "shadow"]
    """`fallback.strategy`"""
    rate_min_per_s: _Number
    """`throughput_min_per_s`; 0.0: none."""


class Table(msgspec.Struct, frozen=True, kw_only=True, tag="table", tag_field="is"):
    """All plans of one model at some sizes. A model gets another when its costs have become others."""

    table: int
    """Number that requests refer to."""
    model: str
    sizes: tuple[int, ...]
    """Of the model's open dims; () where it has none."""
    image_ms: _Number
    """Device: preparing an encoded input, where the plan does not send it as it came."""
    plans: tuple[PlanCosts, ...]
    """Local first."""
    power: DevicePower
    behaviour: Behaviour


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One finished request; an array of these in this order."""

    at_s: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
    """Since `Head.started`; of its arrival."""
    table: int
    scale: _Number
    """Work of the request / work at the table's sizes."""
    deadline_ms: _Number
    encoded_bytes: _Count
    """0: it came as tensors"""
    privacy: _Count
    """0 any, 1 no-raw-input, 2 local-only"""
    forced: bool
    """The caller asked for placement, cut or codec."""
    plan: int
    """Chosen: number in the table."""
    ran: int
    """What made the answer; -1: there was none."""
    fallback: bool
    parts: int
    predicted_ms: _Number
    total_ms: _Number
    edge_queue_ms: _Number
    """Expected when it was decided."""
    cloud_queue_ms: _Number
    alpha: _Number
    """Drift of the device, measured / profiled."""
    beta: _Number
    """Drift of the companion."""
    link: tuple[_Number, ...]
    """rtt_ms, up_mbit_s, down_mbit_s as estimated when it was decided; () without a companion."""
    stages_ms: tuple[_Number, ...]
    """Measured, in the order of `STAGES`, zeros at the end left out."""


class Requests(msgspec.Struct, frozen=True, kw_only=True, tag="requests", tag_field="is"):
    """The requests that finished between this and the batch before, or some of them in a row."""

    seen: dict[str, _Count]
    """Model → how many finished, recorded or not: each recorded one stands for seen / recorded of its model."""
    lost: _Count
    """Requests that no batch stands for: the disk was full, or the model not measured yet."""
    rows: tuple[Request, ...]


Line = Head | Table | Requests

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


def pack(lines: Iterable[Head | Table | Requests]) -> bytes:
    """One frame."""
    text = b"".join(_encoder.encode(line) + b"\n" for line in lines)
    packed: bytes = zstandard.ZstdCompressor(level=6, write_checksum=True).compress(text)
    return packed


def whole_frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each sound frame from the start of `data`: (offset of its end, text); ends at the first that is torn, damaged or
    too large."""
    end = 0
    while end < len(data):
        rest = data[end : end + FRAME_BYTES_MAX]
        try:
            size = zstandard.get_frame_parameters(rest).content_size
            if not 0 <= size <= FRAME_BYTES_MAX:
                return
            frame = zstandard.ZstdDecompressor().decompressobj()
            text: bytes = frame.decompress(rest)
        except zstandard.ZstdError:
            return
        if not frame.eof:
            return
        end += len(rest) - len(frame.unused_data)
        yield end, text


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What was read."""

    heads: tuple[Head, ...]
    tables: dict[int, Table]
    batches: tuple[tuple[int, Requests], ...]
    """(Number of its head, batch)."""
    torn_bytes: int
    """Behind what is sound."""

    @property
    def seen(self) -> int:
        """Requests that the record stands for."""
        return sum(sum(batch.seen.values()) for _, batch in self.batches)

    @property
    def lost(self) -> int:
        return sum(batch.lost for _, batch in self.batches)


def unpack(*files: bytes, name: str) -> Record:
    """A record, or several that follow each other. BadRecord (which calls them `name`) where not one frame is sound, or
    where what they say makes no sense."""
    if (size := sum(map(len, files))) > FILE_BYTES_MAX:
        raise BadRecord(f"{name} has {size} bytes of records, at most {FILE_BYTES_MAX} are read: give fewer at once")
    heads: list[Head] = []
    tables: dict[int, Table] = {}
    batches: list[tuple[int, Requests]] = []
    torn_bytes = 0
    for data in files:
        sound_bytes = 0
        for end, text in whole_frames(data):
            sound_bytes = end
            for line in _lines(text, name):
                match line:
                    case Head():
                        heads.append(_known_format(line, name))
                    case Table():
                        _check_table(line, name)
                        tables[_of_start(line.table, heads, name)] = line
                    case Requests():
                        rows = [
                            msgspec.structs.replace(row, table=_of_start(row.table, heads, name)) for row in line.rows
                        ]
                        _check(rows, tables, name)
                        _check_seen(line.seen, rows, tables, name)
                        batches.append((len(heads) - 1, msgspec.structs.replace(line, rows=tuple(rows))))
        torn_bytes += len(data) - sound_bytes
    if not heads:
        raise BadRecord(
            f"{name} is no record of traffic: expected zstandard frames of JSON lines that begin with a head, as "
            "`record` in the daemon's configuration and `isthmus audit --url URL --save FILE` write them"
        )
    return Record(heads=tuple(heads), tables=tables, batches=tuple(batches), torn_bytes=torn_bytes)


TABLES_PER_HEAD: Final = 1 << 20
"""Apart in the numbers of tables of different starts."""


def _known_format(head: Head, name: str) -> Head:
    if head.format != FORMAT:
        raise BadRecord(
            f"{name} is a record of format {head.format}, this program reads {FORMAT}; read it with the version that "
            f"wrote it ({head.agent})"
        )
    return head


def _of_start(table: int, heads: Sequence[Head], name: str) -> int:
    """The table's number among all starts in the record."""
    if not heads or not 0 <= table < TABLES_PER_HEAD:
        raise BadRecord(f"{name} is no sound record: table {table} comes without a head or is out of range")
    return (len(heads) - 1) * TABLES_PER_HEAD + table


def _lines(text: bytes, name: str) -> Iterator[Head | Table | Requests]:
    for line in text.splitlines():
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadRecord(f"{name} is no record of traffic that this program reads: {error}") from None


def _check_seen(seen: dict[str, int], rows: Sequence[Request], tables: dict[int, Table], name: str) -> None:
    kept = Counter(tables[row.table].model for row in rows)
    if short := [model for model, count in kept.items() if seen.get(model, 0) < count]:
        raise BadRecord(f"{name} is no sound record: it has more requests of {short[0]!r} than were seen")


def _check_table(table: Table, name: str) -> None:
    if not table.plans or table.plans[0].plan != "local":
        found = table.plans[0].plan if table.plans else "none"
        raise BadRecord(f"{name} is no sound record: the first plan of a table is {found!r}, expected local")
    if not any(table.behaviour.weights):
        raise BadRecord(f"{name} is no sound record: a table of {table.model!r} has no weight above 0")


def _check(rows: Sequence[Request], tables: dict[int, Table], name: str) -> None:
    """What the types do not say: numbers that refer to something."""
    for row in rows:
        table = tables.get(row.table)
        if table is None:
            raise BadRecord(f"{name} is no sound record: a request refers to table {row.table}, which is not in it")
        if not (0 <= row.plan < len(table.plans) and -1 <= row.ran < len(table.plans)):
            raise BadRecord(f"{name} is no sound record: a request refers to a plan that its table does not have")
        if row.link and (len(row.link) != 3 or min(row.link[1:]) <= 0.0):
            raise BadRecord(
                f"{name} is no sound record: a request's link is {row.link}, expected a round trip and rates"
            )
        if len(row.stages_ms) > len(STAGES):
            raise BadRecord(f"{name} is no sound record: a request has {len(row.stages_ms)} stages, not {len(STAGES)}")
