"""Models that come as chunks: what others have is not sent, what was cut goes on, what was damaged is found."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cloud.uploads
from cloud.store import ModelStore
from cloud.uploads import RESERVED_S, Wanted
from split.errors import CompanionRefused, InvalidRequest
from split.graph.chunks import list_chunks

NOISE = np.random.default_rng(5).integers(0, 256, 1_500_000, dtype=np.uint8).tobytes()
BUDGET = 100_000_000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Model:
    """One file (and its data file) on a device."""

    def __init__(self, folder: Path, data: bytes, beside: bytes | None = None) -> None:
        self.parts = [data] if beside is None else [data, beside]
        names = ["model.onnx", "weights.bin"]
        self.files = tuple((name, len(part), sha256(part)) for name, part in zip(names, self.parts, strict=False))
        lines = "\n".join([sha256(data), *(f"{sha} {name}" for name, _, sha in self.files[1:])])
        self.digest = f"sha256:{sha256(data if beside is None else lines.encode())}"
        place = folder / sha256(lines.encode())
        place.mkdir()
        paths = [place / name for name, _, _ in self.files]
        for path, part in zip(paths, self.parts, strict=True):
            path.write_bytes(part)
        self.chunks = list_chunks(paths, [len(part) for part in self.parts])

    def offer(self, store: ModelStore, device: str = "cam") -> Wanted | None:
        return store.offer(self.digest, device, self.files, self.chunks)

    def send(
        self, store: ModelStore, wanted: Wanted, device: str = "cam", piece: int = 10_000, most: int = 10**9
    ) -> int:
        """Send what is wanted in pieces, `most` bytes of it; how many were sent."""
        sent = 0
        for (index, start), length in zip(wanted.missing, wanted.lengths, strict=True):
            for offset in range(start, start + length, piece):
                data = self.parts[index][offset : min(offset + piece, start + length)][: most - sent]
                if not data:
                    return sent
                store.write(self.digest, device, index, offset, data)
                sent += len(data)
        return sent

    def bring(self, store: ModelStore, device: str = "cam") -> int:
        """All of it; how many bytes were sent."""
        wanted = self.offer(store, device)
        assert wanted is not None
        sent = self.send(store, wanted, device)
        assert store.finish(self.digest, device)
        store.release(self.digest, device)
        place = store.path(self.digest).parent
        assert [(place / name).read_bytes() for name, _, _ in self.files] == self.parts
        return sent


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models", budget_bytes=BUDGET)


OLD = NOISE[:1_000_000]
NEW = NOISE[:500_000] + NOISE[1_000_000:1_050_000] + NOISE[500_000:1_000_000]
"""50 KB put in the middle: everything after it moved."""


def test_a_new_version_sends_what_differs_to_whichever_device_brings_it(store: ModelStore, tmp_path: Path) -> None:
    assert Model(tmp_path, OLD).bring(store, "one") == len(OLD)
    sent = Model(tmp_path, NEW).bring(store, "two")
    assert 50_000 <= sent <= 50_000 + 2 * 256 * 1024
    assert Model(tmp_path, OLD[:1], OLD).bring(store, "three") == 1  # the same bytes in another file


def test_what_occurs_twice_in_a_model_is_sent_once(store: ModelStore, tmp_path: Path) -> None:
    sent = Model(tmp_path, b"graph", NOISE[:400_000] + bytes(2_000_000) + NOISE[:400_000]).bring(store)
    assert sent < 400_000 + 3 * 256 * 1024


def test_a_model_that_shares_every_chunk_needs_no_byte(store: ModelStore, tmp_path: Path) -> None:
    Model(tmp_path, OLD).bring(store)
    whole = Model(tmp_path, OLD, OLD)
    assert whole.offer(store, "two") == Wanted()
    assert store.finish(whole.digest, "two")
    assert (store.path(whole.digest).parent / "weights.bin").read_bytes() == OLD


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**9), known=st.booleans())
def test_an_upload_goes_on_after_cuts_and_restarts_anywhere(
    tmp_path_factory: pytest.TempPathFactory, seed: int, known: bool
) -> None:
    """The link is cut at any byte; the companion dies, and what it wrote last may be torn; the device starts anew."""
    folder, rng = tmp_path_factory.mktemp("companion"), random.Random(seed)
    store = ModelStore(folder / "models", budget_bytes=BUDGET)
    if known:
        Model(folder, OLD).bring(store, "other")
    model, sent = Model(folder, NEW, NOISE[1_200_000:]), 0
    cuts = 0
    while True:
        wanted = model.offer(store)
        assert wanted is not None
        if not wanted.missing:
            break
        most = 10**9 if cuts > 6 else rng.randrange(400_000)
        sent += model.send(store, wanted, piece=rng.choice([1_000, 50_000, 262_144]), most=most)
        cuts += 1
        if store.finish(model.digest, "cam"):
            break
        if rng.random() < 0.5:
            store.release(model.digest, "cam")
        if rng.random() < 0.5:
            store = ModelStore(folder / "models", budget_bytes=BUDGET)
            torn = rng.choice(sorted((folder / "models").glob("*/incoming/cam/*")) or [None])
            if torn is not None and rng.random() < 0.5:
                with torn.open("r+b") as file:
                    file.truncate(rng.randrange(torn.stat().st_size + 1))
    assert store.finish(model.digest, "cam")
    assert (store.path(model.digest)).read_bytes() == NEW
    assert (store.path(model.digest).parent / "weights.bin").read_bytes() == NOISE[1_200_000:]
    assert sum(path.is_file() for path in (folder / "models").rglob("incoming/**/*")) == 0


def test_a_cut_costs_no_more_than_the_chunk_that_it_hit(store: ModelStore, tmp_path: Path) -> None:
    model = Model(tmp_path, OLD)
    wanted = model.offer(store)
    assert wanted is not None
    model.send(store, wanted, most=600_000)
    store.release(model.digest, "cam")
    again = ModelStore(tmp_path / "models", budget_bytes=BUDGET)
    wanted = model.offer(again)
    assert wanted is not None
    assert 400_000 <= sum(wanted.lengths) <= 400_000 + 256 * 1024
    assert again.offer(model.digest, "cam", model.files) == wanted  # the list is kept: it need not come again


def test_an_offer_without_chunks_starts_a_damaged_list_afresh(store: ModelStore, tmp_path: Path) -> None:
    model = Model(tmp_path, OLD)
    wanted = model.offer(store)
    assert wanted is not None
    model.send(store, wanted, most=300_000)
    [kept] = (tmp_path / "models").glob("*/incoming/cam.chunks")
    kept.write_bytes(kept.read_bytes()[:-7])
    assert store.offer(model.digest, "cam", model.files) == Wanted(missing=((0, 0),))
    assert store.write(model.digest, "cam", 0, 0, OLD)
    assert store.finish(model.digest, "cam")


def test_a_shared_chunk_that_is_damaged_over_there_is_asked_for(store: ModelStore, tmp_path: Path) -> None:
    old, new = Model(tmp_path, OLD), Model(tmp_path, NEW)
    old.bring(store)
    stored = store.path(old.digest)
    stored.write_bytes(bytes([stored.read_bytes()[0] ^ 1]) + OLD[1:])
    assert new.bring(store) > 50_000


def test_a_shared_chunk_that_goes_before_it_was_copied_is_a_typed_refusal_and_then_asked_for(
    store: ModelStore, tmp_path: Path
) -> None:
    old, new = Model(tmp_path, OLD), Model(tmp_path, NEW)
    old.bring(store)
    wanted = new.offer(store)
    assert wanted is not None
    new.send(store, wanted)
    store.remove(old.digest)
    with pytest.raises(CompanionRefused, match="offer the model again") as refused:
        store.finish(new.digest, "cam")
    assert refused.value.code == "MODEL_UNAVAILABLE"
    store.release(new.digest, "cam")
    assert new.bring(store) > 500_000


def test_models_from_which_chunks_will_be_copied_are_not_removed_for_room(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models", budget_bytes=2_600_000)
    old, idle, new = Model(tmp_path, OLD), Model(tmp_path, NOISE[1_000_000:1_500_000]), Model(tmp_path, NEW + b"!")
    old.bring(store)
    idle.bring(store)
    os.utime(store.path(old.digest).parent.parent, (1, 1))  # the oldest, and yet the other one goes
    new.bring(store)
    assert set(store.held()) == {old.digest, new.digest}


def test_a_model_that_has_come_counts_once_while_the_session_that_brought_it_lives(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models", budget_bytes=len(OLD) + 500_000)
    model = Model(tmp_path, OLD)
    wanted = model.offer(store)
    assert wanted is not None
    model.send(store, wanted)
    assert store.finish(model.digest, "cam")
    assert Model(tmp_path, NOISE[1_000_000:1_500_000]).offer(store, "other") is not None


def test_chunks_that_lie_about_a_file_harm_only_their_device(store: ModelStore, tmp_path: Path) -> None:
    good = Model(tmp_path, OLD)
    lie = good.chunks[:4] + bytes(32) + good.chunks[36:]
    wanted = store.offer(good.digest, "liar", good.files, lie)
    assert wanted is not None
    good.send(store, wanted, "liar")
    assert store.finish(good.digest, "liar")  # the file is what counts: its hash is right
    assert Model(tmp_path, NEW).bring(store) < 700_000


def test_a_list_of_another_file_is_refused_and_reserves_nothing(store: ModelStore, tmp_path: Path) -> None:
    old, new = Model(tmp_path, OLD), Model(tmp_path, NEW)
    with pytest.raises(InvalidRequest, match="list of chunks"):
        store.offer(old.digest, "cam", old.files, new.chunks)
    with pytest.raises(InvalidRequest, match="was not offered"):
        store.write(old.digest, "cam", 0, 0, b"1")


def test_a_scattered_difference_is_asked_for_in_a_bounded_number_of_ranges(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud.uploads, "RANGES_MAX", 3)
    Model(tmp_path, OLD).bring(store)
    spotted = bytearray(OLD)
    for at in range(0, len(OLD), 150_000):
        spotted[at] ^= 0xFF
    model = Model(tmp_path, bytes(spotted))
    wanted = model.offer(store)
    assert wanted is not None
    assert len(wanted.missing) == 1
    assert model.bring(store) == sum(wanted.lengths)


def test_where_there_are_too_many_ranges_each_file_is_asked_for_in_one(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud.uploads, "RANGES_MAX", 3)
    step = 2048
    sizes, here = (5 * step,) * 3, tmp_path / "here"
    files = tuple((name, size, "0" * 64) for name, size in zip("abc", sizes, strict=True))
    upload = cloud.uploads.Upload(files, here, moved_at_s=0.0)
    here.mkdir()
    held = {0: (step, 3 * step), 2: (0, 4 * step)}  # of file a two pieces, of b none, of c two
    packed = b""
    for index, name in enumerate("abc"):
        data = bytearray(5 * step)
        for at in range(0, 5 * step, step):
            piece = bytes([65 + index * 5 + at // step]) * step
            packed += step.to_bytes(4, "little") + hashlib.sha256(piece).digest()
            if at in held.get(index, ()):
                data[at : at + step] = piece
        (here / name).write_bytes(data)
    upload.chunks = packed
    wanted = upload.take_up(dict)
    # In pieces: a lacks the first, third and fifth; b all of them; c the second to fourth. Five ranges are too many.
    assert wanted.missing == ((0, 0), (1, 0), (2, step))
    assert wanted.lengths == (5 * step, 5 * step, 3 * step)


def test_room_is_kept_for_what_comes_in_a_day_and_not_for_a_byte_a_minute(tmp_path: Path) -> None:
    now = [0.0]
    store = ModelStore(tmp_path / "models", budget_bytes=1_500_000, now_s=lambda: now[0])
    slow, other = Model(tmp_path, OLD), Model(tmp_path, NOISE[:900_000])
    store.offer(slow.digest, "slow", slow.files)
    enough, at = len(OLD) * RESERVED_S / 86_400, 0
    for _ in range(10):  # just enough
        now[0] += 59.0
        count = int(enough) + 1
        store.write(slow.digest, "slow", 0, at, OLD[at : at + count])
        at += count
        with pytest.raises(CompanionRefused, match="models_bytes"):
            other.offer(store, "honest")
    for _ in range(2):  # a byte a minute
        now[0] += 59.0
        store.write(slow.digest, "slow", 0, at, OLD[at : at + 1])
        at += 1
    assert other.offer(store, "honest") is not None
    assert other.bring(store, "honest") == 900_000
    assert other.offer(store, "user") is None
    with pytest.raises(CompanionRefused, match="models_bytes") as refused:
        store.write(slow.digest, "slow", 0, at, OLD[at : at + 1])
    assert refused.value.code == "BUDGET_EXCEEDED"


def test_a_disk_that_is_full_loses_nothing_and_the_upload_goes_on_when_there_is_room(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real = Model(tmp_path, OLD), Path.open
    wanted = model.offer(store)
    assert wanted is not None
    model.send(store, wanted, most=500_000)

    class Full:
        """A file on a disk that takes half of what is written, then nothing."""

        def __init__(self, path: Path, mode: str) -> None:
            self._file = real(path, mode)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def seek(self, at: int) -> None:
            self._file.seek(at)

        def write(self, data: memoryview) -> None:
            self._file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", lambda path, mode="r": Full(path, mode) if "+" in mode else real(path, mode))
    with pytest.raises(CompanionRefused, match="full at byte 500000") as refused:
        store.write(model.digest, "cam", 0, 500_000, OLD[500_000:600_000])
    assert refused.value.code == "DISK_FULL"
    monkeypatch.undo()
    store.release(model.digest, "cam")
    wanted = model.offer(store)
    assert wanted is not None
    assert sum(wanted.lengths) < 700_000
    model.send(store, wanted)
    assert store.finish(model.digest, "cam")
    assert store.path(model.digest).read_bytes() == OLD


def test_a_disk_that_is_full_when_all_is_there_lets_it_be_finished_later(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tmp_path, OLD)
    wanted = model.offer(store)
    assert wanted is not None
    model.send(store, wanted)

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        store.finish(model.digest, "cam")
    assert store.held() == ()
    monkeypatch.undo()
    assert model.offer(store) == Wanted()
    assert store.finish(model.digest, "cam")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a file system needs rights that this user does not have")
    yield place
    subprocess.run(["umount", place], check=True)


def test_on_a_small_disk_what_does_not_fit_is_refused_and_what_fills_up_meanwhile_waits(
    small_disk: Path, tmp_path: Path
) -> None:
    store = ModelStore(small_disk / "models", budget_bytes=BUDGET)
    large, model = Model(tmp_path, NOISE * 2), Model(tmp_path, OLD)
    with pytest.raises(CompanionRefused) as refused:
        large.offer(store)
    assert refused.value.code == "DISK_FULL"
    wanted = model.offer(store)
    assert wanted is not None
    model.send(store, wanted, most=400_000)
    filler = small_disk / "somebody-elses"
    filler.write_bytes(bytes(1_500_000))
    with pytest.raises(CompanionRefused) as refused:
        model.send(store, wanted)
    assert refused.value.code == "DISK_FULL"
    store.release(model.digest, "cam")
    filler.unlink()
    assert model.bring(store) < 700_000
