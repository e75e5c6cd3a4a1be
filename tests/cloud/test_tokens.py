"""One-time tokens: used once, whoever races, until they expire; kept hashed; over restarts."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloud import tokens
from cloud.tokens import REMEMBERED_S, TokenStore
from split.errors import IdentityError, TokenRefused
from split.identity.tokens import JoinToken, pin_of, read_token

PIN = bytes(range(32))


def made(store: TokenStore, *, name: str = "", ttl_s: float = 60.0, now_s: float = 1000.0) -> JoinToken:
    return store.make(name=name, pin=PIN, ttl_s=ttl_s, now_s=now_s)


def refusal(store: TokenStore, secret: bytes, now_s: float) -> str:
    with pytest.raises(TokenRefused) as caught:
        store.use(secret, now_s=now_s)
    return caught.value.code


def test_a_token_gives_its_name_once_and_after_that_says_used(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    token = made(store, name="cam-1")
    assert store.live(1000.0) == 1
    assert store.use(token.secret, now_s=1001.0) == "cam-1"
    assert store.live(1001.0) == 0
    assert refusal(store, token.secret, 1002.0) == "TOKEN_USED"
    assert refusal(TokenStore(tmp_path), token.secret, 1002.0) == "TOKEN_USED", "after a restart, too"


def test_a_token_given_back_is_good_once_more(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    token = made(store, name="cam-1")
    store.use(token.secret, now_s=1001.0)
    assert store.live(1001.0) == 0
    store.give_back(token.secret)
    assert store.live(1002.0) == 1
    assert store.use(token.secret, now_s=1002.0) == "cam-1"
    assert refusal(store, token.secret, 1003.0) == "TOKEN_USED"


def test_what_was_never_used_cannot_be_given_back(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    made(store)
    with pytest.raises(IdentityError, match="cannot be given back"):
        store.give_back(bytes(20))
    assert store.live(1000.0) == 1


def test_an_expired_token_and_one_that_was_never_made_are_told_apart(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    token = made(store)
    assert store.live(1059.9) == 1
    assert store.live(1060.0) == 0
    assert refusal(store, token.secret, 1060.0) == "TOKEN_EXPIRED"
    assert refusal(store, bytes(20), 1001.0) == "TOKEN_UNKNOWN"


def test_a_store_sees_what_another_process_makes_and_uses(tmp_path: Path) -> None:
    serving, command = TokenStore(tmp_path), TokenStore(tmp_path)
    assert serving.live(1000.0) == 0
    first = made(command)
    assert serving.live(1000.0) == 1
    made(command)
    assert serving.live(1000.0) == 2
    command.use(first.secret, now_s=1001.0)
    assert serving.live(1001.0) == 1


def test_of_two_that_race_one_wins(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    for _ in range(50):
        token = made(store, name="cam-1")

        def use(_: int, secret: bytes = token.secret) -> str:
            try:
                return TokenStore(tmp_path).use(secret, now_s=1001.0)
            except TokenRefused as error:
                return error.code

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(use, range(2))) == ["TOKEN_USED", "cam-1"]


def test_of_four_processes_that_race_one_wins(tmp_path: Path) -> None:
    token = made(TokenStore(tmp_path))
    script = (
        "import sys; from pathlib import Path; from cloud.tokens import TokenStore\n"
        "sys.stdin.readline()\n"
        "try: TokenStore(Path(sys.argv[1])).use(bytes.fromhex(sys.argv[2]), now_s=1001.0); print('won')\n"
        "except Exception as error: print(error.code)\n"
    )
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), token.secret.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in racing:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = sorted(process.communicate(timeout=60)[0].strip() for process in racing)
    assert said == ["TOKEN_USED"] * 3 + ["won"]


def test_the_folder_does_not_hold_the_secret(tmp_path: Path) -> None:
    token = made(TokenStore(tmp_path), name="cam-1")
    for path in tmp_path.rglob("*"):
        assert token.secret.hex() not in str(path)
        if path.is_file():
            assert token.secret not in path.read_bytes()
            assert path.stat().st_mode & 0o077 == 0


def test_what_is_long_gone_is_forgotten_and_the_number_alive_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MAX_LIVE", 3)
    store = TokenStore(tmp_path)
    old = [made(store) for _ in range(3)]
    store.use(old[0].secret, now_s=1001.0)
    made(store)
    with pytest.raises(IdentityError, match="3 tokens are alive, the bound"):
        made(store)
    later_s = 1060.0 + REMEMBERED_S + 1
    made(store, now_s=later_s)
    assert refusal(store, old[0].secret, later_s) == "TOKEN_UNKNOWN"
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="a name has 1 to 64 characters"):
        made(TokenStore(tmp_path), name="../x")


def test_a_damaged_file_in_the_folder_is_no_token(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    made(store)
    (tmp_path / "live" / "junk").write_text("{")
    assert store.live(1000.0) == 1


# ---- as text


def test_a_token_as_text_comes_back_the_same_whatever_white_space_is_around_it() -> None:
    token = JoinToken(secret=bytes(range(20)), pin=PIN, expires_at_s=1_800_000_000)
    assert read_token(f"  {token.text()}\n") == token
    assert len(token.text()) == len("isthmus-join-1.") + 84
    assert "secret" not in repr(token)


@pytest.mark.parametrize("position", range(15, 99, 7))
def test_a_mistyped_or_cut_off_token_is_damaged_and_not_repeated(position: int) -> None:
    text = JoinToken(secret=bytes(range(20)), pin=PIN, expires_at_s=1_800_000_000).text()
    other = "A" if text[position] != "A" else "B"
    for wrong in (text[:position] + other + text[position + 1 :], text[:position], text + "A", text[:-1] + "é"):
        with pytest.raises(IdentityError, match="the token is damaged") as caught:
            read_token(wrong)
        assert wrong not in str(caught.value)


@pytest.mark.parametrize("text", ["", "hello", "isthmus-join-2." + "A" * 84])
def test_what_is_no_token_at_all_is_said_to_be_none(text: str) -> None:
    with pytest.raises(IdentityError, match="a token begins with"):
        read_token(text)


def test_the_pin_of_what_is_no_certificate_is_refused() -> None:
    with pytest.raises(IdentityError, match="certificate in PEM was expected"):
        pin_of("nothing")
