"""`isthmus audit` on the record of a simulated run."""

from __future__ import annotations

import json
import random
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from agent.cli import run
from agent.http_client import DaemonClient
from agent.record import Requests, pack, unpack
from agent.replay.tally import Tally, in_words
from tests.agent.recorded_world import recorded


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "record.zst"
    path.write_bytes(recorded("outage")[2])
    return path


def test_the_table_has_a_row_for_what_was_done_for_doing_nothing_and_for_the_best(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["audit", str(record)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "400 requests in 1.3 min"
    rows = {line[:26].strip(): line[26:].split() for line in lines[2:16]}
    assert {"as it was", "as it was, replayed", "do nothing", "isthmus", "oracle"} <= set(rows)
    means = {name: float(cells[0]) for name, cells in rows.items() if name}
    assert means["oracle"] < means["as it was"] < means["do nothing"]
    assert rows["do nothing"][-1] == "100%"
    assert "energy above idle, modelled: a test" in lines
    saved = 1.0 - means["as it was"] / means["do nothing"]
    assert lines[-1].startswith(f"Isthmus saved {saved:.0%} of the waiting")
    assert lines[-1].endswith(" in money.")


def test_the_same_as_json_with_chosen_policies_prices_and_device(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--policy", "local", "--policy", "ours", "--price-per-gb", "100", "--device", "rk3588", "--json"]
    assert run(["audit", str(record), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    was, nothing, ours = found["policies"]
    assert [one["policy"] for one in (was, nothing, ours)] == ["as it was", "do nothing", "isthmus"]
    assert was["money"] == pytest.approx(was["bytes"] * 100 / 1e9)
    assert nothing["bytes"] == nothing["money"] == 0
    assert nothing["joules"] > ours["joules"] > 0
    assert "rk3588" in found["energy"]["source"]
    assert found["replay_off_ratio"] is None
    assert found["in_words"].startswith("Isthmus saved")


def test_the_sentence_is_of_what_isthmus_did_where_it_decided_and_of_a_replay_where_callers_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = unpack(recorded("steady")[2], name="it")

    def said(forced: Callable[[int], bool]) -> str:
        batches = []
        for _, batch in record.batches:
            rows = [msgspec.structs.replace(row, table=0, forced=forced(n)) for n, row in enumerate(batch.rows)]
            batches.append(msgspec.structs.replace(batch, rows=tuple(rows)))
        path = tmp_path / "some.zst"
        path.write_bytes(pack([record.heads[0], msgspec.structs.replace(record.tables[0], table=0), *batches]))
        assert run(["audit", str(path), "--policy", "local", "--policy", "ours"]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert said(lambda n: False).startswith("Isthmus saved ")
    assert said(lambda n: True).startswith("Isthmus would have saved ")
    some = said(lambda n: n % 2 == 0)
    assert some.startswith("Isthmus saved ")
    assert some.endswith("recorded requests whose callers asked for a plan.")


def test_hedging_is_told_apart_from_choosing(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", str(record), "--policy", "ours, without hedges", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found["policies"]] == ["as it was", "isthmus, without hedges"]


def test_what_is_fetched_is_saved_whole_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, path = recorded("steady")[2], tmp_path / "hour.zst"
    path.write_bytes(b"an older one")
    path.chmod(0o644)
    monkeypatch.setattr(DaemonClient, "fetch", lambda client, what: data)
    assert run(["audit", "--url", "http://127.0.0.1:1", "--save", str(path), "--policy", "local"]) == 0
    assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["hour.zst"]


def test_a_terminal_is_told_how_far_it_is(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["audit", str(record), "--policy", "local"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(["audit", str(record), "--policy", "local"]) == 0
    assert "replaying 400 requests, 1 of 1: do nothing" in capsys.readouterr().err


def test_the_picture_shows_latency_over_time(record: Path, tmp_path: Path) -> None:
    assert run(["audit", str(record), "--policy", "local", "--plot", str(tmp_path / "it.png")]) == 0
    with Image.open(tmp_path / "it.png") as picture:
        assert picture.size == (1100, 520)
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 10


def test_a_folder_of_records_is_one_record(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "record"
    folder.mkdir()
    for name in ("2027-01-15T08.zst", "2027-01-15T09.zst"):
        (folder / name).write_bytes(record.read_bytes()[: -3 if "08" in name else None])
    assert run(["audit", str(folder), "--policy", "local"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert int(lines[0].split()[0]) > 700  # the last batch of the first one is torn
    assert "bytes are torn or damaged, and left out" in lines[1]


@pytest.mark.parametrize(
    ("content", "phrase"),
    [(None, "cannot be read: No such file"), (b"", "is no record of traffic"), (b"text", "is no record of traffic")],
)
def test_what_is_no_record_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, phrase: str
) -> None:
    if content is not None:
        (tmp_path / "it.zst").write_bytes(content)
    assert run(["audit", str(tmp_path / "it.zst")]) == 1
    assert phrase in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(40))
def test_a_record_with_any_numbers_is_replayed_or_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """What a file says is not trusted: costs, links and times of 0, or of a thousand years."""
    record, dice = unpack(recorded("outage")[2], name="it"), random.Random(seed)
    share = dice.choice((0.02, 0.1, 0.5))

    def other(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(other(one) for one in value)
        if isinstance(value, float) and dice.random() < share:
            return dice.choice((0.0, 1e-9, 1.0, 1e6, 1e12))
        return value

    def changed(struct: Any) -> Any:
        return type(struct)(**{name: other(getattr(struct, name)) for name in struct.__struct_fields__})

    rows = [row for _, batch in record.batches for row in batch.rows][:25]
    table = record.tables[0]
    plans = tuple(changed(plan) for plan in table.plans)
    batch = Requests(seen={"m": 25}, lost=0, rows=tuple(changed(msgspec.structs.replace(row, table=0)) for row in rows))
    path = tmp_path / "odd.zst"
    path.write_bytes(pack([record.heads[0], msgspec.structs.replace(table, plans=plans), batch]))
    status = run(["audit", str(path)])
    said = capsys.readouterr()
    assert (status, bool(said.err)) in ((0, False), (1, True)), said


def test_a_record_in_which_nothing_took_time_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = unpack(recorded("outage")[2], name="it")
    rows = [row for _, batch in record.batches for row in batch.rows][:3]
    at_once = tuple(msgspec.structs.replace(row, table=0, total_ms=0.0, stages_ms=()) for row in rows)
    path = tmp_path / "at-once.zst"
    path.write_bytes(pack([record.heads[0], record.tables[0], Requests(seen={"m": 3}, lost=0, rows=at_once)]))
    assert run(["audit", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replay_off_ratio"] is None


def test_an_empty_folder_says_how_records_come_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", str(tmp_path)]) == 1
    assert "record: {enabled: true}" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["a", "--url", "http://127.0.0.1:1"], ["a", "--policy", "magic"]])
def test_a_call_that_makes_no_sense_is_a_mistake_of_usage(options: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["audit", *options])
    assert caught.value.code == 2


def of(mean_ms: float, missed: int, *, size: int = 0, money: float = 0.0) -> Tally:
    return Tally(
        policy="",
        requests=100,
        mean_ms=mean_ms,
        p95_ms=0.0,
        missed=missed,
        joules=0.0,
        bytes=size,
        money=money,
        local_ratio=0.0,
    )


@pytest.mark.parametrize(
    ("ours", "nothing", "said"),
    [
        (
            of(69.0, 1, size=84_000_000),
            of(100.0, 3),
            "Isthmus would have saved 31% of the waiting and met 2 of 3 missed deadlines over doing nothing; it would "
            "have cost 84 MB.",
        ),
        (
            of(50.0, 0, size=84_000_000, money=0.336),
            of(100.0, 0),
            "Isthmus would have saved 50% of the waiting over doing nothing; it would have cost 84 MB and "
            "0.336 in money.",
        ),
        (
            of(120.0, 0, size=2_000),
            of(100.0, 3),
            "Isthmus would have met 3 of 3 missed deadlines over doing nothing; it would have cost 20% more waiting, "
            "2 kB.",
        ),
        (
            of(50.0, 4, size=2_000),
            of(100.0, 3),
            "Isthmus would have saved 50% of the waiting over doing nothing; it would have cost 1 more missed "
            "deadlines, 2 kB.",
        ),
        (of(99.9, 0), of(100.0, 0), "Doing nothing would have been as good: everything on the device takes 100 ms."),
        (of(1.0, 0), of(0.0, 0), "Doing nothing would have been as good: everything on the device takes 0 ms."),
        (
            of(110.0, 2, size=5),
            of(100.0, 1),
            "Doing nothing would have been better: Isthmus would have cost 10% more waiting and 1 more missed "
            "deadlines, and 5 bytes.",
        ),
    ],
)
def test_the_sentence_says_what_was_gained_and_what_for_and_when_doing_nothing_wins(
    ours: Tally, nothing: Tally, said: str
) -> None:
    assert in_words(ours, nothing) == said


def test_what_was_done_is_said_as_done() -> None:
    assert in_words(of(69.0, 1, size=84_000_000), of(100.0, 3), measured=True) == (
        "Isthmus saved 31% of the waiting and met 2 of 3 missed deadlines over doing nothing; it cost 84 MB."
    )
    assert in_words(of(110.0, 2, size=5), of(100.0, 1), measured=True) == (
        "Doing nothing would have been better: Isthmus cost 10% more waiting and 1 more missed deadlines, and 5 bytes."
    )
