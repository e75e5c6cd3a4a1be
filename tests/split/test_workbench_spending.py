"""Budgets of a minute, models of a second and less a run."""

from split.workbench.spending import Care, Spending


def spend(spending: Spending, cuts: int, *, run_s: float, timing_s: float, spent_s: float = 0.0) -> list[Care]:
    """What each cut gets when every one takes this long."""
    cares = []
    for left in range(cuts, 0, -1):
        care = spending.care(spent_s, left)
        cares.append(care)
        if care is Care.NONE:
            break
        timed = care is Care.MEASURED
        spent_s += run_s + (timing_s if timed else 0.0)
        spending.took(run_s=run_s, timing_s=timing_s if timed else None)
    assert spent_s <= 60.0
    return cares


def test_a_quick_models_cuts_are_all_measured() -> None:
    spending = Spending(whole_ms=10.0, requests=1, budget_s=60.0)
    assert spend(spending, 24, run_s=0.7, timing_s=1.7) == [Care.MEASURED] * 24


def test_time_is_kept_for_running_the_others_once_three_are_measured() -> None:
    spending = Spending(whole_ms=100.0, requests=1, budget_s=60.0)
    cares = spend(spending, 24, run_s=1.5, timing_s=3.0)  # all run: 36 s, so that there is time for timing eight
    assert cares == [Care.MEASURED] * 8 + [Care.ESTIMATED] * 16


def test_of_a_slow_model_three_are_measured_before_others_are_run() -> None:
    spending = Spending(whole_ms=1000.0, requests=1, budget_s=60.0)
    cares = spend(spending, 24, run_s=5.0, timing_s=8.0)
    assert cares == [Care.MEASURED] * 3 + [Care.ESTIMATED] * 4 + [Care.NONE]


def test_a_cut_is_not_begun_that_a_run_of_the_whole_tells_would_take_too_long() -> None:
    assert Spending(whole_ms=30_000.0, requests=1, budget_s=60.0).care(0.0, 24) is Care.NONE
    assert Spending(whole_ms=10_000.0, requests=1, budget_s=60.0).care(0.0, 24) is Care.ESTIMATED
    assert Spending(whole_ms=1_000.0, requests=8, budget_s=60.0).care(50.0, 24) is Care.NONE
