"""The recorder over fake clocks: what is in a record, what is not, and how large it becomes."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

import agent.record_files
import agent.recorder
from agent.journal import Entry
from agent.planner import Known
from agent.record import (
    FORMAT,
    STAGES,
    BadRecord,
    Behaviour,
    DevicePower,
    Head,
    PlanCosts,
    Record,
    Request,
    Requests,
    Table,
    pack,
    unpack,
)
from agent.record_files import HOUR_BYTES, RecordFiles
from agent.recorder import EVERY_S, RING_BYTES, Recorder
from split.plan.plan import LOCAL, Decision, Plan, PlanEstimate, RequestFacts
from split.plan.power import NO_POWER
from split.plan.table import Column, PlanTable
from split.profiles.contract import Contract
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from tests.agent.tiny_card import CUT, SPLIT, tiny_card

LINK = {"rtt_ms": 21.5, "up_mbit_s": 19.75, "down_mbit_s": 48.5, "age_s": 0.1}
CARD = tiny_card("secret-input", "secret-boundary")
PROFILE = ModelProfile(
    digest=CARD.digest,
    runtime="onnxruntime 1",
    fingerprint="f",
    dims={},
    threads=2,
    whole_ms=100.0,
    image_ms=5.0,
    input_codecs=(CodecCosts(codec="raw", bytes=50_000, encode_ms=0.5, decode_ms=0.25),),
    encoded_bytes=5_000,
    output_bytes=40,
    cuts=(
        CutCosts(
            cut=CUT,
            head_ms=20.0,
            tail_ms=70.0,
            codecs=(CodecCosts(codec="raw", bytes=4_000, encode_ms=0.5, decode_ms=0.1),),
        ),
    ),
)
TABLE = PlanTable.build(CARD, PROFILE, Contract())
KNOWN = Known(
    table=TABLE,
    cloud_ms=TABLE.costs[Column.TAIL],
    alpha=1.25,
    beta=0.75,
    speed_ratio=0.5,
    image_ms=5.0,
    cloud_image_ms=2.0,
    cloud_queue_ms=1.5,
    behaviour=Contract().behaviour,
)


class Clock:
    """Both clocks of a daemon; the wall's begins a new hour."""

    def __init__(self) -> None:
        self.now_s = 500.0
        self.wall_offset_s = 1_800_000_000.0 - 500.0
        assert (self.now_s + self.wall_offset_s) % 3600 == 0

    def wall_s(self) -> float:
        return self.now_s + self.wall_offset_s


def recorder(clock: Clock, files: RecordFiles | None = None, known: Mapping[str, Known] | None = None) -> Recorder:
    known = {"m": KNOWN} if known is None else known
    return Recorder(
        knows=lambda model, now_s: known.get(model),
        slowdown=2.0,
        price_per_gb=4.0,
        files=files,
        now_s=lambda: clock.now_s,
        wall_s=clock.wall_s,
    )


def entry(at_s: float, *, model: str = "m", plan: Plan = SPLIT, ran: Plan | None = SPLIT, **more: Any) -> Entry:
    estimate = PlanEstimate(
        plan=plan,
        predicted_ms=81.0,
        risk_ms=90.0,
        stages_ms={"queue": 3.0},
        bytes=4000,
        fidelity=None,
        allowed=True,
    )
    fields: dict[str, Any] = {
        "model": model,
        "received_at_s": at_s,
        "deadline_ms": 250.0,
        "facts": RequestFacts(budget_ms=249.0),
        "decision": Decision(
            chosen=estimate, runners_up=(), reason_of=lambda: "secret-reason", candidates=3, link=LINK
        ),
        "total_ms": 80.125,
        "ran": ran,
        "stages_ms": {"queue": 2.5, "head": 41.0, "network": 24.0, "tail": 12.0},
    }
    return Entry(**(fields | more))


def file_of(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def read(path: Path) -> Record:
    return unpack(path.read_bytes(), name=path.name)


def rows(record: Record) -> list[Request]:
    return [row for _, batch in record.batches for row in batch.rows]


def test_each_model_is_recorded_with_the_power_that_it_runs_at() -> None:
    clock = Clock()
    watts = {"m": 2.0, "n": 5.0}
    writer = Recorder(
        knows=lambda model, now_s: KNOWN,
        power=lambda now_s, model: replace(NO_POWER, compute_w=watts[model], source="a test"),
        now_s=lambda: clock.now_s,
        wall_s=clock.wall_s,
    )
    writer.note(entry(501.0))
    writer.note(entry(501.0, model="n"))
    tables = unpack(writer.last_hour(), name="it").tables.values()
    assert {table.model: table.power.compute_w for table in tables} == watts


def test_what_was_recorded_is_read_again(tmp_path: Path) -> None:
    clock = Clock()
    writer = recorder(clock, RecordFiles(tmp_path / "record", days=1))
    clock.now_s += 2.0
    writer.note(entry(501.0))
    writer.note(entry(501.5, ran=LOCAL, fallback="secret-fallback", facts=RequestFacts(budget_ms=9.0, codec="raw")))
    writer.note(entry(501.75, ran=None, error="DEADLINE_EXCEEDED: secret-error", stages_ms={}))
    writer.close()
    record = read(file_of(tmp_path / "record"))
    (head,), (table,) = record.heads, record.tables.values()
    assert (head.format, head.started_s, head.slowdown, head.price_per_gb) == (FORMAT, 1_800_000_000.0, 2.0, 4.0)
    assert table.model == "m"
    assert [costs.plan for costs in table.plans] == ["local", "split aaaaaaaaaaaa raw", "offload raw"]
    local, split, offload = table.plans
    assert (local.head_ms, local.up_bytes, local.tail_ms, local.allowed) == (100.0, 0, 0.0, 3)
    assert (split.head_ms, split.encode_ms, split.up_bytes, split.tail_ms, split.down_bytes) == (20, 0.5, 4000, 70, 40)
    assert split.cloud_decode_ms == 0.1 * 0.5  # here, times what the companion needs of it
    assert split.decode_ms == pytest.approx(40 * 0.25 / 50_000, abs=1e-4)
    assert (offload.head_ms, offload.tail_ms, offload.finish_ms, offload.fidelity) == (0.0, 100.0, 100.0, None)
    assert offload.allowed == 1  # the input leaves
    first, second, third = rows(record)
    assert (first.at_s, first.plan, first.ran, first.fallback, first.forced) == (1.0, 1, 1, False, False)
    assert (first.deadline_ms, first.predicted_ms, first.total_ms, first.edge_queue_ms) == (250.0, 81.0, 80.13, 3.0)
    assert (first.alpha, first.beta, first.cloud_queue_ms, first.link) == (1.25, 0.75, 1.5, (21.5, 19.75, 48.5))
    assert first.stages_ms == (2.5, 0.0, 0.0, 41.0, 0.0, 24.0, 0.0, 0.0, 12.0)
    assert [STAGES[n] for n in (0, 3, 5, 8)] == ["queue", "head", "network", "tail"]
    assert (second.plan, second.ran, second.fallback, second.forced) == (1, 0, True, True)
    assert (third.ran, third.stages_ms) == (-1, ())
    assert record.seen == 3


def test_the_local_whole_is_recorded_as_the_head() -> None:
    writer = recorder(Clock())
    writer.note(entry(501.0, plan=LOCAL, ran=LOCAL, stages_ms={"queue": 1.0, "whole": 99.0}))
    (row,) = rows(unpack(writer.last_hour(), name="it"))
    assert row.stages_ms == (1.0, 0.0, 0.0, 99.0)


def test_nothing_that_a_caller_or_a_tensor_said_is_in_a_record() -> None:
    writer = recorder(Clock())
    writer.note(entry(501.0, ran=LOCAL, fallback="secret-fallback"))
    writer.note(entry(501.0, ran=None, error="X: secret-error"))
    texts = zstandard.ZstdDecompressor().stream_reader(writer.last_hour(), read_across_frames=True).read()
    assert b"split aaaaaaaaaaaa raw" in texts
    assert b"secret" not in texts


def test_a_million_requests_an_hour_leave_a_megabyte_that_stands_for_all_of_them(tmp_path: Path) -> None:
    clock, dice = Clock(), random.Random(3)
    names = ["common", "rare", "rarest"]
    writer = recorder(clock, RecordFiles(tmp_path / "record", days=1), dict.fromkeys(names, KNOWN))
    sent = Counter[str]()
    for batch in range(359):  # of ten seconds
        start_s = clock.now_s
        some = [
            entry(
                start_s + n / 20,
                model="common" if dice.random() < 0.99 else dice.choice(names),
                total_ms=dice.expovariate(0.01),
                stages_ms={stage: dice.expovariate(0.1) for stage in ("queue", "head", "network", "tail")},
            )
            for n in range(200)
        ]
        for one in itertools.chain(*[some] * 14):
            writer.note(one)
        sent.update(one.model for one in some * 14)
        clock.now_s += EVERY_S
        writer.close_batch()
        if batch % 50 == 0:
            asyncio.run(writer.write_down())
    assert sent.total() > 1_000_000
    writer.close()
    path = file_of(tmp_path / "record")
    assert HOUR_BYTES * 0.8 < path.stat().st_size <= HOUR_BYTES
    record = read(path)
    stands_for = Counter[str]()
    for _, batch in record.batches:
        models = [record.tables[row.table].model for row in batch.rows]
        assert set(batch.seen) == set(models)
        for model in models:
            stands_for[model] += batch.seen[model] / models.count(model)  # type: ignore[assignment]  # it is a float
    assert {name: round(count) for name, count in stands_for.items()} == sent
    assert record.lost == 0
    assert writer.ring_bytes() <= RING_BYTES


def test_a_queue_shows_since_requests_are_recorded_in_runs(tmp_path: Path) -> None:
    clock = Clock()
    writer = recorder(clock, RecordFiles(tmp_path / "record", days=1))
    dice = random.Random(5)
    for n in range(100_000):
        clock.now_s = 500.0 + n / 280
        if n % 2800 == 0:
            writer.close_batch()
        writer.note(entry(clock.now_s, total_ms=dice.expovariate(0.01), stages_ms={"head": dice.expovariate(0.1)}))
    found = rows(unpack(writer.last_hour(), name="it"))
    assert 2000 < len(found) < 50_000
    neighbours = sum(b.at_s - a.at_s < 1.5 / 280 for a, b in itertools.pairwise(found))
    assert neighbours > 0.98 * len(found)


def test_the_last_hour_is_in_memory_and_no_more(tmp_path: Path) -> None:
    clock = Clock()
    writer = recorder(clock)
    for n in range(3 * 60):
        writer.note(entry(clock.now_s, deadline_ms=float(n)))
        clock.now_s += 60.0
        writer.close_batch()
    found = rows(unpack(writer.last_hour(), name="it"))
    assert [row.deadline_ms for row in found] == [float(n) for n in range(119, 180)]
    assert not list(tmp_path.iterdir())


def test_each_hour_has_its_file_only_its_owner_may_read_it_and_old_ones_go(tmp_path: Path) -> None:
    clock, folder = Clock(), tmp_path / "record"
    writer = recorder(clock, RecordFiles(folder, days=1))
    for n in range(30):
        writer.note(entry(clock.now_s, deadline_ms=float(n)))
        clock.now_s += 3600.0
        writer.close_batch()
        asyncio.run(writer.write_down())
    found = sorted(folder.iterdir())
    assert len(found) in (24, 25)  # the newest may have no request yet
    assert [row.deadline_ms for row in rows(read(found[3]))] == [pytest.approx(30.0 - len(found) + 4.0, abs=1.0)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("torn", [1, 7, 40])
def test_a_record_that_a_crash_tore_is_read_up_to_there_and_continued(tmp_path: Path, torn: int) -> None:
    clock, folder = Clock(), tmp_path / "record"
    writer = recorder(clock, RecordFiles(folder, days=1))
    writer.note(entry(501.0))
    writer.close_batch()
    asyncio.run(writer.write_down())
    writer.note(entry(502.0, total_ms=1.0))
    writer.close()
    path = file_of(folder)
    path.write_bytes(path.read_bytes()[:-torn])
    assert [row.at_s for row in rows(read(path))] == [1.0]
    assert read(path).torn_bytes > 0
    clock.now_s += 100.0
    again = recorder(clock, RecordFiles(folder, days=1))
    again.note(entry(601.0))
    again.close()
    record = read(path)
    assert len(record.heads) == 2
    assert [row.at_s for row in rows(record)] == [1.0, 1.0]
    assert record.torn_bytes == 0


@pytest.mark.parametrize("left_bytes", [None, 0, 100])
def test_a_file_that_was_removed_or_cut_is_begun_again_with_all_that_its_requests_refer_to(
    tmp_path: Path, left_bytes: int | None
) -> None:
    clock, folder = Clock(), tmp_path / "record"
    writer = recorder(clock, RecordFiles(folder, days=1), {"m": KNOWN, "n": KNOWN})
    for model in ("m", "n"):
        writer.note(entry(501.0, model=model))
        writer.close_batch()
        asyncio.run(writer.write_down())
    path = file_of(folder)
    if left_bytes is None:
        path.unlink()
    else:
        os.truncate(path, left_bytes)
    writer.note(entry(502.0, model="n"))
    writer.close_batch()
    asyncio.run(writer.write_down())
    writer.note(entry(503.0, model="m"))
    writer.close()
    record = read(path)
    assert [(record.tables[row.table].model, row.at_s) for row in rows(record)] == [("n", 2.0), ("m", 3.0)]
    assert record.torn_bytes == 0


def test_asking_for_the_last_hour_again_and_again_does_not_use_up_the_hours_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame for each of 1700 requests would take more than an hour of 200 kB has."""
    monkeypatch.setattr(agent.recorder, "HOUR_BYTES", 200_000)
    monkeypatch.setattr(agent.recorder, "START_BYTES", 20_000)
    monkeypatch.setattr(agent.record_files, "HOUR_BYTES", 200_000)
    clock, folder = Clock(), tmp_path / "record"
    writer = recorder(clock, RecordFiles(folder, days=1))
    for _ in range(1700):
        writer.note(entry(clock.now_s))
        writer.last_hour()
        clock.now_s += 2.0
    writer.close()
    assert writer.write_error == ""
    record = read(file_of(folder))
    assert (record.seen, record.lost) == (1700, 0)


def test_o_lc_05_a_full_disk_costs_nothing_but_what_it_does_not_take_and_that_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, folder, full = Clock(), tmp_path / "record", True
    pwrite, dice = os.pwrite, random.Random(7)

    def some(file: int, data: bytes, at: int) -> int:
        if full:
            if len(data) < 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(file, data[: len(data) // 2], at)
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", some)
    monkeypatch.setattr(agent.recorder, "WAITING_BYTES", 20_000)
    writer = recorder(clock, RecordFiles(folder, days=1))
    for batch in range(40):
        for _ in range(1000):
            writer.note(entry(clock.now_s, stages_ms={"head": dice.random() * 100, "network": dice.random() * 100}))
        clock.now_s += EVERY_S
        writer.close_batch()
        asyncio.run(writer.write_down())
        assert writer.write_error == ("No space left on device" if full else "")
        full = batch < 30
    assert writer.snapshot()["unwritten"] > 0
    writer.close()
    record = read(file_of(folder))
    assert record.torn_bytes == 0
    assert record.seen + record.lost == 40_000
    assert record.lost == writer.snapshot()["unwritten"]


def test_requests_of_other_sizes_refer_to_tables_near_them_and_say_how_much_more_they_are() -> None:
    writer = recorder(Clock())
    for size in (3, 100, 103, 200):
        writer.note(entry(501.0, facts=RequestFacts(budget_ms=9.0, sizes=(size, 1))))
    record = unpack(writer.last_hour(), name="it")
    found = [(record.tables[row.table].sizes, row.scale) for row in rows(record)]
    assert found == [((3, 1), 1.0), ((99, 1), 1.0101), ((99, 1), 1.0404), ((197, 1), 1.0152)]


def test_requests_with_an_empty_batch_are_recorded_and_stand_beside_others() -> None:
    writer = recorder(Clock())
    for sizes in ((0, 1), (3, 1), (0, 1), (0, 0)):
        writer.note(entry(501.0, facts=RequestFacts(budget_ms=9.0, sizes=sizes)))
    for size in range(4, 100):  # more than there are tables: the nearest stands for the rest
        writer.note(entry(501.0, facts=RequestFacts(budget_ms=9.0, sizes=(size, size))))
    record = unpack(writer.last_hour(), name="it")
    assert record.seen == len(rows(record)) == 100
    assert [(record.tables[row.table].sizes, row.scale) for row in rows(record)[:4]] == [
        ((0, 1), 0.0),
        ((3, 1), 1.0),
        ((0, 1), 0.0),
        ((0, 0), 0.0),
    ]


def test_any_number_of_sizes_has_a_bounded_number_of_tables() -> None:
    writer, dice = recorder(Clock()), random.Random(1)
    for _ in range(3000):
        sizes = (dice.randrange(32, 2000), dice.randrange(32, 2000))
        writer.note(entry(501.0, facts=RequestFacts(budget_ms=9.0, sizes=sizes)))
    record = unpack(writer.last_hour(), name="it")
    assert len(record.tables) <= 64
    assert record.seen == 3000


def test_a_table_is_written_again_when_the_companion_has_told_its_own_times() -> None:
    clock, known = Clock(), {"m": KNOWN}
    writer = recorder(clock, known=known)
    writer.note(entry(501.0))
    known["m"] = KNOWN._replace(cloud_ms=TABLE.costs[Column.TAIL] * 0.1)
    writer.note(entry(503.0))
    known["m"] = KNOWN._replace(cloud_ms=TABLE.costs[Column.TAIL] * 0.105)
    writer.note(entry(505.0))
    record = unpack(writer.last_hour(), name="it")
    assert [record.tables[row.table].plans[1].tail_ms for row in rows(record)] == [70.0, 7.0, 7.0]


def test_requests_of_a_model_that_is_not_measured_yet_are_counted() -> None:
    writer = recorder(Clock())
    writer.note(entry(501.0, model="new"))
    writer.note(entry(501.0))
    record = unpack(writer.last_hour(), name="it")
    assert (record.seen, record.lost) == (1, 1)


HEAD = Head(format=FORMAT, agent="x", started_s=0.0, slowdown=1.0, price_per_gb=0.0, price_per_companion_s=0.0)
NEWER = msgspec.structs.replace(HEAD, format=FORMAT + 1)
LOOSE = Requests(
    seen={"m": 1},
    lost=0,
    rows=(Request(0.0, 3, 1.0, 1.0, 0, 0, False, 0, 0, False, 1, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, (), ()),),
)


BEHAVIOUR = Behaviour(weights=(1.0, 0.0, 0.0, 0.0), service_class="silver", strategy="local", rate_min_per_s=0.0)
WEIGHTLESS = msgspec.structs.replace(BEHAVIOUR, weights=(0.0, 0.0, 0.0, 0.0))
ONE = Table(
    table=0,
    model="m",
    sizes=(),
    image_ms=0.0,
    plans=(PlanCosts("local", *[1.0] * 8, 3, None),),
    power=DevicePower(compute_w=0.0, send_w=0.0, receive_w=0.0, wait_w=0.0, measured=False, source=""),
    behaviour=BEHAVIOUR,
)


@pytest.mark.parametrize(
    ("data", "phrase"),
    [
        (b"", "is no record of traffic: expected zstandard frames"),
        (b"hello", "is no record of traffic: expected zstandard frames"),
        (zstandard.compress(b"hello\n"), "is no record of traffic that this program reads"),
        (zstandard.compress(b'{"is":"tensor"}\n'), "is no record of traffic that this program reads"),
        (zstandard.compress(b"[" * 100_000 + b"\n"), "is no record of traffic that this program reads"),
        (zstandard.compress(bytes(5 << 20)), "is no record of traffic: expected zstandard frames"),
        (pack([NEWER]), "is a record of format 2, this program reads 1"),
        (pack([LOOSE]), "comes without a head"),
        (pack([HEAD, LOOSE]), "refers to table 3"),
        (pack([msgspec.structs.replace(HEAD, price_per_gb=-1.0)]), "price_per_gb"),
        (pack([HEAD, msgspec.structs.replace(LOOSE, lost=-1)]), "lost"),
        (pack([msgspec.structs.replace(HEAD, slowdown=0.0)]), "slowdown"),
        (pack([HEAD, msgspec.structs.replace(ONE, plans=())]), "first plan of a table is 'none', expected local"),
        (
            pack([HEAD, msgspec.structs.replace(ONE, plans=(PlanCosts("split a raw", *[1.0] * 8, 3, None),))]),
            "first plan of a table is 'split a raw', expected local",
        ),
        (
            pack([HEAD, msgspec.structs.replace(ONE, behaviour=WEIGHTLESS)]),
            "a table of 'm' has no weight above 0",
        ),
    ],
)
def test_a_file_that_is_no_record_is_refused_by_name(data: bytes, phrase: str) -> None:
    with pytest.raises(BadRecord, match=phrase) as caught:
        unpack(data, name="some.zst")
    assert str(caught.value).startswith("some.zst")
