"""What the companion makes of a model in the background: its segments optimised, told to whoever opens them."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

import cloud.segments
from cloud.segments import Segments
from split.codec.golden import golden_inputs
from split.errors import CompanionRefused, ModelUnavailable
from split.graph.card import read_card
from split.ids import CutId
from split.runtime.optimised import Optimised
from split.runtime.segment import OrtEngine
from split.workbench.cut import prepare
from split.workbench.optimise import optimise

TINY = """
<ir_version: 8, opset_import: ["" : 17]>
tiny (float[4] x) => (float[4] y)
{{
    a = Relu (x)
    y = {} (a)
}}
"""


class Bench:
    """The real jobs, in this process; `fails` for a disk that is full."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.optimised: list[list[str]] = []
        self.done = asyncio.Event()

    async def probe(self, model):
        pass

    async def prepare(self, model, folder, dims):
        prepare(model, folder, dims=dims)

    async def part(self, model, folder, cut, node_bitmap):
        raise AssertionError("the candidates are there")

    async def optimise(self, model, folder, cuts):
        self.optimised.append(list(cuts))
        try:
            if self.fails:
                raise ModelUnavailable("the disk is full; free some space")
            card = read_card(folder)
            wanted = [cut for cut in card.cuts if cut.id in cuts]
            await asyncio.to_thread(
                optimise, card, folder, wanted, inputs=golden_inputs(card.inputs, {}), engine=OrtEngine(), threads=1
            )
        finally:
            self.done.set()


def house(tmp_path: Path, bench: Bench) -> tuple[Segments, dict[Path, Optimised], asyncio.Event]:
    learned: dict[Path, Optimised] = {}
    told = asyncio.Event()

    def prefer(made):
        learned.update(made)
        told.set()

    segments = Segments(tmp_path / "cache", bench, prefer=prefer, let_go=lambda _: None, runtime=OrtEngine().name)
    return segments, learned, told


async def test_what_is_prepared_and_cut_is_optimised_in_the_background_and_told(chain, tmp_path):
    bench = Bench()
    segments, learned, told = house(tmp_path, bench)
    model = await segments.prepare(chain.digest, chain.path, {})
    cut = model.card.cuts[0]
    await segments.cut(model, cut.id, cut.node_bitmap)
    async with asyncio.timeout(60):
        while model.tail(cut.id) not in learned:
            told.clear()
            await told.wait()
    assert learned[chain.path].path.name == "whole.onnx"
    assert learned[model.tail(cut.id)].path.is_file()
    await segments.close()


async def test_what_lies_there_sound_is_told_at_once_and_not_made_again(chain, tmp_path):
    first = Bench()
    segments, _, told = house(tmp_path, first)
    await segments.prepare(chain.digest, chain.path, {})
    async with asyncio.timeout(60):
        await told.wait()
    await segments.close()
    second = Bench()
    segments, learned, told = house(tmp_path, second)
    await segments.prepare(chain.digest, chain.path, {})
    async with asyncio.timeout(60):
        await told.wait()
    await segments.close()
    assert chain.path in learned
    assert second.optimised == []


async def test_a_full_disk_leaves_the_model_as_it_was_cut(chain, tmp_path, caplog: pytest.LogCaptureFixture):
    bench = Bench(fails=True)
    segments, learned, _ = house(tmp_path, bench)
    model = await segments.prepare(chain.digest, chain.path, {})
    async with asyncio.timeout(60):
        await bench.done.wait()
    await segments.close()
    assert model.card.digest == chain.digest
    assert learned == {}
    assert "the disk is full" in caplog.text


async def test_of_a_model_that_is_gone_no_segment_is_kept_open(chain, tmp_path):
    gone: list[Path] = []
    segments = Segments(
        tmp_path / "cache", Bench(), prefer=lambda _: None, let_go=gone.append, runtime=OrtEngine().name
    )
    model = await segments.prepare(chain.digest, chain.path, {})
    asked: list[int] = []
    await segments.keep_only(lambda: (asked.append(threading.get_ident()), (chain.digest,))[1])
    assert gone == []
    assert len(asked) == 1  # it looks at every model on the disk
    assert threading.get_ident() not in asked
    await segments.keep_only(lambda: ())
    await segments.close()
    assert gone == [model.folder, chain.path]
    assert not (model.folder / "card.json").exists()


class Hanging(Bench):
    """Models named here hang in their child until `go`; the others are made at once."""

    def __init__(self, *hanging: Path) -> None:
        super().__init__(fails=True)
        self.hanging, self.go, self.begun = hanging, asyncio.Event(), asyncio.Semaphore(0)

    async def probe(self, model):
        if model in self.hanging:
            self.begun.release()
            await self.go.wait()


async def test_a_model_that_hangs_its_child_does_not_hold_up_another(make_model, tmp_path):
    hostile, honest = make_model(TINY.format("Exp")), make_model(TINY.format("Neg"))
    bench = Hanging(hostile.path)
    segments, _, _ = house(tmp_path, bench)
    stuck = asyncio.create_task(segments.prepare(hostile.digest, hostile.path, {}))
    await bench.begun.acquire()
    async with asyncio.timeout(30):
        await segments.keep_only(lambda: (honest.digest,))
        assert (await segments.prepare(honest.digest, honest.path, {})).card.digest == honest.digest
    assert not stuck.done()
    bench.go.set()
    await stuck
    await segments.close()


async def test_over_all_models_two_children_run_at_once_and_no_more(make_model, tmp_path):
    models = [make_model(TINY.format(op)) for op in ("Exp", "Neg", "Abs")]
    bench = Hanging(*(model.path for model in models))
    segments, _, _ = house(tmp_path, bench)
    tasks = [asyncio.create_task(segments.prepare(model.digest, model.path, {})) for model in models]
    for _ in range(2):
        await bench.begun.acquire()
    for _ in range(10):
        await asyncio.sleep(0)
    assert bench.begun.locked()  # the third one waits
    bench.go.set()
    await asyncio.gather(*tasks)
    await segments.close()


async def test_of_the_cuts_made_on_demand_the_last_ones_asked_for_outlive_the_process(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(cloud.segments, "CUTS_KEPT", 2)
    segments, *_ = house(tmp_path, Bench())
    model = await segments.prepare(chain.digest, chain.path, {})
    await segments.close()
    candidate = model.card.cuts[0].id
    for age_s, name in enumerate(("aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc")):
        for file in (f"{name}.json", f"{name}.head.onnx", f"{name}.tail.onnx"):
            (model.folder / file).write_text("{}")
        os.utime(model.folder / f"{name}.json", (1000 - age_s, 1000 - age_s))  # c was asked for first
    again, *_ = house(tmp_path, Bench())
    model = await again.prepare(chain.digest, chain.path, {})
    await again.close()
    assert not list(model.folder.glob("cccccccccccc.*"))
    assert {path.name[0] for path in model.folder.glob("[ab]*.json") if len(path.stem) == 12} >= {"a", "b"}
    assert model.head(candidate).exists()
    assert model.tail(candidate).exists()


async def test_a_model_of_which_every_cut_is_asked_for_has_a_bound(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(cloud.segments, "CUTS_MAX", 1)
    segments, *_ = house(tmp_path, Bench())
    model = await segments.prepare(chain.digest, chain.path, {})
    (model.folder / "aaaaaaaaaaaa.json").write_text("{}")
    bitmap = "0" * (2 * ((model.card.nodes + 7) // 8))
    with pytest.raises(CompanionRefused, match="1 cuts of this model") as refused:
        await segments.cut(model, CutId("bbbbbbbbbbbb"), bitmap)
    assert refused.value.code == "BUDGET_EXCEEDED"
    await segments.close()
