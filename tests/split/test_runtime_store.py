"""SegmentStore over an engine of stand-ins that count how often they are opened."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from split.errors import InvalidModel, ModelUnavailable
from split.profiles.measured import Tuning
from split.runtime.engine import Segment, Stop
from split.runtime.optimised import Optimised
from split.runtime.store import SegmentStore
from split.tensor import Array, Tensors


class Opened:
    inputs = outputs = ()

    def __init__(self) -> None:
        self.closed = False

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, stop: Stop | None = None
    ) -> Tensors:
        return {}

    def close(self) -> None:
        self.closed = True


class CountingEngine:
    name = "counting"

    def __init__(self, *, refuses_optimised: bool = False) -> None:
        self.refuses_optimised = refuses_optimised
        self.opened: list[str] = []
        self.tuned: list[tuple[str, int, int]] = []
        self.entered = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()

    def open(self, path: Path, *, threads: int, spin_us: int = 0) -> Segment:
        self.entered.set()
        assert self.may_finish.wait(30)
        self.tuned.append((path.name, threads, spin_us))
        self.opened.append(path.name)
        if path.name.startswith("bad"):
            raise InvalidModel(f"{path} is bad")
        return Opened()

    def trim(self) -> None:
        self.opened.append("trim")

    def open_optimised(self, path: Path, *, threads: int, spin_us: int = 0, prepack: bool) -> Segment:
        self.tuned.append((path.name, threads, spin_us))
        self.opened.append(f"optimised {path.name}{' prepacked' if prepack else ''}")
        if self.refuses_optimised:
            raise InvalidModel(f"{path} is of another runtime")
        return Opened()


def files(folder: Path, sizes: dict[str, int]) -> list[Path]:
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
    return [folder / name for name in sizes]


def test_a_segment_is_opened_once_and_then_there(tmp_path: Path) -> None:
    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    [a] = files(tmp_path, {"a.onnx": 10})
    assert not store.is_open(a)
    assert store.get(a) is store.get(a)
    assert store.is_open(a)
    assert engine.opened == ["a.onnx"]


def test_over_budget_the_least_recently_used_is_forgotten_but_not_closed(tmp_path: Path) -> None:
    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=250)
    a, b, c = files(tmp_path, {"a.onnx": 100, "b.onnx": 100, "c.onnx": 100})
    held = store.get(b)
    store.get(a)
    store.get(b)
    store.get(a)
    store.get(c)
    assert [store.is_open(path) for path in (a, b, c)] == [True, False, True]
    assert store.used_bytes == 200
    assert isinstance(held, Opened)
    assert not held.closed


def test_weights_that_heads_and_tails_share_count_once(tmp_path: Path) -> None:
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=10_000)
    head, tail, _ = files(tmp_path, {"1.head.onnx": 10, "1.tail.onnx": 20, "weights.bin": 5000})
    store.get(head)
    store.get(tail)
    assert store.used_bytes == 5030


def test_external_data_of_a_whole_model_counts(tmp_path: Path) -> None:
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=10_000)
    model, *_ = files(tmp_path, {"model.onnx": 10, "model.onnx.data": 700, "labels.txt": 3})
    store.get(model)
    assert store.used_bytes == 710


def test_a_segment_larger_than_the_budget_is_served_all_the_same(tmp_path: Path) -> None:
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=50)
    a, b = files(tmp_path, {"a.onnx": 100, "b.onnx": 100})
    store.get(a)
    store.get(b)
    assert [store.is_open(a), store.is_open(b)] == [False, True]


def test_two_who_ask_at_once_share_one_opening(tmp_path: Path) -> None:
    engine = CountingEngine()
    engine.may_finish.clear()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    [a] = files(tmp_path, {"a.onnx": 10})
    got: list[Segment] = []
    threads = [threading.Thread(target=lambda: got.append(store.get(a))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert engine.entered.wait(30)
    engine.may_finish.set()
    for thread in threads:
        thread.join()
    assert engine.opened == ["a.onnx"]
    assert len({id(segment) for segment in got}) == 1


def test_a_slow_opening_does_not_hold_up_other_segments(tmp_path: Path) -> None:
    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    slow, ready = files(tmp_path, {"slow.onnx": 10, "ready.onnx": 10})
    expected = store.get(ready)
    engine.entered.clear()
    engine.may_finish.clear()
    thread = threading.Thread(target=store.get, args=(slow,))
    thread.start()
    assert engine.entered.wait(30)
    assert store.get(ready) is expected
    engine.may_finish.set()
    thread.join()


def test_what_the_engine_refuses_is_raised_each_time_and_not_kept(tmp_path: Path) -> None:
    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    [bad] = files(tmp_path, {"bad.onnx": 10})
    for _ in range(2):
        with pytest.raises(InvalidModel, match="is bad"):
            store.get(bad)
    assert engine.opened == ["bad.onnx", "bad.onnx"]
    assert store.used_bytes == 0


def test_a_folder_can_be_forgotten(tmp_path: Path) -> None:
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=1000)
    (tmp_path / "other").mkdir()
    [a], [b] = files(tmp_path, {"a.onnx": 10}), files(tmp_path / "other", {"b.onnx": 10})
    store.get(a)
    store.get(b)
    store.forget(tmp_path)
    assert [store.is_open(a), store.is_open(b)] == [False, True]
    store.clear()
    assert store.used_bytes == 0


def optimised(path: Path, *, prepacked: bool = True, weights: dict[int, int] | None = None) -> Optimised:
    place = path.parent / "optimised"
    found = {(place / "weights.bin", offset): size for offset, size in (weights or {0: 500}).items()}
    return Optimised(path=place / path.name, prepacked=prepacked, bytes=10, weights=found)


def settle(store: SegmentStore) -> None:
    """Wait until nothing is left to do in the background."""
    store.warm([]).result(30)
    store.warm([]).result(30)


def test_the_optimised_form_is_opened_quickly_and_then_laid_out_in_the_background(tmp_path: Path) -> None:
    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    [a] = files(tmp_path, {"a.onnx": 10})
    store.prefer({a: optimised(a)})
    first = store.get(a)
    settle(store)
    assert engine.opened == ["optimised a.onnx", "optimised a.onnx prepacked"]
    assert store.get(a) is not first
    assert store.used_bytes == 510
    store.close()


def test_a_segment_that_is_open_changes_over_when_its_optimised_form_is_there(tmp_path: Path) -> None:
    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    [a] = files(tmp_path, {"a.onnx": 10})
    plain = store.get(a)
    store.prefer({a: optimised(a, prepacked=False)})
    settle(store)
    assert engine.opened == ["a.onnx", "optimised a.onnx"]
    assert store.get(a) is not plain
    assert isinstance(plain, Opened)
    assert not plain.closed  # whoever still holds it may run it
    store.close()


def test_an_optimised_form_that_the_engine_refuses_gives_way_to_what_was_cut(tmp_path: Path) -> None:
    engine = CountingEngine(refuses_optimised=True)
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    [a] = files(tmp_path, {"a.onnx": 10})
    store.prefer({a: optimised(a)})
    store.get(a)
    settle(store)
    assert engine.opened == ["optimised a.onnx", "a.onnx"]
    store.close()


def test_weights_that_optimised_segments_share_count_once(tmp_path: Path) -> None:
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=10_000)
    a, b = files(tmp_path, {"a.onnx": 10, "b.onnx": 10})
    store.prefer({a: optimised(a, weights={0: 100, 4096: 200}), b: optimised(b, weights={4096: 200, 8192: 50})})
    store.get(a)
    store.get(b)
    settle(store)
    assert store.used_bytes == 10 + 10 + 100 + 200 + 50
    store.close()


def test_memory_is_given_back_each_time_however_quickly_the_thread_in_the_background_is_through(tmp_path: Path) -> None:
    class AtOnce:
        """An executor whose thread runs before `submit` returns, as a new thread does."""

        def submit(self, work: Callable[..., None], *arguments: object) -> None:
            work(*arguments)

    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    store._behind = AtOnce()  # type: ignore[assignment]  # what is used of it
    [a] = files(tmp_path, {"a.onnx": 10})
    for _ in range(2):
        store.get(a)
        store.forget(a)
    assert engine.opened == ["a.onnx", "trim"] * 2


def test_what_is_forgotten_is_opened_as_it_was_cut(tmp_path: Path) -> None:
    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    [a] = files(tmp_path, {"a.onnx": 10})
    store.prefer({a: optimised(a)})
    store.forget(tmp_path)
    store.get(a)
    assert engine.opened == ["a.onnx"]
    store.close()


def test_segments_open_with_the_threads_of_their_model_and_change_over_when_those_become_known(tmp_path: Path) -> None:
    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    folder = tmp_path / "parts"
    folder.mkdir()
    whole, other = files(tmp_path, {"whole.onnx": 10, "other.onnx": 10})
    head, tail = files(folder, {"c.head.onnx": 10, "c.tail.onnx": 10})
    store.prefer({head: optimised(head), tail: optimised(tail)})
    for path in (whole, other, head):
        store.get(path)
    settle(store)
    engine.tuned.clear()
    store.tune((whole, folder), Tuning(threads=4, spin_us=200))
    settle(store)
    assert engine.tuned == [("whole.onnx", 4, 200), ("c.head.onnx", 4, 200)]
    store.get(tail)
    store.get(other)
    settle(store)
    assert set(engine.tuned[2:]) == {("c.tail.onnx", 4, 200)}
    store.forget(folder)
    store.forget(whole)
    store.get(whole)
    assert engine.tuned[-1] == ("whole.onnx", 1, 0)
    store.close()


def test_what_is_kept_is_not_opened_again_when_its_file_is_another_one(tmp_path: Path) -> None:
    path, other = files(tmp_path, {"whole.onnx": 10, "other.onnx": 10})
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=10)
    replaced = False

    def still() -> None:
        if replaced:
            raise ModelUnavailable("replaced")

    store.keep(path, still=still)
    open_one = store.get(path)
    replaced = True
    assert store.get(path) is open_one
    store.get(other)  # there is room for one
    with pytest.raises(ModelUnavailable):
        store.get(path)
    assert not store.is_open(path)
    store.forget(path)  # loaded anew
    assert store.get(path) is not open_one


def test_what_is_kept_is_closed_last_and_what_is_held_not_at_all(tmp_path: Path) -> None:
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=250)
    whole, *others = files(tmp_path, {f"{n}.onnx": 100 for n in range(4)})
    store.keep(whole)
    store.get(whole)
    for path in others:
        store.get(path)
        store.get(path)  # twice: used more often than the whole
    assert store.is_open(whole)
    other_whole, third_whole = files(tmp_path, {"v.onnx": 100, "w.onnx": 100})
    for path in (other_whole, third_whole):
        store.keep(path)
    with store.held(whole):
        store.get(other_whole)
        store.get(third_whole)
        assert store.is_open(whole)
        assert not store.is_open(other_whole)
    store.get(other_whole)
    assert not store.is_open(whole)  # kept ones give way to each other: the budget holds
    assert store.used_bytes == 200
    store.forget(third_whole)
    store.get(third_whole)
    store.get(whole)
    assert not store.is_open(third_whole)  # not kept any more
    assert store.is_open(other_whole)
    store.close()


def test_whoever_asks_how_long_opening_takes_is_told_when_the_answer_may_be_another(tmp_path: Path) -> None:
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=150)
    a, b = files(tmp_path, {"a.onnx": 100, "b.onnx": 100})
    seen = [store.changes]
    for change in (
        lambda: store.get(a),
        lambda: store.get(b),  # closes the other
        lambda: store.prefer({a: optimised(a)}),
        lambda: store.forget(tmp_path),
    ):
        change()
        seen.append(store.changes)
    assert seen == sorted(set(seen))
    store.get(b)
    before = store.changes
    store.get(b)
    assert store.changes == before
    store.close()


def test_warming_up_opens_what_it_can_and_leaves_the_rest_to_whoever_asks(tmp_path: Path) -> None:
    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    bad, good = files(tmp_path, {"bad.onnx": 10, "good.onnx": 10})
    store.warm([bad, good]).result(30)
    assert store.is_open(good)
    assert not store.is_open(bad)
    with pytest.raises(InvalidModel):
        store.get(bad)
    store.close()


def test_activation_is_free_when_open_and_learned_when_not(tmp_path: Path) -> None:
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=1000)
    a, b, c = files(tmp_path, {"a.onnx": 10, "b.onnx": 10, "c.onnx": 10})
    store.prefer({c: optimised(c)})
    assert store.activation_ms(a) > store.activation_ms(c) > 0  # to optimise takes longer than to map
    store.get(a)
    assert store.activation_ms(a) == 0
    assert 0 < store.activation_ms(b) < 100  # as the other one that was opened as it was cut: a stand-in
    store.close()


def test_a_scan_over_all_segments_does_not_drive_out_the_one_in_use(tmp_path: Path) -> None:
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=250)
    used, *others = files(tmp_path, {f"{n}.onnx": 100 for n in range(6)})
    store.get(used)
    store.get(used)
    for path in others:
        store.get(path)
    assert store.is_open(used)


def test_an_opening_that_hangs_is_shared_by_those_who_wait_and_forgotten_with_its_file(tmp_path: Path) -> None:
    engine = CountingEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    [a] = files(tmp_path, {"a.onnx": 10})
    engine.may_finish.clear()
    stuck = store.opening(a)
    assert store.opening(a) is stuck
    assert engine.entered.wait(30)
    store.forget(a)
    again = store.opening(a)
    assert again is not stuck
    engine.may_finish.set()
    assert stuck.result(30) is not again.result(30)
    assert store.get(a) is again.result(30)
    store.close()


def test_a_segment_that_was_opened_in_its_own_thread_goes_with_its_last_holder(tmp_path: Path) -> None:
    store = SegmentStore(CountingEngine(), threads=1, budget_bytes=1000)
    [a] = files(tmp_path, {"a.onnx": 10})
    gone = weakref.ref(store.opening(a).result(30))
    for thread in [one for one in threading.enumerate() if one.name == "isthmus-open a.onnx"]:
        thread.join(30)
    assert gone() is not None
    store.forget(a)
    assert gone() is None
    store.close()


def test_what_another_engine_is_said_to_open_it_opens_until_the_place_is_forgotten(tmp_path: Path) -> None:
    usual, other = CountingEngine(), CountingEngine()
    store = SegmentStore(usual, threads=1, budget_bytes=1000)
    (tmp_path / "model").mkdir()
    head, tail = files(tmp_path / "model", {"c.head.onnx": 10, "c.tail.onnx": 10})
    [whole] = files(tmp_path, {"whole.onnx": 10})
    store.use([tmp_path / "model"], other)
    for path in (head, tail, whole):
        store.get(path)
    assert (usual.opened, other.opened) == (["whole.onnx"], ["c.head.onnx", "c.tail.onnx"])
    store.forget(tmp_path / "model")
    store.get(head)
    assert "c.head.onnx" in usual.opened
