"""agent/config.py: what is required, what is default, and how a mistake is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent import daemon
from agent.config import AgentConfig, Link, load_config
from split.errors import ConfigError

LEAST = "models: models\nstate_dir: /var/lib/x\ncache_dir: cache\n"
IDENTITY = "identity: {cert: a.crt, key: a.key, ca: ca.crt}\n"


def config_of(tmp_path: Path, text: str, **env: str) -> AgentConfig:
    path = tmp_path / "agent.yaml"
    path.write_text(text)
    return load_config(path, env)


def test_three_keys_are_enough(tmp_path: Path) -> None:
    config = config_of(tmp_path, LEAST)
    assert config.models == tmp_path / "models"
    assert config.state_dir == Path("/var/lib/x")
    assert config.cache_dir == tmp_path / "cache"
    assert (config.companions, config.identity, config.mqtt) == ((), None, None)
    assert config.listen.http is not None
    assert (config.listen.http.host, config.listen.http.port) == ("127.0.0.1", 8080)
    assert config.emulation.slowdown == 1.0


@pytest.mark.parametrize("key", ["models", "state_dir", "cache_dir"])
def test_each_of_the_three_is_required(tmp_path: Path, key: str) -> None:
    text = "".join(line for line in LEAST.splitlines(keepends=True) if not line.startswith(key))
    with pytest.raises(ConfigError, match=rf"agent\.yaml:1: the key {key} is required here and missing"):
        config_of(tmp_path, text)


def test_companions_need_an_identity_and_its_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"identity .* is required where companions are set"):
        config_of(tmp_path, LEAST + "companions: [cloud.example:7443]\n")
    config = config_of(tmp_path, LEAST + IDENTITY + "companions: ['cloud.example:7443', '[::1]:7443']\n")
    assert [(c.host, c.port) for c in config.companions] == [("cloud.example", 7443), ("::1", 7443)]
    assert config.identity is not None
    assert config.identity.key == tmp_path / "a.key"


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("listn: {}\n", 4, "listn: unknown key; did you mean listen?"),
        ("listen:\n  htpp: 127.0.0.1:1\n", 5, "listen.htpp: unknown key; did you mean http?"),
        ("listen:\n  http: 8080\n", 5, "listen.http: expected text, got int"),
        ("listen: {http: localhost}\n", 4, "listen.http: expected HOST:PORT, got 'localhost'"),
        ("listen: {http: 'a..b:1'}\n", 4, "listen.http: expected the name or address of a host before the port"),
        ('listen: {unix: "a\\0b"}\n', 4, "listen.unix: expected the path of a file or folder, got one with"),
        ("listen: {http: 'x:99999'}\n", 4, "listen.http: expected a port from 0 to 65535, got '99999'"),
        ("listen: {http: null}\n", 4, "listen: at least one of http and unix must be set"),
        ("listen: {grpc: 127.0.0.1:9}\n", 4, "listen: grpc is not in this version"),
        (IDENTITY + "companions:\n- a:1\n- b\n", 7, "companions[1]: expected HOST:PORT, got 'b'"),
        (IDENTITY + "companions: ['a:0']\n", 1, "companion a:0 has port 0"),
        ("identity: {cert: a, key: b}\n", 4, "identity: the key ca is required here and missing"),
        ("limits:\n  inflight_bytes: 256MB\n", 5, "limits.inflight_bytes: expected int, got text"),
        ("limits: {inflight_bytes: 0}\n", 4, "limits.inflight_bytes: expected int >= 1, got 0"),
        ("limits: {default_deadline_ms: 0}\n", 4, "limits.default_deadline_ms: expected float > 0.0, got 0"),
        ("limits: {default_deadline_ms: .nan}\n", 4, "limits.default_deadline_ms: expected float"),
        ("emulation: {slowdown: 0.5}\n", 4, "emulation.slowdown: expected float >= 1.0, got 0.5"),
        ("emulation: {slowdown: .inf}\n", 4, "emulation.slowdown: expected float <= 1000.0, got inf"),
        ("power: {battery_ratio_min: 20}\n", 4, "power.battery_ratio_min: expected float <= 1.0, got 20"),
        ("device: raspberry-pi-17\n", 1, "there is no device profile 'raspberry-pi-17'; there are ascend-310"),
        ("link: {price_per_gb: -1}\n", 4, "link.price_per_gb: expected float >= 0.0, got -1"),
        ("mqtt: {host: broker}\n", 1, "mqtt is not in this version"),
        ("workbench: {timeout_s: 0}\n", 4, "workbench.timeout_s: expected float >= 1.0, got 0"),
        ("workbench: {memory_bytes: 1000}\n", 4, "workbench.memory_bytes: expected int >= 268435456, got 1000"),
        ("models: other\n", 4, "models: is given twice"),
    ],
)
def test_a_mistake_is_named_by_file_line_and_path(tmp_path: Path, text: str, line: int, sentence: str) -> None:
    where = re.escape(f"{tmp_path / 'agent.yaml'}:{line}: ")
    with pytest.raises(ConfigError, match=where + ".*" + re.escape(sentence)):
        config_of(tmp_path, LEAST + text)


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        LEAST + "limits: {default_deadline_ms: 100}\n",
        ISTHMUS__LIMITS__DEFAULT_DEADLINE_MS="250",
        ISTHMUS__LISTEN__UNIX="run/x.sock",
        ISTHMUS__EMULATION__SLOWDOWN="4",
    )
    assert config.limits.default_deadline_ms == 250
    assert config.listen.unix == tmp_path / "run" / "x.sock"
    assert config.emulation.slowdown == 4
    with pytest.raises(ConfigError, match="environment variable ISTHMUS__LIMIT__X: limit: unknown key"):
        config_of(tmp_path, LEAST, ISTHMUS__LIMIT__X="1")


def test_prices_reach_the_planner_by_byte_and_by_millisecond() -> None:
    prices = daemon._prices(Link(price_per_gb=4.0, price_per_companion_s=0.5))
    assert prices.per_byte == pytest.approx(4e-9)
    assert prices.per_companion_ms == pytest.approx(5e-4)
