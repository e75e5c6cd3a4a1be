"""Threads by measurement: a machine laid out as files, a model whose runs take what a script says."""

import math
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.parser
import pytest

from split.profiles.measured import Tuning
from split.runtime.machine import Machine, read_machine
from split.runtime.segment import OrtEngine
from split.runtime.tuning import default_tuning, fastest, tunings


class Bench:
    """A clock that only runs and pauses move, and a count of what is open."""

    def __init__(self, ms: dict[Tuning, tuple[float, float]]) -> None:
        self.ms = ms
        self.now_s = 0.0
        self.cpu_s = 0.0
        self.runs: dict[Tuning, int] = dict.fromkeys(ms, 0)

    def open_with(self, tuning: Tuning) -> Callable[[], object]:
        def run() -> None:
            wall_ms, cpu_ms = self.ms[tuning]
            self.runs[tuning] += 1
            self.now_s += wall_ms / 1e3
            self.cpu_s += cpu_ms / 1e3

        return run

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def fastest(self, *, limit_s: float = math.inf) -> Tuning:
        return fastest(
            list(self.ms),
            self.open_with,
            limit_s=limit_s,
            clock=lambda: self.now_s,
            cpu_clock=lambda: self.cpu_s,
            sleep=self.sleep,
        )


ONE = Tuning(threads=1)
TWO = Tuning(threads=2)
TWO_SPIN = Tuning(threads=2, spin_us=200)
FOUR = Tuning(threads=4)


@pytest.mark.parametrize(
    ("ms", "best"),
    [
        ({ONE: (10.8, 11.6), TWO: (11.0, 20.6), TWO_SPIN: (8.2, 17.5)}, TWO_SPIN),  # waking up costs more than it gains
        ({ONE: (6.9, 6.9), TWO: (4.6, 8.8), TWO_SPIN: (4.55, 12.0)}, TWO),  # 1 % is not worth a third more energy
        ({ONE: (6.9, 6.9), TWO: (4.6, 8.8), TWO_SPIN: (4.4, 12.0)}, TWO_SPIN),  # 4 % are
        ({ONE: (1.0, 1.0), TWO: (1.01, 1.6), TWO_SPIN: (0.995, 1.9)}, ONE),
        ({ONE: (100, 100), TWO: (98.5, 90), FOUR: (97.1, 85)}, FOUR),
        (
            {ONE: (100, 100), TWO: (98.5, 150), FOUR: (97.1, 180)},
            TWO,
        ),  # each within 2 % of the one before, not of the best
        ({ONE: (5.0, 5.0)}, ONE),
    ],
)
def test_the_fastest_wins_and_among_those_alike_the_one_that_takes_least_processor_time(
    ms: dict[Tuning, tuple[float, float]], best: Tuning
) -> None:
    assert Bench(ms).fastest() == best


def test_rounds_in_which_other_processes_ran_do_not_decide_but_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Disturbed(Bench):
        def open_with(self, tuning: Tuning) -> Callable[[], object]:
            run = super().open_with(tuning)

            def disturbed() -> None:
                run()
                self.now_s += 0.02 if tuning is TWO and self.runs[tuning] % 3 else 0.0

            return disturbed

    assert Disturbed({ONE: (10.0, 9.9), TWO: (6.0, 11.0)}).fastest() == TWO  # though its median is 26 ms
    assert caplog.text == ""
    assert Bench({ONE: (20.0, 10.0), TWO: (15.0, 11.0)}).fastest() == TWO
    assert "other processes held one up for 50 % of the time" in caplog.text


def test_one_candidate_is_not_measured() -> None:
    bench = Bench({ONE: (5.0, 5.0)})
    bench.fastest()
    assert bench.runs == {ONE: 0}


def test_measuring_ends_with_its_budget_whatever_the_model_takes() -> None:
    quick = Bench({ONE: (10.0, 10.0), TWO: (9.0, 18.0), TWO_SPIN: (8.0, 16.0)})
    quick.fastest()
    assert quick.now_s < 5.0
    slow = Bench({ONE: (1000.0, 1000.0), TWO: (950.0, 1800.0), TWO_SPIN: (900.0, 1600.0)})
    assert slow.fastest() == TWO_SPIN
    assert slow.now_s < 35.0


@pytest.mark.parametrize(
    ("run_s", "taken_s", "tried"),
    [
        (0.9, 13.75, {ONE, TWO, TWO_SPIN, FOUR}),
        (2.2, 13.75, {ONE, FOUR, TWO}),  # every core before fewer, asleep before spinning
        (5.0, 13.75, {ONE, FOUR}),
        (30.0, 42.0, {ONE, FOUR}),  # the first two once, whatever they take
    ],
)
def test_no_round_is_begun_that_would_go_beyond_the_limit(run_s: float, taken_s: float, tried: set[Tuning]) -> None:
    ratios = {ONE: (1.0, 1.0), TWO: (0.6, 1.1), TWO_SPIN: (0.59, 1.2), FOUR: (0.4, 1.4)}
    bench = Bench({tuning: (1e3 * run_s * wall, 1e3 * run_s * cpu) for tuning, (wall, cpu) in ratios.items()})
    assert bench.fastest(limit_s=13.75) == FOUR
    assert bench.now_s <= taken_s + 0.1  # pauses
    assert {tuning for tuning, runs in bench.runs.items() if runs} == tried


def test_what_is_far_slower_is_given_up_early() -> None:
    bench = Bench({ONE: (10.0, 10.0), TWO: (30.0, 60.0)})
    assert bench.fastest() == ONE
    assert bench.runs[TWO] == 1 + 2 * 5


def machine(root: Path, capacities: list[int], *, allowed: str = "", cpu_max: str = "max 100000") -> Machine:
    """Cores of these capacities (0: the kernel tells none), of which this process may use `allowed`."""
    files = {
        "proc/self/status": f"Cpus_allowed_list:\t{allowed or f'0-{len(capacities) - 1}'}\n",
        "proc/self/cgroup": "0::/unit\n",
        "sys/fs/cgroup/unit/cpu.max": f"{cpu_max}\n",
    } | {
        f"sys/devices/system/cpu/cpu{core}/cpu_capacity": f"{capacity}\n"
        for core, capacity in enumerate(capacities)
        if capacity
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_machine(root)


def counts(found: tuple[Tuning, ...]) -> list[int]:
    return list(dict.fromkeys(tuning.threads for tuning in found))


@pytest.mark.parametrize(
    ("capacities", "threads"),
    [
        ([0], [1]),
        ([0] * 2, [1, 2]),
        ([0] * 6, [1, 2, 4, 6]),
        ([0] * 8, [1, 2, 4, 8]),
        ([414] * 4 + [1010] * 2 + [1024] * 2, [1, 2, 4]),  # RK3588: the big ones, of both bins
        ([325] * 4 + [871] * 3 + [1024], [1, 2, 4]),  # a prime core and three big ones
        ([1024] * 2 + [600] * 6, [1, 2]),
    ],
)
def test_only_cores_that_help_are_tried(tmp_path: Path, capacities: list[int], threads: list[int]) -> None:
    found = tunings(machine(tmp_path, capacities))
    assert counts(found) == threads
    assert {tuning.spin_us for tuning in found if tuning.threads == 1} == {0}
    if len(threads) > 1:
        assert {tuning.spin_us for tuning in found if tuning.threads == 2} > {0}


def test_maximum_frequencies_tell_the_cores_apart_where_there_are_no_capacities(tmp_path: Path) -> None:
    for core, khz in enumerate([5_200_000, 5_000_000, 3_900_000, 3_900_000]):
        path = tmp_path / f"sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq"
        path.parent.mkdir(parents=True)
        path.write_text(f"{khz}\n")
    assert counts(tunings(machine(tmp_path, [0] * 4))) == [1, 2]


def test_the_affinity_mask_bounds_what_is_tried(tmp_path: Path) -> None:
    assert counts(tunings(machine(tmp_path, [0] * 8, allowed="0-2"))) == [1, 2, 3]


@pytest.mark.parametrize(
    ("cpu_max", "threads", "spins"),
    [
        ("max 100000", 4, True),
        ("400000 100000", 4, True),
        ("300000 100000", 3, False),
        ("150000 100000", 2, False),
    ],
)
def test_below_a_quota_nothing_spins(tmp_path: Path, cpu_max: str, threads: int, spins: bool) -> None:
    limited = machine(tmp_path, [0] * 4, cpu_max=cpu_max)
    assert any(tuning.spin_us for tuning in tunings(limited)) == spins
    default = default_tuning(limited)
    assert (default.threads, default.spin_us > 0) == (threads, spins)


def test_threads_that_were_asked_for_are_kept_and_spin_only_where_each_has_a_core(tmp_path: Path) -> None:
    two = machine(tmp_path, [0] * 2)
    assert counts(tunings(two, 1)) == [1]
    assert counts(tunings(two, 4)) == [4]
    assert default_tuning(two, 2) == Tuning(threads=2, spin_us=200)
    assert default_tuning(two, 4) == Tuning(threads=4)
    assert default_tuning(two, 1) == Tuning(threads=1)


@pytest.mark.parametrize(
    ("spin_us", "entries"),
    [
        (0, {"session.intra_op.allow_spinning": "0"}),
        (
            200,
            {
                "session.intra_op.allow_spinning": "1",
                "session.intra_op.spin_duration_us": "200",
                "session.force_spinning_stop": "1",
            },
        ),
    ],
)
def test_the_session_has_the_threads_and_the_spinning_that_were_chosen(
    tmp_path: Path, spin_us: int, entries: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    path = tmp_path / "m.onnx"
    text = '<ir_version: 8, opset_import: ["" : 17]> m (float[1] x) => (float[1] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), path)
    given: list[onnxruntime.SessionOptions] = []
    real = onnxruntime.InferenceSession

    def session(model: str, options: onnxruntime.SessionOptions, **rest: object) -> object:
        given.append(options)
        return real(model, options, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    engine = OrtEngine()
    engine.open(path, threads=2, spin_us=spin_us)
    engine.open_optimised(path, threads=2, spin_us=spin_us, prepack=True)
    assert len(given) == 2
    for options in given:
        assert options.intra_op_num_threads == 2
        assert {name: options.get_session_config_entry(name) for name in entries} == entries
