"""One cut of a linear model: which requests are asked how the outputs move, and what becomes of the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from split.codec.calibration import Curve
from split.graph.cuts import Cut
from split.ids import CutId
from split.profiles.contract import Fidelity
from split.runtime.engine import Stop
from split.tensor import Array, Tensors, TensorSpec
from split.workbench.coded_cut import CodedCut, Halves, HeldOut
from split.workbench.sources import Request, Source, folds_of, spread

WEIGHTS = np.array([8.0, 1.0, 1.0, 1.0])


class Linear:
    """y = weights · (mean of x over positions)."""

    inputs, outputs = ("x",), ("y",)

    def __init__(self) -> None:
        self.asked: list[Array] = []

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, stop: Stop | None = None
    ) -> Tensors:
        self.asked.append(feeds["x"])
        return {"y": 1 + (feeds["x"].astype(np.float64).mean(axis=(2, 3)) @ WEIGHTS)}

    def close(self) -> None:
        pass


class Handed(Linear):
    """What comes in goes out."""

    outputs = ("x",)

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, stop: Stop | None = None
    ) -> Tensors:
        self.asked.append(feeds["x"])
        return dict(feeds)


def halves(tail: Linear, weights: Array | None = None) -> Halves:
    cut = Cut(
        id=CutId("c"),
        mask=1,
        nodes=1,
        boundary=("x",),
        head_inputs=("x",),
        head_outputs=(),
        tail_inputs=(),
        tail_outputs=("y",),
    )
    spec = TensorSpec(name="x", dtype="FP32", shape=(1, 4, 3, 3))
    return Halves(cut=cut, specs=(spec,), node_bitmap="01", head=Handed(), tail=tail, weights=lambda *_: weights)


def sources_of(count: int, views: int) -> list[Source]:
    """Sources whose first value tells their number."""

    def view(number: int, turn: int) -> Request:
        x = np.random.default_rng((number, turn)).normal(0, 1, (1, 4, 3, 3)).astype(np.float32)
        x[0, :, 0, 0] = number / 50
        return lambda: {"x": x}

    return [Source(name=str(n), views=[view(n, turn) for turn in range(views)]) for n in range(count)]


def learnt(tail: Linear, *, count: int, probes: int, has_time: Callable[[], bool] = lambda: True) -> CodedCut:
    sources = sources_of(count, 8)
    coded = CodedCut(halves(tail), folds_of(sources))
    coded.learn(spread(sources, 128), measure="relative", probes=probes, has_time=has_time)
    return coded


def weighed(coded: CodedCut, without: int = -1) -> bool:
    """Whether the tables tell the first channel, which matters eight times as much, from the others: the transform that
    goes by variance alone gives all of them the same length."""
    klt = coded.tables(without).tensors[0].klt
    assert klt is not None
    lengths = np.linalg.norm(klt.transform, axis=0)
    return bool(lengths[0] > 3 * lengths[1:].max())


@pytest.mark.parametrize("count", [6, 16, 32, 64])
@pytest.mark.parametrize("probes", [2, 3, 8])
def test_the_requests_asked_are_of_different_sources_in_two_folds_at_least(count: int, probes: int) -> None:
    tail = Linear()
    coded = learnt(tail, count=count, probes=probes)
    unmoved = tail.asked[:: 1 + 4]  # each request first as it is, then once with each channel moved
    assert len({round(float(x[0, 0, 0, 0]) * 50) for x in unmoved}) == min(probes, count)
    assert len(unmoved) == probes
    assert all(weighed(coded, without) for without in (-1, 0, 1, 2))


def test_one_answer_serves_all_tables_but_those_that_must_not_know_it(caplog: pytest.LogCaptureFixture) -> None:
    asked = iter(range(100))
    with caplog.at_level(logging.WARNING):
        coded = learnt(Linear(), count=6, probes=2, has_time=lambda: next(asked) < 4)
    assert [weighed(coded, without) for without in (-1, 0, 1, 2)] == [True, False, True, True]
    assert not caplog.text
    # A level means about the same in all of them: together the coefficients have one power.
    powers = []
    for without in range(3):
        klt = coded.tables(without).tensors[0].klt
        assert klt is not None
        powers.append(float(np.square(2.0 ** (klt.scales.astype(float) / 8)).sum()))
    assert max(powers) < 1.5 * min(powers)


def test_without_an_answer_it_is_said_that_variance_alone_decides(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        coded = learnt(Linear(), count=6, probes=2, has_time=lambda: False)
    assert not weighed(coded)
    assert "cut=c: 0 of 2 inputs were asked how the outputs move with it, and none told" in caplog.text


@pytest.mark.parametrize("kept", [0, 2])
def test_what_crosses_is_made_again_where_it_is_too_much_to_keep(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> tuple[Curve, int]:
        sources = sources_of(6, 1)
        opened = halves(Linear())
        assert isinstance(opened.head, Handed)
        coded = CodedCut(opened, folds_of(sources))
        coded.learn(spread(sources, 6), measure="relative", probes=2, has_time=lambda: True)
        learnt_from = len(opened.head.asked)
        held_out = [
            HeldOut(source=source, inputs=request, expected=Linear().run(request()))
            for source, request in spread(sources, 6)
        ]
        found = coded.curve(held_out, Fidelity(measure="relative", bound=0.01))
        return found, len(opened.head.asked) - learnt_from

    all_kept, runs = traced()
    assert runs == 6
    monkeypatch.setattr("split.workbench.coded_cut.KEPT_BYTES_MAX", kept * 4 * 4 * 9)
    again, runs = traced()
    assert again == all_kept
    levels, rest = divmod(runs - 6, 6 - kept)  # at each level but the first
    assert levels >= len(all_kept.points) - 1
    assert rest == (1 if kept == 0 else 0)  # how large it is, is looked at on the first
