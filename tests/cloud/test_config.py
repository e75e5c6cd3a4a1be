"""cloud/config.py: what is required, what is default, and how a mistake is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cloud.config import CompanionConfig, load_config
from split.errors import ConfigError

LEAST = "state_dir: state\ncache_dir: cache\nidentity: {cert: a.crt, key: a.key, ca: ca.crt}\n"


def config_of(tmp_path: Path, text: str, **env: str) -> CompanionConfig:
    path = tmp_path / "companion.yaml"
    path.write_text(text)
    return load_config(path, env)


def test_state_cache_and_identity_are_enough(tmp_path: Path) -> None:
    config = config_of(tmp_path, LEAST)
    assert (config.listen.host, config.listen.port) == ("0.0.0.0", 7443)
    assert config.http is not None
    assert config.http.host == "127.0.0.1"
    assert config.threads == "auto"
    assert config.identity.ca == tmp_path / "ca.crt"


@pytest.mark.parametrize("key", ["state_dir", "cache_dir", "identity"])
def test_each_of_the_three_is_required(tmp_path: Path, key: str) -> None:
    text = "".join(line for line in LEAST.splitlines(keepends=True) if not line.startswith(key))
    with pytest.raises(ConfigError, match=rf"companion\.yaml:1: the key {key} is required here and missing"):
        config_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("weights: x\n", 4, "weights: unknown key; known here are state_dir, cache_dir, identity, listen"),
        ("listen: {http: 'a:1'}\n", 4, "listen: expected text, got a section"),
        ("listen: 7443\n", 4, "listen: expected text, got int"),
        ("listen: null\n", 4, "listen: expected text, got nothing"),
        ("limits:\n  conections: 3\n", 5, "limits.conections: unknown key; did you mean connections?"),
        ("limits: {connections: 0}\n", 4, "limits.connections: expected int >= 1, got 0"),
        ("budget_bytes: 4GiB\n", 4, "budget_bytes: expected int, got text"),
        ("threads: all\n", 4, "threads: expected one of a whole number, auto, got 'all'"),
    ],
)
def test_a_mistake_is_named_by_file_line_and_path(tmp_path: Path, text: str, line: int, sentence: str) -> None:
    where = re.escape(f"{tmp_path / 'companion.yaml'}:{line}: ")
    with pytest.raises(ConfigError, match=where + ".*" + re.escape(sentence)):
        config_of(tmp_path, LEAST + text)


def test_http_and_enrolment_can_be_switched_off(tmp_path: Path) -> None:
    config = config_of(tmp_path, LEAST + "http: null\nenroll_listen: null\nthreads: 2\n")
    assert (config.http, config.enroll_listen, config.threads) == (None, None, 2)


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    config = config_of(tmp_path, LEAST, ISTHMUS__LISTEN="127.0.0.1:0", ISTHMUS__LIMITS__CONNECTIONS="7")
    assert (config.listen.host, config.listen.port, config.limits.connections) == ("127.0.0.1", 0, 7)
