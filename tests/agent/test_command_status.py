"""What `isthmus status` prints of what the daemon says."""

from __future__ import annotations

from agent.commands.status import _lines


def test_cuts_that_are_not_open_stand_below_their_model_with_the_reason() -> None:
    model = {
        "name": "net",
        "state": "READY",
        "cuts_not_open": {"b2": "the companion computes this cut differently", "a1": "it has no memory"},
    }
    *_, row, first, second = _lines({"models": [model]})
    assert row.startswith("net")
    assert first.strip() == "cut a1 is not open at the companion: it has no memory"
    assert second.strip() == "cut b2 is not open at the companion: the companion computes this cut differently"


def test_a_model_that_is_cut_as_it_stands_in_the_file_says_why() -> None:
    *_, row, note = _lines({"models": [{"name": "net", "state": "READY", "cuts_note": "its functions stay whole"}]})
    assert row.startswith("net")
    assert note.strip() == "cut as it stands in the file: its functions stay whole"


def test_a_model_that_does_not_run_where_its_contract_would_rather_have_it_says_so() -> None:
    note = "runs on cpu: this host has no cuda"
    *_, row, said = _lines({"models": [{"name": "net", "state": "READY", "accelerators_note": note}]})
    assert row.startswith("net")
    assert said.strip() == note


def test_how_many_lossy_answers_were_checked_and_how_many_came_since_stands_below_their_model() -> None:
    of_klt = {"checked": 8, "beyond_bound": 1, "mean_of_bound": 0.4321, "unchecked": 37}
    of_jpeg = {"checked": 0, "beyond_bound": 0, "mean_of_bound": 0.0, "unchecked": 600}
    model = {"name": "net", "state": "READY", "spot_checks": {"klt": of_klt, "jpeg": of_jpeg}}
    *_, row, jpeg, klt = _lines({"models": [model]})
    assert row.startswith("net")
    assert jpeg.strip() == "codec jpeg: 600 answers, none checked yet"
    assert klt.strip() == "codec klt: 8 answers checked, 0.43 of the bound on average; 37 answers since the last check"


def test_companions_that_cannot_be_reached_stand_below_the_one_in_use_with_the_reason() -> None:
    unreached = {"address": "b:1", "code": "SECURITY", "reason": "of another CA", "next_try_s": 58.2}
    lines = list(_lines({"companion": {"address": "a:1", "state": "connected", "unreached": [unreached]}}))
    at = next(n for n, line in enumerate(lines) if line.startswith("companion"))
    assert lines[at + 1].strip() == "b:1: SECURITY, of another CA; next try not before 58 s from now"


def connection(lane: str, congestion_control: str) -> dict[str, object]:
    return {
        "lane": lane,
        "congestion_control": congestion_control,
        "rtt_ms": 41.23,
        "rate_bytes_per_s": 6_250_000.0,
        "retransmits": 3,
    }


def test_each_connection_stands_below_its_companion_as_tcp_sees_it() -> None:
    connections = [connection("urgent", "bbr"), connection("bulk", "bbr")]
    lines = list(_lines({"companion": {"address": "a:1", "state": "connected", "connections": connections}}))
    at = next(n for n, line in enumerate(lines) if line.startswith("companion"))
    for line, lane in zip(lines[at + 1 : at + 3], ("urgent", "bulk"), strict=True):
        expected = f"{lane} connection: bbr, 41.2 ms round trip, 50 Mbit/s acknowledged, 3 segments sent again"
        assert line.strip() == expected
    assert not any("not bbr" in line or "one connection only" in line for line in lines)


def test_another_congestion_control_and_a_missing_connection_are_said_with_their_cost() -> None:
    companion = {"address": "a:1", "state": "connected", "connections": [connection("", "cubic")]}
    text = "\n".join(_lines({"companion": companion}))
    assert "only connection: cubic" in text
    assert "one connection only: an urgent request waits" in text
    assert "cubic, not bbr: an urgent request beside big ones waits for the router's queue" in text
    assert "tcp_slow_start_after_idle" in text


def test_the_device_is_named_with_the_end_of_its_certificate_and_what_stands_in_the_way() -> None:
    identity = {
        "name": "cam-1",
        "until": "2030-01-31T00:00:00Z",
        "renewed_from": "2030-01-21T00:00:00Z",
        "note": "the companion does not renew it",
    }
    (line,) = [line for line in _lines({"identity": identity}) if line.startswith("identity")]
    assert line == (
        "identity   cam-1, certificate until 2030-01-31T00:00:00Z, renewed from 2030-01-21T00:00:00Z on, "
        "the companion does not renew it"
    )
    assert not any(line.startswith("identity") for line in _lines({"identity": None}))


def test_metered_bytes_are_shown_with_their_cap_month_and_interfaces() -> None:
    metering = {
        "month": "2026-11",
        "used_bytes": 12_340_000,
        "cap_bytes": 1_000_000_000,
        "interfaces": {"wwan0": 12_340_000, "eth0": 99_000_000},
        "write_error": "No space left on device",
    }
    [line] = [line for line in _lines({"metering": metering}) if line.startswith("metering")]
    assert line == (
        "metering   12.3 of 1000.0 MB in 2026-11 (eth0 99.0 MB, wwan0 12.3 MB); the count cannot be written down: "
        "No space left on device"
    )
    damaged = metering | {"interfaces": {}, "write_error": "", "count_error": "metering.json was damaged"}
    [line] = [line for line in _lines({"metering": damaged}) if line.startswith("metering")]
    assert line == "metering   12.3 of 1000.0 MB in 2026-11; metering.json was damaged"
    free = metering | {"cap_bytes": None, "interfaces": {}, "write_error": ""}
    [line] = [line for line in _lines({"metering": free}) if line.startswith("metering")]
    assert line == "metering   12.3 MB, no cap in 2026-11"
