"""What a scrape says of the connection to the companion, and of answers that came over it lossily."""

from __future__ import annotations

from agent.journal import Journal
from agent.metrics import Metrics
from split.transport.channel import LinkFacts, Observation


def facts(lane: str) -> LinkFacts:
    return LinkFacts(
        lane=lane,
        congestion_control="bbr",
        rtt_ms=40.0,
        rtt_var_ms=2.0,
        min_rtt_ms=39.0,
        rate_bytes_per_s=6e6,
        app_limited=False,
        cwnd_bytes=300_000,
        unacked_bytes=200_000,
        unsent_bytes=16_000,
        acked_bytes=1_000_000,
        retransmits=7,
        frame_bytes=32_768,
    )


def scrape(link: Observation | None) -> str:
    return Metrics(Journal(), version="1", gauges={}, link=lambda: link).render().decode()


def test_lossy_answers_that_nobody_checked_are_told_by_model_and_codec() -> None:
    journal = Journal()
    journal.unchecked("net", "klt", 600)
    text = Metrics(journal, version="1", gauges={}, link=lambda: None).render().decode()
    assert 'isthmus_unchecked_answers{codec="klt",model="net"} 600.0\n' in text


def test_both_connections_are_told_by_lane_in_base_units() -> None:
    link = Observation(
        sent_bytes=1_100_000, received_bytes=50_000, queued_bytes=5, connections=(facts("urgent"), facts("bulk"))
    )
    text = scrape(link)
    for lane in ("urgent", "bulk"):
        labels = f'{{congestion_control="bbr",lane="{lane}"}}'
        assert f"isthmus_link_rtt_seconds{labels} 0.04\n" in text
        assert f"isthmus_link_rate_bytes_per_second{labels} 6e+06\n" in text
        assert f"isthmus_link_retransmits{labels} 7.0\n" in text
        assert f"isthmus_link_unsent_bytes{labels} 16000.0\n" in text
    assert "isthmus_link_sent_bytes 1.1e+06\n" in text
    assert "isthmus_link_received_bytes 50000.0\n" in text
    assert "isthmus_link_queued_bytes 5.0\n" in text


def test_without_a_connection_nothing_is_said_of_it() -> None:
    assert "isthmus_link" not in scrape(None)
