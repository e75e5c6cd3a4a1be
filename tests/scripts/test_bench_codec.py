"""Pieces of `scripts/bench codec`: bytes at equal fidelity, their intervals, what it measures on."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts.benches.codec import REFERENCES, TARGETS
from scripts.benches.codec_curves import Curve, Measurements, bytes_at, cheapest, ratio_at
from scripts.benches.codec_model import Contest, Network, Stages, modelled_ms, summary
from scripts.benches.codec_plot import draw
from scripts.benches.codec_rivals import Detail, measure, picture_rivals
from scripts.benches.codec_subjects import WORDS, Sample, Subject, as_input, crops_of, with_text, word_pieces, words
from scripts.benches.links import Measured, with_int8
from split.profiles.image_spec import ImageSpec
from split.tensor import Tensors


def curve(*points: tuple[float, float]) -> Curve:
    sizes, off = zip(*points, strict=True)
    return Curve.of(np.array(sizes, float), np.array(off, float))


def measured(sizes: list[list[float]], off: list[list[float]], sources: list[int]) -> Measurements:
    return Measurements(
        settings=tuple(map(str, range(len(sizes)))),
        bytes=np.array(sizes, float),
        fidelity=np.array(off, float),
        sources=np.array(sources),
    )


def test_between_two_settings_bytes_are_a_power_of_the_measure() -> None:
    # 1000 bytes at 0.1, 4000 at 0.001: two decades for two doublings, so halfway (0.01) lies one doubling.
    assert curve((1000, 0.1), (4000, 0.001)).bytes_at(0.01) == pytest.approx(2000)
    assert curve((1000, 0.1), (4000, 0.001)).bytes_at(0.001) == 4000


def test_what_was_not_measured_is_not_guessed() -> None:
    some = curve((1000, 0.1), (4000, 0.001))
    assert math.isinf(some.bytes_at(0.0009))
    assert some.bytes_at(0.5) == 1000
    assert some.is_bound(0.5)
    assert not some.is_bound(0.1)


def test_a_setting_that_another_one_beats_in_both_is_left_out() -> None:
    assert curve((1000, 0.1), (3000, 0.2), (2000, 0.05), (2500, math.inf)) == curve((1000, 0.1), (2000, 0.05))


def test_outputs_that_are_not_finite_reach_nothing() -> None:
    assert math.isinf(curve((1000, math.inf)).bytes_at(10))


def test_means_are_over_inputs_and_equal_sources_leave_no_doubt() -> None:
    same = measured([[900, 1100], [3900, 4100]], [[0.2, 0.0], [0.0015, 0.0005]], [0, 0])
    found = bytes_at(same, 0.01)
    assert found.value == pytest.approx(2000)
    assert (found.low, found.high) == pytest.approx((2000, 2000))  # one source: drawn again it is itself


def test_the_interval_is_that_of_the_sources_and_not_of_their_crops() -> None:
    # Two sources with 1000 and 3000 bytes, whatever is asked for; three crops of the one weigh as the crops they are.
    # Drawn twice: (a, a) and (b, b) have a probability of ¼ each, so that the ends of 90 % are 1000 and 3000.
    two = measured([[1000, 1000, 1000, 3000]], [[0.01] * 4], [7, 7, 7, 9])
    found = bytes_at(two, 0.01)
    assert found.value == 1500
    assert (found.low, found.high) == (1000, 3000)


def test_many_sources_give_the_interval_of_a_normal_distribution() -> None:
    sizes = np.random.default_rng(1).normal(1000, 100, 400)
    found = bytes_at(measured([sizes.tolist()], [[0.01] * 400], list(range(400))), 0.01)
    error = sizes.std() / 20  # σ / √n
    assert found.low == pytest.approx(sizes.mean() - 1.645 * error, abs=0.25 * error)
    assert found.high == pytest.approx(sizes.mean() + 1.645 * error, abs=0.25 * error)


def test_a_ratio_compares_the_same_sources() -> None:
    # The rival takes four times as much on each source: drawn as pairs, no doubt is left though the sources differ.
    ours = measured([[100, 900]], [[0.01, 0.01]], [0, 1])
    rival = measured([[400, 3600]], [[0.01, 0.01]], [0, 1])
    found = ratio_at(rival, ours, 0.01)
    assert (found.value, found.low, found.high) == (4, 4, 4)


def test_a_rival_that_never_comes_as_close_is_infinitely_larger() -> None:
    ours = measured([[100]], [[0.01]], [0])
    assert ratio_at(measured([[50]], [[0.5]], [0]), ours, 0.01).value == math.inf
    assert cheapest({"ours": ours, "rival": measured([[50]], [[0.5]], [0])}, 0.01) == ("ours", 100)
    assert cheapest({"ours": ours}, 0.001) == ("", math.inf)


# -- what it measures on ----------------------------------------------------------------------------------------------

SPEC = ImageSpec(resize=40, crop=32, mean=(127.0, 127.0, 127.0), std=(128.0, 128.0, 128.0))


def photograph(folder: Path) -> Path:
    """A slope of brightness with grain, so that mirroring and place show."""
    pixels = np.tile(np.linspace(20, 220, 90), (60, 1))[..., None] + np.random.default_rng(4).normal(0, 9, (60, 90, 3))
    path = folder / "photo.png"
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path)
    return path


def test_crops_are_the_same_each_time_and_every_other_one_is_mirrored(tmp_path: Path) -> None:
    path = photograph(tmp_path)
    first, again, other = (crops_of(path, 32, 4, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert {crop.shape for crop in first} == {(32, 32, 3)}
    brighter_right = [crop[:, 16:].mean() > crop[:, :16].mean() for crop in first]
    assert brighter_right == [True, False, True, False]


def test_text_is_drawn_over_a_photograph_the_same_each_time() -> None:
    plain = np.full((320, 320, 3), 100, np.uint8)
    drawn = with_text(plain, "test", seed=5)
    assert np.array_equal(drawn, with_text(plain, "test", seed=5))
    assert not np.array_equal(drawn, with_text(plain, "calibration", seed=5))
    assert not set(WORDS["test"]) & set(WORDS["calibration"])
    assert {0, 255} <= set(np.unique(drawn).tolist())
    assert (plain == 100).all()


def test_words_become_the_longest_known_pieces_first() -> None:
    # The example of the BERT repository: "unaffable" → un ##aff ##able.
    known = {"un": 1, "##aff": 2, "##able": 3, "##a": 4, "[UNK]": 9}
    assert words("  Unaffable, Élan!") == ["unaffable", ",", "elan", "!"]
    assert list(word_pieces("unaffable", known)) == [1, 2, 3]
    assert list(word_pieces("other", known)) == [9]


def test_a_rival_is_measured_at_each_of_its_settings_on_each_sample(tmp_path: Path) -> None:
    subject = Subject(model="none", kind="none", measure="relative", input="x", spec=SPEC)
    crops = crops_of(photograph(tmp_path), 32, 2, seed=1)
    samples = [Sample(source=3, tensors={"x": as_input(crop, SPEC)}, plain=crop) for crop in crops]

    def brightness(tensors: Tensors) -> Tensors:
        return {"y": tensors["x"].mean(axis=(2, 3))}

    rivals = list(picture_rivals(subject, Detail.AROUND))
    found = measure(rivals, samples, [brightness(sample.tensors) for sample in samples], brightness, subject)
    assert {"jpeg", "webp"} <= set(found)
    assert set(REFERENCES["jpeg"]) <= set(found["jpeg"].settings)
    for one in found.values():
        assert one.bytes.shape == (len(one.settings), 2)
        for variant in {setting.partition(" ")[2] for setting in one.settings}:
            rows = [row for row, setting in enumerate(one.settings) if setting.partition(" ")[2] == variant]
            assert (np.diff(one.bytes[rows].mean(axis=1)) > 0).all()  # better quality, more bytes
        assert one.sources.tolist() == [3, 3]
        assert np.isfinite(one.fidelity).all()


# -- the grid ---------------------------------------------------------------------------------------------------------


def test_a_plan_takes_the_sum_of_its_stages_with_the_devices_slowed_down() -> None:
    timings = [
        {"head": 4.0, "encode": 0.5, "network": 9.0, "cloud_decode": 0.25, "tail": 8.0, "total": 22.0},
        {"head": 4.0, "encode": 0.5, "network": 30.0, "cloud_decode": 0.25, "tail": 8.0, "total": 43.0},
    ]
    stages = Stages.of(timings, [22.75, 43.75], 2000.0)
    assert (stages.device_ms, stages.cloud_ms, stages.beside_ms) == (4.5, 8.25, 1.0)
    network = Network([(1000, 10), (3000, 30), (5000, 50)])
    assert modelled_ms(stages, 10, network) == pytest.approx(45 + 8.25 + 1 + 20)
    local = Stages.of([{"whole": 12.0}], [12.5], 0.0)
    assert modelled_ms(local, 5, network) == pytest.approx(60.5)


def test_a_link_is_straight_between_and_beyond_what_was_measured_and_a_stall_does_not_bend_it() -> None:
    assert Network([(1000, 10), (3000, 30)]).ms(2000) == pytest.approx(20)
    assert Network([(1000, 10), (3000, 30)]).ms(5000) == pytest.approx(50)
    assert Network([(1000, 90), (3000, 30)]).ms(1000) == pytest.approx(30)
    assert Network([(1000, 10)]).ms(9000) == pytest.approx(10)


def test_a_split_is_held_against_the_fastest_of_everything_else() -> None:
    cell = Contest.of({"local": 60.0, "offload jpeg": 48.0, "split a klt": 40.0, "split b klt": 41.0})
    assert (cell.split, cell.other, cell.gain, cell.won) == ("split a klt", "offload jpeg", 1.2, True)
    close = Contest.of({"local": 41.0, "split a klt": 40.0})
    assert not close.won
    found = summary([cell, close, Contest.of({"local": 80.0, "split a klt": 40.0})])
    assert (found["cells"], found["won"]) == (3, 2)
    assert found["median_gain_where_won"] == pytest.approx(1.6)
    assert summary([close])["median_gain_where_won"] == 1.0
    none = Contest.of({"local": 41.0, "offload jpeg": 50.0})
    assert (none.split, none.gain, none.won) == ("no split ran", 0.0, False)


def test_the_model_in_int8_is_a_rival_where_it_keeps_to_the_bound() -> None:
    ms = {"local": 60.0, "offload jpeg": 48.0, "split a klt": 40.0}
    assert with_int8(ms, None).other == "offload jpeg"
    assert with_int8(ms, 0.7).other == "local int8"
    assert with_int8(ms, 0.7).gain == pytest.approx(42 / 40)


def test_the_daemons_choice_is_judged_by_all_requests_of_that_plan() -> None:
    def cell(ms: dict[str, float]) -> Measured:
        return Measured(
            link="LTE",
            slowdown=5.0,
            ms=ms,
            network_ms={},
            auto_ms=90.0,  # of which one stalled: the plan itself takes 44
            auto_plan="split a klt",
            error=0.05,
        )

    assert cell({"local": 60.0, "offload jpeg": 40.0, "split a klt": 44.0}).over_best == pytest.approx(0.1)
    assert cell({"local": 60.0, "offload jpeg": 40.0}).over_best == pytest.approx(1.25)


def test_curves_are_drawn(tmp_path: Path) -> None:
    curves = {"80×14×14": curve((1000, 0.1), (4000, 0.001)), "jpeg": curve((9000, 0.2), (30000, 0.004))}
    path = tmp_path / "curves.png"
    draw(curves, "bytes against fidelity", "KL", {f"KL {value:g}": value for value in TARGETS.values()}, path)
    with Image.open(path) as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 4
