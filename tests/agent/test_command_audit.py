"""`isthmus audit` on the record of a simulated run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from agent.cli import run
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
    assert lines[-1].startswith("Isthmus would have saved ")
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
    assert found["in_words"].startswith("Isthmus would have saved")


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
