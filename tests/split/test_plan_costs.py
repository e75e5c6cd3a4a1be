"""Made-up models whose times follow a closed form, so that what is estimated can be compared with what is true."""

import pytest

from split.plan.costs import CutTimes, MeasuredCut, spread_out

WHOLE_MS = 100.0
CALL_MS = 0.6
"""What being a part costs: the call and the layouts at its ends."""


def true_head_ms(share: float, nbytes: int, ms_per_byte: float = 1e-7) -> float:
    return CALL_MS + WHOLE_MS * share + ms_per_byte * nbytes


def measured(share: float, nbytes: int, ms_per_byte: float = 1e-7) -> MeasuredCut:
    return MeasuredCut(
        share=share,
        boundary_bytes=nbytes,
        head_ms=true_head_ms(share, nbytes, ms_per_byte),
        tail_ms=true_head_ms(1 - share, nbytes, ms_per_byte),
    )


def test_three_measured_cuts_tell_what_a_part_costs_beside_its_nodes() -> None:
    times = CutTimes.fit(WHOLE_MS, [measured(0.05, 800_000), measured(0.5, 400_000), measured(0.9, 50_000)])
    for share, nbytes in ((0.02, 1_600_000), (0.2, 600_000), (0.3, 100_000), (0.7, 400_000)):
        assert times.head_ms(share, nbytes) == pytest.approx(true_head_ms(share, nbytes), rel=0.01)
        assert times.tail_ms(share, nbytes) == pytest.approx(true_head_ms(1 - share, nbytes), rel=0.01)


def test_a_measured_cut_is_estimated_as_it_was_measured() -> None:
    cuts = [measured(0.1, 3_000_000), measured(0.4, 100_000), measured(0.8, 200_000)]
    times = CutTimes.fit(WHOLE_MS, cuts)
    for cut in cuts:
        assert times.head_ms(cut.share, cut.boundary_bytes) == pytest.approx(cut.head_ms)
        assert times.tail_ms(cut.share, cut.boundary_bytes) == pytest.approx(cut.tail_ms)


def test_a_dear_boundary_is_seen_where_the_cuts_differ_much_in_bytes() -> None:
    dear = 1e-6  # ten copies
    cuts = [measured(share, nbytes, dear) for share, nbytes in ((0.1, 16_000_000), (0.3, 100_000), (0.6, 8_000_000))]
    times = CutTimes.fit(WHOLE_MS, [*cuts, measured(0.9, 10_000, dear)])
    assert times.head_ms(0.45, 12_000_000) == pytest.approx(true_head_ms(0.45, 12_000_000, dear), rel=0.05)


def test_without_measured_cuts_it_is_the_share_of_the_whole_and_a_copy_of_the_boundary() -> None:
    times = CutTimes.fit(WHOLE_MS, [])
    assert times.head_ms(0.25, 10_000_000) == pytest.approx(25 + 1.0)
    assert times.tail_ms(0.25, 10_000_000) == pytest.approx(75 + 1.0)


def test_a_longer_head_never_takes_less_whatever_was_measured() -> None:
    noisy = [
        MeasuredCut(share=share, boundary_bytes=1000, head_ms=head, tail_ms=100 - head)
        for share, head in ((0.2, 30.0), (0.3, 21.0), (0.4, 150.0), (0.5, 45.0), (0.6, 44.0))
    ]
    times = CutTimes.fit(WHOLE_MS, noisy)
    heads = [times.head_ms(n / 100, 1000) for n in range(101)]
    tails = [times.tail_ms(n / 100, 1000) for n in range(101)]
    assert heads == sorted(heads)
    assert tails == sorted(tails, reverse=True)
    assert min(*heads, *tails) >= 0.0


def test_a_part_is_never_estimated_dearer_than_the_whole_and_its_boundary() -> None:
    times = CutTimes.fit(WHOLE_MS, [measured(0.5, 0)])
    assert times.head_ms(1.0, 0) == pytest.approx(WHOLE_MS)
    assert times.tail_ms(0.0, 0) == pytest.approx(WHOLE_MS)


def test_cuts_of_one_share_and_cuts_that_hold_nothing_or_everything_are_no_trouble() -> None:
    cuts = [measured(0.0, 10), measured(0.5, 10), measured(0.5, 30), measured(1.0, 10)]
    assert CutTimes.fit(WHOLE_MS, cuts).head_ms(0.5, 20) == pytest.approx(true_head_ms(0.5, 20))
    assert CutTimes.fit(0.0, cuts).head_ms(0.5, 0) >= 0.0


def test_the_ends_are_measured_first_and_then_the_middle_of_the_widest_gap() -> None:
    assert spread_out([0.0, 0.15, 0.48, 0.9, 1.0, 0.7]) == [0, 4, 2, 5, 1, 3]
    assert spread_out([]) == []
    assert sorted(spread_out([0.5, 0.5, 0.5])) == [0, 1, 2]
