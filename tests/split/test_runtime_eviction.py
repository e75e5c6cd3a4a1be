"""LRU-2 against traces worked out by hand from the paper's definition, and against LRU on a Zipf stream with scans."""

from collections import OrderedDict
from itertools import chain

import numpy as np

from split.runtime.eviction import LruK


def hits(policy: LruK[int] | None, trace: list[int], room: int) -> int:
    """Hits of a cache of `room` names: LRU-2, or plain LRU for None."""
    kept: OrderedDict[int, None] = OrderedDict()
    found = 0
    for name in trace:
        found += name in kept
        if policy is not None:
            policy.use(name)
        kept[name] = None
        kept.move_to_end(name)
        if len(kept) > room:
            others = [other for other in kept if other != name]
            del kept[others[0] if policy is None else policy.in_order(others)[0]]
    return found


def test_what_was_used_once_goes_before_what_was_used_twice_however_lately() -> None:
    policy: LruK[str] = LruK()
    for name in "abacbd":  # uses: a 1 3, b 2 5, c 4, d 6
        policy.use(name)
    assert policy.in_order("abcd") == ["c", "d", "a", "b"]


def test_among_those_used_twice_the_use_before_the_last_decides() -> None:
    policy: LruK[str] = LruK()
    for name in "abbbaa":  # the uses before the last: b 3, a 5
        policy.use(name)
    policy.use("b")  # now b 4, a 5, although b was used last
    assert policy.in_order("ab") == ["b", "a"]


def test_a_name_never_used_goes_first_and_a_forgotten_one_is_never_used() -> None:
    policy: LruK[str] = LruK()
    for name in "aabb":
        policy.use(name)
    policy.forget("b")
    assert policy.in_order("ab") == ["b", "a"]


def test_uses_are_remembered_after_a_name_was_let_go() -> None:
    policy: LruK[str] = LruK()
    for name in ("a", "x", "y", "a"):
        policy.use(name)
    assert policy.in_order("axy") == ["x", "y", "a"]


def test_the_memory_of_uses_is_bounded() -> None:
    policy: LruK[int] = LruK(remembered=3)
    for name in (1, 1, 2, 3, 4):
        policy.use(name)
    assert policy.in_order([1, 2]) == [1, 2]  # 1 is as one never used


def test_scans_drive_out_less_than_under_lru() -> None:
    random = np.random.default_rng(5)
    popular = (random.zipf(1.3, 4000) % 40).tolist()
    trace = list(chain.from_iterable([*popular[n : n + 100], *range(1000 + n, 1030 + n)] for n in range(0, 4000, 100)))
    assert hits(LruK(), trace, 10) > 1.1 * hits(None, trace, 10)


def test_the_hand_computed_trace_hits_three_times_where_lru_hits_once() -> None:
    # Room for two. LRU-2: a b a* (x drives out b) x a* (y drives out x) y a*; LRU: a a* x y drive out a each time.
    trace = [1, 2, 1, 8, 9, 1, 7, 6, 1]
    assert hits(LruK(), trace, 2) == 3
    assert hits(None, trace, 2) == 1
