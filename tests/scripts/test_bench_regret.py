"""What scripts/bench regret makes of what it measured; the measuring itself needs two network namespaces."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import pytest
from PIL import Image

from agent.replay.known import Known
from scripts.benches import regret, regret_oracle, regret_plot, regret_policies
from scripts.benches.regret_cells import LINKS, SLOWDOWNS, SUBJECTS, Cell, Grid, Subject, cells_default
from scripts.benches.regret_oracle import AGAIN, AUTO, TURNS, Measured, is_sure, leave_out_failed, pool_of
from scripts.benches.regret_plot import GAP, HIGH
from scripts.benches.regret_policies import as_replayed
from scripts.benches.regret_stages import (
    Offer,
    Stages,
    Sums,
    Transfers,
    best_of_placements,
    kept_stages,
    kept_transfers,
)
from scripts.client import Answer, Client
from scripts.lab_pair import Conditions
from scripts.models import Unavailable
from split.ids import CutId
from split.plan.plan import LOCAL, Placement, Plan

SPLIT = Plan(placement=Placement.SPLIT, cut=CutId("0" * 12), codec="int8")
OFFLOAD = Plan(placement=Placement.OFFLOAD, codec="raw")
CELL = Cell(subject=SUBJECTS[0], link=LINKS[0], slowdown=5.0)


def measured(ms: dict[str, list[float | None]], chosen: Plan = LOCAL) -> Measured:
    sums_ms = {LOCAL: 10.0, SPLIT: 12.0, OFFLOAD: 90.0}
    return Measured(cell=CELL, chosen=chosen, ms=ms, sums_ms=sums_ms)


def test_the_oracle_is_picked_on_the_odd_turns_and_scored_on_the_even_ones() -> None:
    one = measured(
        {
            str(LOCAL): [10.0, 12.0, 10.0, 12.0],
            str(SPLIT): [15.0, 11.0, 15.0, 11.0],
            AGAIN: [11.0, 12.0, 11.0, 12.0],
            AUTO: [9.0, 12.0, 9.0, 12.0],
        }
    )
    assert one.oracle() == str(SPLIT)
    assert one.regret == pytest.approx(10 / 15)  # the lucky turns of the oracle do not count
    assert one.auto_regret == pytest.approx(9 / 15)
    assert one.noise == pytest.approx(1.1)


def test_what_splitting_is_worth_is_the_best_plan_without_it_over_the_best_plan() -> None:
    one = measured({str(LOCAL): [30.0] * 4, str(SPLIT): [20.0] * 4, AGAIN: [20.0] * 4, AUTO: [20.0] * 4}, SPLIT)
    assert one.split_value == pytest.approx(1.5)


def test_auto_stands_for_a_chosen_plan_that_could_not_be_had() -> None:
    one = measured({str(LOCAL): [10.0] * 4, AUTO: [11.0] * 4}, OFFLOAD)
    assert one.regret == pytest.approx(1.1)
    assert one.noise == pytest.approx(1.0)


def test_a_median_is_sure_once_its_standard_error_is_two_percent() -> None:
    # 1.2533 × 1.4826 × 10 / √n ≤ 2 from n = 87 on (Gaussian efficiency of median and of median absolute deviation).
    assert not is_sure([90.0, None, 110.0] * 43)
    assert is_sure([90.0, None, 110.0] * 44)
    assert is_sure([100.0, 100.0, 900.0] * 2)  # a stall is no doubt
    assert not is_sure([100.0] * 5)


class Steady:
    """Stands for an offer, whose plans take 10 ms, each request `more_ms` more than the one before."""

    def __init__(self, more_ms: float) -> None:
        self.more_ms, self.asked = more_ms, 0

    def ask(self, client: Client, plan: Plan) -> Answer:
        self.asked += 1
        took_ms = 10.0 + self.more_ms * self.asked
        return Answer(
            outputs={},
            placement=str(plan.placement),
            cut=plan.cut,
            codec=plan.codec,
            fallback="",
            predicted_ms=10.0,
            request_id="r",
            timings_ms={},
            took_ms=took_ms,
        )

    def ask_auto(self, client: Client) -> Answer:
        return self.ask(client, LOCAL)


@pytest.mark.parametrize(
    ("more_ms", "latest_s", "turns"), [(0.0, math.inf, 6), (10.0, math.inf, TURNS), (10.0, -math.inf, 6)]
)
def test_turns_go_on_until_the_chosen_plan_is_sure_or_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, more_ms: float, latest_s: float, turns: int
) -> None:
    monkeypatch.setattr(regret_oracle, "PAUSE_S", 0.0)
    one = measured({}, LOCAL)
    offer = cast(regret_oracle.Offer, Steady(more_ms))
    autos = regret_oracle._turns(cast(Client, None), offer, [LOCAL], one, 6, latest_s=latest_s)
    assert len(autos) == turns
    assert {name: len(ms) for name, ms in one.ms.items()} == {str(LOCAL): turns, AUTO: turns, AGAIN: turns}


def test_a_cell_is_contested_where_a_second_placement_is_within_half_as_much_again() -> None:
    def contested(split_ms: float) -> bool:
        return measured({str(LOCAL): [10.0] * 4, str(SPLIT): [split_ms] * 4, AUTO: [10.0] * 4}).contested

    assert contested(15.0)
    assert not contested(15.1)


def test_a_placement_that_was_left_out_counts_with_its_sum() -> None:
    assert measured({str(LOCAL): [8.0] * 4, AUTO: [8.0] * 4}).placements() == {
        "local": 8.0,
        "split": 12.0,
        "offload": 90.0,
    }


def test_figures_are_means_over_cells_and_the_contested_ones_alone() -> None:
    even = {str(LOCAL): [10.0] * 4, str(SPLIT): [40.0] * 4, AGAIN: [10.0] * 4, AUTO: [10.0] * 4}
    near = {str(LOCAL): [10.0] * 4, str(SPLIT): [12.0] * 4, AGAIN: [12.0] * 4, AUTO: [12.0] * 4}
    cells = [measured(even), measured(near, SPLIT)]
    for cell in cells:
        cell.stage_errors = {"whole": 0.04}
    found = {figure.name: figure.value for figure in regret.figures(cells)}
    assert found == pytest.approx(
        {"mean": 1.1, "p95": 1.2, "contested_mean": 1.2, "stage_mape": 0.04, "split_value": 1.0}
    )


def test_transfers_are_straight_lines_that_go_on() -> None:
    transfers = Transfers({"1000": {"network": 20.0}, "11000": {"network": 30.0}})
    assert transfers.ms(6000) == pytest.approx(25.0)
    assert transfers.ms(21000) == pytest.approx(40.0)
    assert transfers.ms(10) == pytest.approx(20.0)


def test_a_transfer_that_was_stalled_is_taken_for_no_longer_than_a_larger_one() -> None:
    transfers = Transfers({"1000": {"network": 20.0}, "5000": {"network": 240.0}, "9000": {"network": 40.0}})
    assert transfers.ms(5000) == pytest.approx(40.0)
    assert transfers.ms(1000) == pytest.approx(20.0)


def test_placements_are_ranked_by_their_fastest_plan() -> None:
    other = Plan(placement=Placement.SPLIT, cut=CutId("1" * 12), codec="raw")
    assert best_of_placements({LOCAL: 5.0, SPLIT: 9.0, other: 4.0}) == {Placement.SPLIT: 4.0, Placement.LOCAL: 5.0}


def test_the_default_cells_are_one_for_each_subject_and_speed_and_leave_no_link_out() -> None:
    cells = cells_default(lambda cell: LINKS.index(cell.link))
    pairs = [(cell.slowdown, cell.subject) for cell in cells]
    assert pairs == list(itertools.product(SLOWDOWNS, SUBJECTS))
    assert {cell.link for cell in cells} == set(LINKS)


def test_the_heat_map_has_a_row_for_each_subject_and_speed_that_was_measured(tmp_path: Path) -> None:
    same = {str(LOCAL): [10.0] * 4, str(SPLIT): [12.0] * 4, AGAIN: [10.0] * 4, AUTO: [10.0] * 4}
    regret_plot.draw([measured(same)], tmp_path / "one.png")
    two = [measured(same), measured(same)]
    two[1].cell = Cell(subject=SUBJECTS[1], link=LINKS[2], slowdown=20.0)
    regret_plot.draw(two, tmp_path / "two.png")
    heights = []
    for name in ("one.png", "two.png"):
        with Image.open(tmp_path / name) as picture:
            heights.append(picture.height)
    assert heights[1] - heights[0] == 3 * HIGH + GAP  # two subjects at two speeds, where there was one at one


def test_a_policy_is_charged_what_its_plan_took_or_its_sum_at_the_level_of_the_oracle() -> None:
    one = measured({str(LOCAL): [20.0] * 4, AGAIN: [20.0] * 4, AUTO: [20.0] * 4})
    costs = regret_policies.Costs(one)
    assert costs.of(LOCAL) == (20.0, False)
    assert costs.of(SPLIT) == (24.0, True)  # its sum of 12, where local took 20 and not 10


def test_a_plan_that_fell_back_in_one_of_many_turns_takes_part_and_one_that_did_in_every_second_does_not() -> None:
    once: list[float | None] = [10.0] * 7 + [None]
    often: list[float | None] = [10.0, None] * 4
    one = measured({str(LOCAL): once, str(SPLIT): often, AUTO: [10.0] * 8})
    one.excluded = {str(LOCAL): "late", str(SPLIT): "late"}
    leave_out_failed(one)
    assert one.plans() == [str(LOCAL)]
    assert one.excluded == {str(LOCAL): "1 of 8 turns left out: late", str(SPLIT): "late"}


def test_what_runs_for_real_are_the_five_best_sums_and_the_best_of_each_placement_the_ends_and_the_chosen_plan() -> (
    None
):
    splits = [Plan(placement=Placement.SPLIT, cut=CutId(f"{n:012d}"), codec="int8") for n in range(7)]
    int8, fp16 = (Plan(placement=Placement.OFFLOAD, codec=codec) for codec in ("int8", "fp16"))
    sums_ms = {plan: 10.0 + n for n, plan in enumerate([*splits, int8, fp16, LOCAL, OFFLOAD])}
    pool = pool_of(list(sums_ms), sums_ms, splits[6])
    assert set(pool) == {*splits[:5], int8, LOCAL, OFFLOAD, splits[6]}
    assert len(pool) == len(set(pool))


class _Device:
    """A pair whose device measures its models anew when it starts, as after a change of what profiles depend on."""

    def __init__(self, basis: str) -> None:
        self.basis = basis

    def start_agent(self, *, slowdown: float, timeout_s: float) -> None:
        self.basis = "of now"


def test_what_was_kept_beside_a_profile_that_the_device_takes_no_more_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = _Device("of before")
    subject = Subject(model="made-up", form="tensor", kind="made up")
    grid = Grid(name="one", subjects=(subject,), links=LINKS[:1], slowdowns=(5.0,))

    def offers_of(folder: Path, subjects: object) -> dict[Subject, Offer]:
        known = Known.of({LOCAL: as_replayed(LOCAL, stage(head_ms=100.0), 0.0, 5.0)})
        return {
            subject: Offer(subject, replace(known, profile=msgspec.structs.replace(known.profile, basis=device.basis)))
        }

    def keep(folder: Path) -> None:
        for offer in offers_of(folder, ()).values():
            record = kept_stages(folder, offer, 5.0)
            record.numbers = {str(LOCAL): {"whole": 100.0, "overhead": 1.0}}
            record.keep()

    monkeypatch.setattr(regret, "CACHE", tmp_path)
    monkeypatch.setattr(regret, "QUICK", grid)
    monkeypatch.setattr(regret, "TRANSFERS_BY", subject)
    monkeypatch.setattr(regret, "offers_of", offers_of)
    monkeypatch.setattr(regret, "lay_models", lambda folder, subjects: None)
    monkeypatch.setattr(regret, "_pair", lambda grid: nullcontext(device))
    monkeypatch.setattr(regret, "wait_until_open", lambda pair, offers: None)
    monkeypatch.setattr(regret, "measure_stages", lambda pair, folder, offer, slowdown: keep(folder))
    folder = regret.folder_of(grid)
    transfers = kept_transfers(folder, LINKS[0])
    transfers.numbers = {"1000": {"network": 20.0}, "9000": {"network": 30.0}}
    transfers.keep()
    keep(folder)

    device.start_agent(slowdown=5.0, timeout_s=1.0)
    with pytest.raises(Unavailable, match=r"made-up \(tensor\).*regret --prepare"):
        regret.prepared(grid, [subject])
    device.basis = "of before"
    regret.prepare(quick=True)
    [offer] = regret.prepared(grid, [subject]).values()
    assert offer.profile.basis == "of now"
    assert Sums(folder, {subject: offer}).stages(Cell(subject=subject, link=LINKS[0], slowdown=5.0)).keys() == {LOCAL}


class _Sums(Sums):
    """As if these stages had been measured."""

    def __init__(self, found: dict[Plan, Stages]) -> None:
        self._found = found

    def stages(self, cell: Cell) -> dict[Plan, Stages]:
        return self._found


def test_every_policy_of_the_field_is_charged_in_every_cell() -> None:
    stages = {
        LOCAL: stage(head_ms=100.0),
        SPLIT: stage(head_ms=20.0, tail_ms=4.0, up_bytes=20_000),
        OFFLOAD: stage(tail_ms=20.0, up_bytes=600_000),
    }
    known = Known.of({plan: as_replayed(plan, one, 0.0, 5.0) for plan, one in stages.items()})
    subject = Subject(model="made-up", form="tensor", kind="made up")
    cell = Cell(subject=subject, link=Conditions(rate_mbit=10, rtt_ms=20), slowdown=5.0)
    one = measured({str(LOCAL): [100.0] * 4, str(SPLIT): [50.0] * 4, AGAIN: [50.0] * 4, AUTO: [55.0] * 4}, SPLIT)
    one.cell, one.sums_ms = cell, {SPLIT: 60.0, LOCAL: 100.0, OFFLOAD: 600.0}
    *rows, said = regret_policies.compare([one], {subject: Offer(subject, known)}, _Sums(stages))
    assert "raspberry-pi-4" in str(said)
    found = {row["policy"]: row["mean_regret"] for row in rows}
    assert found["isthmus"] == 1.0
    assert found["isthmus auto"] == pytest.approx(1.1)
    assert found["local"] == 2.0
    assert found["offload raw"] == pytest.approx(10.0)  # its sum of 600, where the oracle took 50 and not 60
    assert found["best static plan"] == 1.0
    assert {"two-way rule", "Neurosurgeon", "DADS", "ANS", "threshold with hysteresis"} <= found.keys()
    assert {row["policy"]: row["modelled"] for row in rows}["offload raw"] == 1.0
    by_name = {row["policy"]: row for row in rows}
    assert found["oracle"] == 1.0
    assert by_name["isthmus"]["mean_ms"] == pytest.approx(50.0)
    assert by_name["isthmus auto"]["mean_ms"] == pytest.approx(55.0)
    # 20 here, 4 there, 16 + 3.2 on the link, a round trip of 20: 63.2; a deadline of twice that is no use to raw, whose
    # 480 ms on the link end here (100 ms) behind it. What is sent until then at most: 10 Mbit/s for so long.
    assert by_name["isthmus"]["bytes_modelled"] == 24_000
    assert by_name["local"]["bytes_modelled"] == 0
    assert 0 < by_name["offload raw"]["bytes_modelled"] <= 126.4 * 1250
    assert by_name["local"]["missed_modelled"] == by_name["isthmus"]["missed_modelled"] == 0.0


def test_joules_are_a_device_profile_s_times_what_a_request_takes_of_it() -> None:
    # A Raspberry Pi 4 draws 3.0 W idle and 7.2 W on all its four cores (profiles/devices/raspberry-pi-4.yaml).
    power = regret_policies.power_of(Conditions(rate_mbit=10, rtt_ms=20), threads=4)
    assert power.compute_w == pytest.approx(4.2)
    # Wi-Fi at 10 Mbit/s (Huang et al. 2012, table 4): 283.17 mW for each, and 132.86 beside.
    assert power.send_w == pytest.approx(2.9646, abs=1e-4)
    assert not power.measured


def stage(head_ms: float = 0.0, tail_ms: float = 0.0, up_bytes: int = 0) -> Stages:
    """With the slowdown in; a reply of 4 KB."""
    return Stages(
        image_ms=0.0,
        head_ms=head_ms,
        encode_ms=0.0,
        cloud_decode_ms=0.0,
        tail_ms=tail_ms,
        decode_ms=0.0,
        overhead_ms=0.0,
        up_bytes=up_bytes,
        down_bytes=4000 if up_bytes else 0,
    )
