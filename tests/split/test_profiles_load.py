"""split/profiles/load.py: what is wrong in a file is named by file, line and path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from split.errors import ConfigError
from split.profiles.address import HostPort
from split.profiles.load import claim, load_yaml, require_writable

ROOT = Path(__file__).parents[2]


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: int = 3
    words: tuple[str, ...] = ()
    mood: Literal["calm", "loud"] = "calm"
    where: Path | None = None


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    maybe: Inner | None = None
    at: HostPort | None = None
    share: float = 0.5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.yaml"


def test_values_defaults_and_comments_are_read(file: Path) -> None:
    file.write_text(
        "# a comment\nname: x\ninner: {size: 4, words: [a, b]}\nmany:\n  - size: 1\n  - {}\nat: '[::1]:80'\n"
    )
    found = load_yaml(file, Outer)
    assert found == Outer(
        name="x", inner=Inner(size=4, words=("a", "b")), many=(Inner(size=1), Inner()), at=HostPort("[::1]:80")
    )
    assert found.at is not None
    assert (found.at.host, found.at.port) == ("::1", 80)


def test_paths_are_relative_to_the_files_folder(file: Path, tmp_path: Path) -> None:
    file.write_text("name: x\ninner: {where: sub/f.txt}\nmaybe: {where: /abs/f.txt}\n")
    found = load_yaml(file, Outer)
    assert found.inner.where == tmp_path / "sub" / "f.txt"
    assert found.maybe is not None
    assert found.maybe.where == Path("/abs/f.txt")


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("name: x\nsise: 4\n", 2, "sise: unknown key; known here are name, inner, many, maybe, at, share"),
        (
            "name: x\n\ninner:\n  # why\n  siez: 4\n",
            5,
            "inner.siez: unknown key; did you mean size? known here are size,",
        ),
        ("name: x\nmany:\n- size: 1\n- size: 2\n  sizes: 3\n", 5, "many[1].sizes: unknown key; did you mean size?"),
        ("name: x\nmaybe: {siz: 3}\n", 2, "maybe.siz: unknown key; did you mean size?"),
        ("inner: {size: 4}\n", 1, "the key name is required here and missing"),
        ("name: 5\n", 1, "name: expected text, got int"),
        ("name: x\ninner:\n  size: four\n", 3, "inner.size: expected int, got text"),
        ("name: x\ninner: 7\n", 2, "inner: expected a section, got int"),
        ("name: x\ninner:\n", 2, "inner: expected a section, got nothing"),
        ("name: x\ninner: {words: {a: b}}\n", 2, "inner.words: expected a list, got a section"),
        ("name: x\ninner: {words: [a, 3]}\n", 2, "inner.words[1]: expected text, got int"),
        ("name: x\ninner: {mood: wild}\n", 2, "inner.mood: expected one of calm, loud, got 'wild'"),
        ("name: x\ninner: {where: ''}\n", 2, "inner.where: expected the path of a file or folder"),
        ("name: x\nat: 8080\n", 2, "at: expected text, got int"),
        ("name: x\nat: nowhere\n", 2, "at: expected HOST:PORT, got 'nowhere'"),
        ("name: x\ninner:\n  size: 1\n  words: []\n  size: 2\n", 5, "inner.size: is given twice; keep one"),
        ("name: x\nname: y\n", 2, "name: is given twice"),
        ("name: x\ninner: &a {size: 1}\nmaybe: *a\n", 2, "maybe: aliases are not supported"),
        ("name: x\ninner: {size: 1\nat: b\n", 3, "is not YAML"),
        ("name: x\n\tinner: 3\n", 2, "is not YAML"),
        ("name: !!python/object:os.system x\n", 1, "is not YAML"),
        ("- a\n- b\n", 1, "expected keys and values, got a list"),
        ("just words\n", 1, "expected keys and values, got text"),
        ("? [a]\n: b\n", 1, "a key must be plain text"),
        (f"name: x\ninner: {{size: 1{'0' * 400}}}\n", 2, "inner.size: is a whole number of 1329 bits, at most 63"),
        (f"name: x\ninner: {{size: 0x{'f' * 6000}}}\n", 2, "inner.size: is a whole number of 24000 bits, at most 63"),
    ],
)
def test_a_mistake_is_named_by_file_line_and_path(file: Path, text: str, line: int, sentence: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{file}:{line}: ") + ".*" + re.escape(sentence)):
        load_yaml(file, Outer)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_lacks_what_is_required(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match="the key name is required"):
        load_yaml(file, Outer)


def test_two_documents_control_characters_and_bad_dates_are_no_yaml(file: Path) -> None:
    for content in (b"name: x\n---\nname: y\n", b"name: \x00\n", b"name: 2020-13-45\n", b"\xff\xfe\x00"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"some\.yaml.*is not YAML|expected keys"):
            load_yaml(file, Outer)


def test_a_missing_file_a_folder_and_a_huge_file_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"some\.yaml: cannot be read \(No such file"):
        load_yaml(file, Outer)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml(tmp_path, Outer)
    file.write_text("# " + "x" * (1 << 20))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        load_yaml(file, Outer)


@pytest.mark.parametrize("depth", [700, 20_000])
def test_deep_nesting_is_refused_and_does_not_crash(file: Path, depth: int) -> None:
    file.write_text("name: " + "[" * depth + "]" * depth)
    with pytest.raises(ConfigError, match="nest"):
        load_yaml(file, Outer)


def test_the_environment_overrides_single_values(file: Path, tmp_path: Path) -> None:
    file.write_text("name: x\ninner: {size: 1, words: [a]}\n")
    env = {
        "ISTHMUS__NAME": "y",
        "ISTHMUS__INNER__WORDS": "[b, c]",
        "ISTHMUS__MAYBE__SIZE": "9",
        "ISTHMUS__MAYBE__WHERE": "f",
        "ISTHMUS__SHARE": "1",
        "ISTHMUS_OTHER": "z",
        "PATH": "/bin",
    }
    assert load_yaml(file, Outer, env=env) == Outer(
        name="y", inner=Inner(size=1, words=("b", "c")), maybe=Inner(size=9, where=tmp_path / "f"), share=1.0
    )


def test_an_override_can_mend_what_the_file_lacks_or_has_wrong(file: Path) -> None:
    file.write_text("inner: {size: many}\n")
    found = load_yaml(file, Outer, env={"ISTHMUS__NAME": "x", "ISTHMUS__INNER__SIZE": "2"})
    assert found == Outer(name="x", inner=Inner(size=2))


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        (
            "ISTHMUS__INNER__SIZE",
            "four",
            "environment variable ISTHMUS__INNER__SIZE.*: inner.size: expected int, got text",
        ),
        ("ISTHMUS__INNER__SIZ", "4", "ISTHMUS__INNER__SIZ.*: inner.siz: unknown key; did you mean size"),
        ("ISTHMUS__NAME__SIZE", "4", "ISTHMUS__NAME__SIZE: name is text, no section"),
        ("ISTHMUS__INNER__", "4", "no empty part"),
        ("ISTHMUS__NAME", "[", "ISTHMUS__NAME.*is not YAML"),
        ("ISTHMUS__NAME", "", "name: expected text, got nothing"),
    ],
)
def test_a_mistake_in_the_environment_is_named_by_its_variable(
    file: Path, variable: str, value: str, sentence: str
) -> None:
    file.write_text("name: x\ninner: {size: 1}\n")
    with pytest.raises(ConfigError, match=sentence):
        load_yaml(file, Outer, env={variable: value})


@pytest.mark.parametrize(
    "text", ["", ":80", "host", "host:", "host:x", "host:-1", "host:65536", "::1:80", "[]:80", "h:٣"]
)
def test_a_bad_address_cannot_be_built(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        HostPort(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("a.b:1", "a.b", 1), ("[fe80::1]:65535", "fe80::1", 65535), ("127.0.0.1:0", "127.0.0.1", 0)],
)
def test_a_good_address_has_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert (HostPort(text).host, HostPort(text).port, str(HostPort(text))) == (host, port, text)


def test_a_folder_that_cannot_be_made_or_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_writable("state_dir", tmp_path / "made" / "here")
    assert (tmp_path / "made" / "here").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cache_dir: .*/file/below cannot be made \(Not a directory\)"):
        require_writable("cache_dir", tmp_path / "file" / "below")
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"state_dir: .* may not be written by user"):
        require_writable("state_dir", tmp_path)


def test_two_processes_do_not_share_a_folder_and_the_second_says_so(tmp_path: Path) -> None:
    state, cache = tmp_path / "state", tmp_path / "cache"
    state.mkdir()
    cache.mkdir()
    script = (
        "import sys; from pathlib import Path; from split.profiles.load import claim\n"
        "held = claim({'state_dir': Path(sys.argv[1])}); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=r"state_dir: .*state is in use by another isthmus process"):
            claim({"cache_dir": cache, "state_dir": state})
        other.kill()  # whatever ends it: the folder is free again, and nothing is left in it
        other.wait()
    for descriptor in claim({"cache_dir": cache, "state_dir": state}):
        os.close(descriptor)
    assert list(state.iterdir()) == []


def test_one_folder_under_two_keys_is_locked_once(tmp_path: Path) -> None:
    [descriptor] = claim({"state_dir": tmp_path, "cache_dir": tmp_path})
    os.close(descriptor)
