"""Models on the companion's disk: room, resumption, restarts, hashes."""

from __future__ import annotations

import hashlib
import json
import threading

import pytest

from cloud.store import ModelStore
from cloud.uploads import Wanted
from split.errors import CompanionRefused, InvalidRequest, UnknownModel

MAIN, DATA = b"the model file" * 10, b"its weights" * 20


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files(main: str = "net.onnx") -> tuple[tuple[str, int, str], ...]:
    return (main, len(MAIN), sha256(MAIN)), ("weights.bin", len(DATA), sha256(DATA))


DIGEST = "sha256:" + sha256(f"{sha256(MAIN)}\n{sha256(DATA)} weights.bin".encode())
"""As the device computes it: over the model file's hash and one line for each data file."""


@pytest.fixture
def store(tmp_path):
    return ModelStore(tmp_path / "models", budget_bytes=10_000)


def test_a_model_of_two_files_is_whole_when_both_are_checked(store):
    assert store.offer(DIGEST, "cam", files()).missing == ((0, 0), (1, 0))
    assert not store.write(DIGEST, "cam", 0, 0, MAIN)
    assert not store.finish(DIGEST, "cam")
    assert not store.write(DIGEST, "cam", 1, 0, DATA[:50])
    assert store.write(DIGEST, "cam", 1, 50, DATA[50:])
    with pytest.raises(UnknownModel):
        store.path(DIGEST)
    assert store.finish(DIGEST, "cam")
    assert store.held() == (DIGEST,)
    assert store.path(DIGEST).read_bytes() == MAIN
    assert (store.path(DIGEST).parent / "weights.bin").read_bytes() == DATA


def test_who_is_first_has_brought_it_for_all_whatever_they_call_the_file(store):
    for device, name in (("one", "net.onnx"), ("two", "model.onnx")):
        assert store.offer(DIGEST, device, files(name)).missing == ((0, 0), (1, 0))
        store.write(DIGEST, device, 0, 0, MAIN[:20])
    store.write(DIGEST, "two", 0, 20, MAIN[20:])
    assert store.write(DIGEST, "two", 1, 0, DATA)
    assert store.finish(DIGEST, "two")
    assert store.path(DIGEST).name == "model.onnx"
    assert store.write(DIGEST, "one", 0, 20, MAIN[20:])
    assert store.finish(DIGEST, "one")
    assert store.offer(DIGEST, "three", files("third.onnx")) is None
    assert store.used_bytes() < 2 * (len(MAIN) + len(DATA))


def test_what_a_broken_device_sends_does_not_touch_what_another_sends(store):
    store.offer(DIGEST, "broken", files())
    store.write(DIGEST, "broken", 0, 0, bytes(50))
    assert store.offer(DIGEST, "good", files()).missing == ((0, 0), (1, 0))
    store.write(DIGEST, "good", 0, 0, MAIN)
    store.write(DIGEST, "good", 1, 0, DATA)
    assert store.finish(DIGEST, "good")
    assert store.path(DIGEST).read_bytes() == MAIN


def test_an_offer_with_another_name_or_size_starts_that_file_afresh(store):
    store.offer(DIGEST, "cam", files("net.onnx"))
    store.write(DIGEST, "cam", 0, 0, MAIN[:20])
    store.write(DIGEST, "cam", 1, 0, DATA[:30])
    assert store.offer(DIGEST, "cam", files("other.onnx")).missing == ((0, 0), (1, 30))
    store.write(DIGEST, "cam", 0, 0, MAIN)
    store.write(DIGEST, "cam", 1, 30, DATA[30:])
    assert store.finish(DIGEST, "cam")
    assert {path.name for path in store.path(DIGEST).parent.iterdir()} == {"other.onnx", "weights.bin"}


def test_what_was_begun_survives_a_restart_and_is_checked_then(store, tmp_path):
    store.offer(DIGEST, "cam", files())
    store.write(DIGEST, "cam", 0, 0, MAIN)
    store.write(DIGEST, "cam", 1, 0, DATA)  # all is there, and the process dies before it is checked
    again = ModelStore(tmp_path / "models", budget_bytes=10_000)
    assert again.held() == ()
    assert again.offer(DIGEST, "cam", files()) == Wanted()
    assert again.finish(DIGEST, "cam")
    assert again.held() == (DIGEST,)


def test_an_old_session_that_ends_does_not_disturb_the_new_one_of_the_same_device(store):
    store.offer(DIGEST, "cam", files())
    store.write(DIGEST, "cam", 0, 0, MAIN)
    assert store.offer(DIGEST, "cam", files()).missing == ((1, 0),)
    store.release(DIGEST, "cam")
    assert store.write(DIGEST, "cam", 1, 0, DATA)
    assert store.finish(DIGEST, "cam")


def test_damage_on_the_way_is_found_in_whichever_file_it_is(store):
    for index, good, bad in ((0, DATA, b"X" + MAIN[1:]), (1, MAIN, b"X" + DATA[1:])):
        store.offer(DIGEST, "cam", files())
        store.write(DIGEST, "cam", 1 - index, 0, good)
        store.write(DIGEST, "cam", index, 0, bad)
        with pytest.raises(CompanionRefused, match="offer the model again") as refused:
            store.finish(DIGEST, "cam")
        assert refused.value.code == "DIGEST_MISMATCH"
        assert store.used_bytes() == 0
        store.release(DIGEST, "cam")


def test_sizes_that_do_not_fit_what_is_held_are_refused(store):
    store.offer(DIGEST, "cam", files())
    store.write(DIGEST, "cam", 0, 0, MAIN)
    store.write(DIGEST, "cam", 1, 0, DATA)
    store.finish(DIGEST, "cam")
    lying = (("net.onnx", 5, sha256(MAIN)), files()[1])
    with pytest.raises(CompanionRefused) as refused:
        store.offer(DIGEST, "liar", lying)
    assert refused.value.code == "DIGEST_MISMATCH"


def offer_alone(size: int) -> tuple[str, str, tuple[tuple[str, int, str], ...]]:
    sha = sha256(str(size).encode())
    return f"sha256:{sha}", "cam", (("model.onnx", size, sha),)


def test_room_for_what_does_not_come_is_kept_for_a_minute_only(tmp_path):
    now = [0.0]
    store = ModelStore(tmp_path / "models", budget_bytes=10_000, now_s=lambda: now[0])
    (mine, _, claimed), (theirs, _, wanted) = offer_alone(9_000), offer_alone(4_000)
    store.offer(mine, "greedy", claimed)
    now[0] = 59.0
    with pytest.raises(CompanionRefused, match="models_bytes"):
        store.offer(theirs, "honest", wanted)
    store.release(mine, "greedy")
    store.offer(mine, "greedy", claimed)  # offered anew, and again nothing comes
    now[0] = 61.0
    store.offer(theirs, "honest", wanted)
    store.write(theirs, "honest", 0, 0, bytes(100))
    with pytest.raises(CompanionRefused, match="models_bytes") as refused:
        store.write(mine, "greedy", 0, 0, bytes(100))
    assert refused.value.code == "BUDGET_EXCEEDED"
    assert store.used_bytes() == 100


def test_an_upload_that_rested_goes_on_where_room_is_left_and_is_kept_room_for_again(tmp_path):
    now = [0.0]
    store = ModelStore(tmp_path / "models", budget_bytes=10_000, now_s=lambda: now[0])
    (mine, _, claimed), (theirs, _, wanted) = offer_alone(6_000), offer_alone(5_000)
    store.offer(mine, "slow", claimed)
    store.write(mine, "slow", 0, 0, bytes(1_000))
    now[0] = 3600.0
    store.write(mine, "slow", 0, 1_000, bytes(1_000))
    now[0] = 3659.0
    with pytest.raises(CompanionRefused, match="models_bytes"):
        store.offer(theirs, "other", wanted)


def test_room_is_reserved_with_the_offer_and_given_back_with_the_release(store):
    first, second = offer_alone(6_000), offer_alone(4_001)
    store.offer(*first)
    with pytest.raises(CompanionRefused, match="models_bytes") as refused:
        store.offer(*second)
    assert refused.value.code == "BUDGET_EXCEEDED"
    store.offer(*offer_alone(4_000 - 1_000))
    store.release(first[0], "cam")
    store.offer(*second)


def test_the_model_unused_for_longest_makes_room_first(store, tmp_path):
    import os

    models = [offer_alone(3_000 + number) for number in range(3)]
    for age, (digest, _, offered) in enumerate(models):
        store.offer(digest, "cam", offered)
        store.write(digest, "cam", 0, 0, bytes(2_000))
        store.release(digest, "cam")
        folder = tmp_path / "models" / digest.removeprefix("sha256:")
        os.utime(folder, (1_000_000 + age, 1_000_000 + age))
    digest, device, offered = offer_alone(5_500)
    store.offer(digest, device, offered)

    def left() -> set[str]:
        return {f"sha256:{folder.name}" for folder in (tmp_path / "models").iterdir()}

    assert left() == {*(model[0] for model in models), digest}  # an offer alone drives out nothing
    store.write(digest, device, 0, 0, b"1")
    assert left() == {models[1][0], models[2][0], digest}


@pytest.mark.parametrize(
    "broken",
    [
        (),
        (("a", -1, "0" * 64),),
        (("a", 1, "xyz"),),
        (("a", 1, "0" * 64), ("a", 1, "0" * 64)),
        (("a", 1, "0" * 64),) * 300,
    ],
)
def test_an_offer_that_cannot_be_is_refused(store, broken):
    with pytest.raises(InvalidRequest):
        store.offer(DIGEST, "cam", broken)


def bring(store: ModelStore) -> None:
    store.offer(DIGEST, "cam", files())
    store.write(DIGEST, "cam", 0, 0, MAIN)
    store.write(DIGEST, "cam", 1, 0, DATA)
    assert store.finish(DIGEST, "cam")


def test_a_session_that_ends_does_not_wait_for_a_model_that_is_being_hashed(store, tmp_path, monkeypatch):
    bring(store)
    again = ModelStore(tmp_path / "models", budget_bytes=10_000)
    other = offer_alone(10)
    again.offer(*other)
    hashing, go = threading.Event(), threading.Event()
    monkeypatch.setattr("cloud.store.file_is", lambda *_: hashing.set() or go.wait(30))
    offering = threading.Thread(target=again.offer, args=(DIGEST, "cam", files()))
    offering.start()
    assert hashing.wait(30)
    releasing = threading.Thread(target=again.release, args=(other[0], "cam"))  # else on the event loop
    releasing.start()
    releasing.join(30)
    blocked = releasing.is_alive()
    go.set()
    offering.join(30)
    releasing.join(30)
    assert not blocked


def test_what_just_came_whole_is_not_hashed_again(store, monkeypatch):
    bring(store)
    monkeypatch.setattr("cloud.store.file_is", lambda *_: pytest.fail("hashed again"))
    assert store.offer(DIGEST, "other", files()) is None


SECRET = json.dumps([["../../secret", 6, sha256(b"secret")]])


@pytest.mark.parametrize("manifest", ["[]", SECRET, "{", "null"])
def test_a_manifest_of_another_model_is_damage_and_its_names_are_not_looked_at(store, tmp_path, manifest):
    bring(store)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "models" / DIGEST.removeprefix("sha256:") / "manifest.json").write_text(manifest)
    with pytest.raises(UnknownModel):
        store.path(DIGEST)
    again = ModelStore(tmp_path / "models", budget_bytes=10_000)
    assert again.offer(DIGEST, "cam", files()).missing == ((0, 0), (1, 0))


def test_of_models_that_began_to_come_and_nobody_uses_a_bounded_number_stays(store, tmp_path, monkeypatch):
    """An offer makes a folder, and each later offer looks at all of them."""
    monkeypatch.setattr("cloud.store.PARTIAL_KEPT", 2)
    for number in range(8):
        main = f"model {number}".encode()
        offered = (("net.onnx", len(main), sha256(main)),)
        store.offer(f"sha256:{sha256(main)}", "cam", offered)
        store.release(f"sha256:{sha256(main)}", "cam")
    assert store.offer(DIGEST, "cam", files()).missing == ((0, 0), (1, 0))
    assert len(list((tmp_path / "models").iterdir())) == 3
    store.write(DIGEST, "cam", 0, 0, MAIN)
    store.write(DIGEST, "cam", 1, 0, DATA)
    assert store.finish(DIGEST, "cam")
