"""Energy as laid-out devices show it; the expected watts are worked out by hand from what the files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.energy import find_gauge, link_kind
from split.profiles.radio import LinkKind
from tests.agent import boards


def test_a_monitor_on_the_supply_of_a_pi_4_gives_its_power(tmp_path: Path) -> None:
    gauge, note = find_gauge(boards.raspberry_pi_4(tmp_path))
    assert gauge is not None
    assert gauge.read() == pytest.approx(6.12)
    assert gauge.instant
    assert gauge.source.startswith("ina219")
    assert note == ""


def test_without_a_power_file_it_is_volts_times_amperes(tmp_path: Path) -> None:
    gauge, _ = find_gauge(boards.raspberry_pi_4(tmp_path))
    assert gauge is not None
    (tmp_path / "sys/class/hwmon/hwmon1/power1_input").unlink()
    assert gauge.read() == pytest.approx(5.1 * 1.2)


def test_of_a_jetsons_rails_the_one_that_feeds_them_all_counts(tmp_path: Path) -> None:
    gauge, _ = find_gauge(boards.jetson_orin_nano(tmp_path))
    assert gauge is not None
    assert gauge.read() == pytest.approx(5.048 * 1.36)
    assert "VDD_IN" in gauge.source


def test_a_monitor_whose_rails_are_all_partial_is_not_taken_for_the_supply(tmp_path: Path) -> None:
    root = boards.jetson_orin_nano(tmp_path)
    boards.lay_out(root, {"sys/class/hwmon/hwmon1/in1_label": "VDD_GPU_SOC\n"})
    assert find_gauge(root) == (None, "")


@pytest.mark.parametrize("label", ["in1_label", "label"])
def test_the_only_monitor_is_not_taken_for_the_supply_where_it_is_said_to_watch_a_part(
    label: str, tmp_path: Path
) -> None:
    root = boards.raspberry_pi_4(tmp_path)
    boards.lay_out(root, {"sys/class/hwmon/hwmon1/name": "ina226\n", f"sys/class/hwmon/hwmon1/{label}": "VDD_GPU\n"})
    assert find_gauge(root) == (None, "")


def test_two_unlabelled_monitors_feed_nobody_knows_what(tmp_path: Path) -> None:
    root = boards.raspberry_pi_4(tmp_path)
    boards.lay_out(root, {"sys/class/hwmon/hwmon2/name": "ina226\n", "sys/class/hwmon/hwmon2/power1_input": "1\n"})
    assert find_gauge(root) == (None, "")


def test_a_battery_that_discharges_gives_what_leaves_it(tmp_path: Path) -> None:
    gauge, _ = find_gauge(boards.orange_pi_5(tmp_path))
    assert gauge is not None
    assert gauge.read() == pytest.approx(7.6 * 0.9)
    boards.lay_out(tmp_path, {"sys/class/power_supply/cw2015/status": "Charging\n"})
    assert gauge.read() is None


def test_a_laptop_counts_package_and_memory_and_neither_cores_nor_the_same_package_twice(tmp_path: Path) -> None:
    root = boards.laptop(tmp_path)
    gauge, _ = find_gauge(root)
    assert gauge is not None
    assert not gauge.instant
    assert gauge.read() == 0.0
    boards.lay_out(
        root,
        {
            "sys/class/powercap/intel-rapl:0/energy_uj": "17000000\n",
            "sys/class/powercap/intel-rapl:0:1/energy_uj": "1500000\n",
        },
    )
    assert gauge.read() == pytest.approx(12.5)


def test_a_counter_that_begins_again_at_its_range_is_continued(tmp_path: Path) -> None:
    root = boards.laptop(tmp_path)
    counter, memory = (
        "sys/class/powercap/intel-rapl:0/energy_uj",
        "sys/class/powercap/intel-rapl:0:1/energy_uj",
    )
    boards.lay_out(root, {counter: "262143000000\n"})
    gauge, _ = find_gauge(root)
    assert gauge is not None
    gauge.read()
    boards.lay_out(root, {counter: "2000000\n", memory: "1000000\n"})
    assert gauge.read() == pytest.approx((262143328850 - 262143000000 + 2000000) / 1e6)


def test_a_platform_counter_is_taken_alone(tmp_path: Path) -> None:
    root = boards.laptop(tmp_path)
    boards.lay_out(
        root, {"sys/class/powercap/intel-rapl:1/name": "psys\n", "sys/class/powercap/intel-rapl:1/energy_uj": "100\n"}
    )
    gauge, _ = find_gauge(root)
    assert gauge is not None
    assert "psys" in gauge.source
    gauge.read()
    boards.lay_out(root, {"sys/class/powercap/intel-rapl:0/energy_uj": "99000000\n"})
    assert gauge.read() == 0.0


def test_counters_that_only_root_may_read_are_passed_over_with_a_sentence(tmp_path: Path) -> None:
    root = boards.laptop(tmp_path)
    counter = root / "sys/class/powercap/intel-rapl:0/energy_uj"
    counter.unlink()
    counter.mkdir()  # reading it fails for root, too
    boards.lay_out(root, {"sys/class/power_supply/BAT0/status": "Discharging\n"})
    gauge, note = find_gauge(root)
    assert gauge is not None
    assert gauge.read() == pytest.approx(12.5)
    assert "CVE-2020-8694" in note


def test_a_counter_that_goes_away_says_nothing_and_starts_afresh_when_it_is_back(tmp_path: Path) -> None:
    root = boards.laptop(tmp_path)
    gauge, _ = find_gauge(root)
    assert gauge is not None
    gauge.read()
    counter = root / "sys/class/powercap/intel-rapl:0/energy_uj"
    counter.write_text("")
    assert gauge.read() is None
    counter.write_text("900000000\n")
    assert gauge.read() == 0.0


@pytest.mark.parametrize("board", [boards.container, boards.raspberry_pi_5])
def test_a_device_without_any_has_none(board: boards.Board, tmp_path: Path) -> None:
    assert find_gauge(board(tmp_path)) == (None, "")


@pytest.mark.parametrize(
    ("interface", "kind"),
    [
        ("eth0", LinkKind.ETHERNET),
        ("end0", LinkKind.ETHERNET),
        ("wlan0", LinkKind.WIFI),
        ("wlp2s0", LinkKind.WIFI),
        ("wwan0", LinkKind.LTE),
        ("ppp0", LinkKind.LTE),
        ("lo", None),
        ("wg0", None),
        ("zt0", None),
        ("ipsec0", None),
        ("docker0", None),
        ("veth12ab", None),
        ("br-1f2e", None),
        ("", None),
    ],
)
def test_a_link_is_known_by_the_name_of_its_interface(interface: str, kind: LinkKind | None, tmp_path: Path) -> None:
    assert link_kind(interface, tmp_path) == kind


def test_what_the_kernel_calls_an_interface_counts_before_its_name(tmp_path: Path) -> None:
    boards.lay_out(
        tmp_path,
        {
            "sys/class/net/radio0/uevent": "DEVTYPE=wlan\nINTERFACE=radio0\n",
            "sys/class/net/usb0/uevent": "DEVTYPE=wwan\n",
            "sys/class/net/ath0/wireless/status": "",
        },
    )
    assert link_kind("radio0", tmp_path) == LinkKind.WIFI
    assert link_kind("ath0", tmp_path) == LinkKind.WIFI
    assert link_kind("usb0", tmp_path) == LinkKind.LTE


@pytest.mark.parametrize("tunnel", ["wg0", "zt0", "ipsec0", "tun0"])
def test_a_tunnel_leaves_by_the_default_route_of_the_least_metric(tunnel: str, tmp_path: Path) -> None:
    head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    row = "{}\t{}\t0100A8C0\t0003\t0\t0\t{}\t{}\t0\t0\t0\n"
    table = [
        row.format("eth0", "00000000", 600, "00000000"),
        row.format("wwan0", "00000000", 100, "00000000"),
        row.format("wlan0", "0000A8C0", 0, "00FFFFFF"),
    ]
    boards.lay_out(tmp_path, {"proc/net/route": head + "".join(table)})
    assert link_kind(tunnel, tmp_path) == LinkKind.LTE


def test_a_bridge_leaves_by_what_is_below_it_and_one_of_containers_by_nothing(tmp_path: Path) -> None:
    boards.lay_out(
        tmp_path,
        {
            "sys/class/net/br0/lower_wlan0/uevent": "",
            "sys/class/net/br-1f2e/lower_veth1/uevent": "",
            "sys/class/net/veth1/uevent": "",
            "sys/class/net/eth0/uevent": "",
            "sys/class/net/eth1/device/uevent": "",
        },
    )
    assert link_kind("br0", tmp_path) == LinkKind.WIFI
    assert link_kind("br-1f2e", tmp_path) is None
    assert link_kind("eth0", tmp_path) is None, "of a container: who knows what its host has"
    assert link_kind("eth1", tmp_path) == LinkKind.ETHERNET
