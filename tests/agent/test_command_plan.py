"""`isthmus plan` on a tiny model that is measured for real once; what is checked does not depend on how fast it ran."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.parser
import pytest
from PIL import Image

from agent.commands import fingerprint, plan, profile
from agent.fingerprint import take_fingerprint
from split.errors import ConfigError, InvalidRequest
from split.graph.card import read_card
from split.profiles.contract import Fidelity
from split.profiles.measured import read_profile, write_profile

PLAN_FIELDS = ["placement", "cut", "codec", "predicted_ms", "stages_ms", "bytes", "fidelity", "allowed", "why_not"]
PLAN_FIELDS += ["energy_j", "money", "level"]
MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
tiny (float[1,64] x) => (float[1,4] y)
<float[64,8] w1 = {W1}, float[8,4] w2 = {W2}> {
  a = MatMul(x, w1)
  b = Relu(a)
  y = MatMul(b, w2)
}
""".replace("W1", ",".join(["0.1"] * 512)).replace("W2", ",".join(["0.2"] * 32))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    onnx.save(onnx.parser.parse_model(MODEL), folder / "tiny.onnx")
    return folder


def ask(home: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    arguments = parser.parse_args([str(home / "tiny.onnx"), "--cache", str(home / "cache"), "--json", *options])
    assert plan.run(arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_the_documented_shape_and_the_chosen_plan_is_the_fastest_allowed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(home, capsys)
    assert list(found) == ["chosen", "runners_up", "reason"]
    plans = [found["chosen"], *found["runners_up"]]
    for each in plans:
        assert list(each) == PLAN_FIELDS
        assert sum(each["stages_ms"].values()) == pytest.approx(each["predicted_ms"])
        assert each["allowed"] is (each["why_not"] == "")
    assert found["chosen"]["predicted_ms"] == min(each["predicted_ms"] for each in plans if each["allowed"])
    assert {"local", "split", "offload"} == {each["placement"] for each in plans}
    assert all("does not allow codec" in each["why_not"] for each in plans if each["codec"] in ("fp16", "int8"))


def test_a_slow_link_keeps_everything_on_the_device(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(home, capsys, "--rtt-ms", "5000")
    assert found["chosen"]["placement"] == "local"
    assert "the best split" in found["reason"]


def test_a_codec_that_the_daemon_does_not_use_now_is_not_allowed_and_says_why(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert any(each["codec"] == "raw" and each["allowed"] for each in ask(home, capsys)["runners_up"])
    why = "live answers over codec raw are 2.00 times as far off as the bound allows"
    status = {"models": [{"name": home.parent.name, "codecs_why_not": {"raw": why}}]}
    monkeypatch.setattr(plan.DaemonClient, "get", lambda *_: status)
    found = ask(home, capsys, "--url", "http://127.0.0.1:9")
    assert found["chosen"]["placement"] == "local"
    raw = [each for each in found["runners_up"] if each["codec"] == "raw"]
    assert raw
    assert {(each["allowed"], each["why_not"]) for each in raw} == {(False, why)}


def test_prices_show_what_each_plan_would_cost(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(home, capsys, "--price-per-gb", "4", "--rtt-ms", "5000")
    for each in (found["chosen"], *found["runners_up"]):
        # 64 or 8 floats up, 4 down, twice 4096 of metadata
        least = 0.0 if each["placement"] == "local" else 4e-9 * (each["bytes"] + 16 + 2 * 4096)
        assert each["money"] == pytest.approx(least, rel=0.02)


def test_a_slower_device_takes_longer_for_every_stage_of_its_own(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def split_raw(*options: str) -> dict[str, float]:
        found = ask(home, capsys, *options)
        plans = [found["chosen"], *found["runners_up"]]
        raw = [each for each in plans if (each["placement"], each["codec"]) == ("split", "raw")]
        stages: dict[str, float] = min(raw, key=lambda each: str(each["cut"]))["stages_ms"]  # the same one both times
        return stages

    once, slowed = split_raw(), split_raw("--slowdown", "7")
    for stage, ms in once.items():
        factor = 7.0 if stage in ("head", "encode", "decode") else 1.0
        assert slowed[stage] == pytest.approx(factor * ms), stage


def test_link_and_companion_speed_enter_as_given(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def offload_raw(*options: str) -> dict[str, Any]:
        found = ask(home, capsys, *options)
        plans = [found["chosen"], *found["runners_up"]]
        return next(each for each in plans if (each["placement"], each["codec"]) == ("offload", "raw"))

    slow = offload_raw("--rtt-ms", "10", "--rate-mbit", "1")
    assert slow["stages_ms"]["up"] == pytest.approx(5.0 + slow["bytes"] * 8 / 1000)
    fast = offload_raw("--rtt-ms", "10", "--rate-mbit", "1", "--cloud-speedup", "4")
    assert fast["stages_ms"]["tail"] == pytest.approx(slow["stages_ms"]["tail"] / 4)


def test_joules_are_those_of_the_named_board_and_of_the_link_that_is_sent_by(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = take_fingerprint(speed_test_s=0.0)
    monkeypatch.setattr(fingerprint, "known_fingerprint", lambda _: device)

    def plans(*options: str) -> dict[str, dict[str, Any]]:
        found = ask(home, capsys, "--device", "raspberry-pi-5", "--rate-mbit", "5", "--rtt-ms", "100", *options)
        return {each["placement"]: each for each in (*found["runners_up"], found["chosen"])}

    wired, lte = plans(), plans("--link-kind", "lte")
    # A Raspberry Pi 5 draws 8 W more on its four cores than idle.
    assert wired["local"]["energy_j"] == pytest.approx(0.008 * wired["local"]["predicted_ms"])
    # 1.06 W while an LTE modem waits out the 100 ms; the bytes of this model are few.
    assert lte["offload"]["energy_j"] - wired["offload"]["energy_j"] == pytest.approx(0.106, rel=0.05)


def test_inputs_from_a_file_are_checked_against_the_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(home / "right.npz", x=np.ones((1, 64), np.float32))
    np.savez(home / "wrong.npz", x=np.ones((1, 65), np.float32))
    assert ask(home, capsys, "--inputs", str(home / "right.npz"))["chosen"]["allowed"]
    with pytest.raises(InvalidRequest, match="must have shape"):
        ask(home, capsys, "--inputs", str(home / "wrong.npz"))


def test_what_cannot_be_is_refused_with_what_to_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="no input that may come encoded"):
        ask(home, capsys, "--encoded-bytes", "5000")
    with pytest.raises(ConfigError, match="raspberry-pi-4"):
        ask(home, capsys, "--device", "no-such-board")
    for option in ("--rate-mbit", "--rtt-ms", "--slowdown", "--cloud-speedup"):
        for value in ("0", "1e-320", "nan", "1e308", "fast"):
            with pytest.raises(SystemExit):
                ask(home, capsys, option, value)
            assert f"argument {option}: expected a number from 0.001 to 1e+06, got '{value}'" in capsys.readouterr().err


def test_people_get_a_table_and_one_sentence_why(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    assert plan.run(parser.parse_args([str(home / "tiny.onnx"), "--cache", str(home / "cache")])) == 0
    shown = capsys.readouterr().out
    assert "* local" in shown
    assert "why: local is expected first" in shown


def test_the_plot_has_a_bar_for_each_plan_as_long_as_the_plan_takes(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(home, capsys, "--plot", str(home / "plan.png"))
    with Image.open(home / "plan.png") as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    times = [each["predicted_ms"] for each in (found["chosen"], *found["runners_up"])][:20]
    assert pixels.shape == (96 + 26 * len(times) + 48, 1000, 3)
    for row, ms in enumerate(times):
        line = pixels[96 + 26 * row + 13, 251:]
        paper = np.flatnonzero(line.min(axis=1) > 250)  # it begins where the bar ends; the longest is of 620 pixels
        assert paper[0] == pytest.approx(620 * ms / max(times), abs=4)


def test_both_commands_say_which_times_are_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "tiny.onnx")
    ask(tmp_path, capsys)  # cuts and measures
    [folder] = (tmp_path / "cache/models").iterdir()
    known = read_profile(folder)
    assert known is not None
    assert known.cuts
    cuts = tuple(msgspec.structs.replace(cut, estimated=True, head_ms=1.25) for cut in known.cuts)
    write_profile(msgspec.structs.replace(known, cuts=cuts), folder)
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    assert plan.run(parser.parse_args([str(tmp_path / "tiny.onnx"), "--cache", str(tmp_path / "cache")])) == 0
    lines = capsys.readouterr().out.splitlines()
    marked = {"estimated from other cuts" in line for line in lines if line[2:7] == "split"}
    others = {"estimated" in line for line in lines if line[2:7] in ("local", "offlo")}
    assert (marked, others) == ({True}, {False})
    table = "\n".join(profile._table(read_card(folder), msgspec.structs.replace(known, cuts=cuts), Fidelity()))
    assert "~1.25" in table
    assert "~ estimated from the cuts that were measured" in table
