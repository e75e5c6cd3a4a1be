"""The program `isthmus-cloud` as processes: its authority, its refusals, and a device served from start to SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from split.codec.payload import decode, encode
from split.errors import ConnectionLost, IdentityError
from split.identity.certificates import Identity
from split.tensor import relative_difference
from split.transport.tls import dial
from split.wire.messages import Goodbye, Hello, Infer, ModelChunk, ModelReady, Reply, SegmentOpen, SegmentReady


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cloud.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | (env or {}), check=False
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "companion.yaml"
    path.write_text(
        """
        state_dir: state
        cache_dir: cache
        identity: {cert: id/cert.pem, key: id/key.pem, ca: id/ca.pem}
        listen: 127.0.0.1:0
        http: 127.0.0.1:0
        """
    )
    return path


def test_init_and_issue_make_certificates_that_the_authority_signed(config: Path, tmp_path: Path) -> None:
    made = run("init", "--config", config)
    assert made.returncode == 0, made.stderr
    assert "isthmus-cloud issue" in made.stdout
    assert "PRIVATE KEY" not in made.stdout + made.stderr
    issued = run("issue", "camera-1", "-o", tmp_path / "camera-1", "--config", config)
    assert issued.returncode == 0, issued.stderr
    for folder in (tmp_path / "id", tmp_path / "camera-1"):
        assert {path.name for path in folder.iterdir()} == {"cert.pem", "key.pem", "ca.pem"}
        assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")  # the key is the certificate's
        proof = ["openssl", "verify", "-CAfile", tmp_path / "id" / "ca.pem", folder / "cert.pem"]
        with contextlib.suppress(FileNotFoundError):  # where there is no openssl program, TLS below proves it
            assert subprocess.run(proof, capture_output=True, check=False).returncode == 0
    assert stat.S_IMODE((tmp_path / "state" / "authority" / "ca-key.pem").stat().st_mode) == 0o600


def test_nothing_that_exists_is_overwritten(config: Path, tmp_path: Path) -> None:
    key = tmp_path / "id" / "key.pem"
    key.parent.mkdir()
    key.write_text("mine")
    refused = run("init", "--config", config)
    assert refused.returncode == 1
    assert str(key) in refused.stderr
    assert key.read_text() == "mine"
    assert not (tmp_path / "state" / "authority").exists()
    key.unlink()
    assert run("init", "--config", config).returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pem")}
    again = run("init", "--config", config)
    assert again.returncode == 1
    assert again.stderr.startswith("isthmus-cloud: ")
    assert again.stderr.count("\n") == 1
    assert run("issue", "camera-1", "-o", tmp_path / "id", "--config", config).returncode == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pem")} == before


def test_issue_needs_an_authority_and_a_name(config: Path, tmp_path: Path) -> None:
    missing = run("issue", "camera-1", "-o", tmp_path / "camera-1", "--config", config)
    assert missing.returncode == 1
    assert "isthmus-cloud init" in missing.stderr
    run("init", "--config", config)
    assert run("issue", "No Name!", "-o", tmp_path / "camera-1", "--config", config).returncode == 1
    assert not (tmp_path / "camera-1").exists()


def test_a_token_needs_an_authority_and_a_place_to_enrol_at(config: Path) -> None:
    missing = run("token", "--config", config)
    assert missing.returncode == 1
    assert "isthmus-cloud init" in missing.stderr
    run("init", "--config", config)
    never = run("token", "--config", config, env={"ISTHMUS__ENROLL_LISTEN": "null"})
    assert never.returncode == 1
    assert "enroll_listen is null" in never.stderr
    made = run("token", "--config", config, "--name", "cam-1", "--ttl", "90s")
    assert made.returncode == 0
    (token,) = made.stdout.splitlines()
    assert token.startswith("isthmus-join-1.")
    assert token not in made.stderr


def test_a_token_lives_by_the_time_that_is_known_where_that_is_later_than_this_hosts_clock(
    config: Path, tmp_path: Path
) -> None:
    run("init", "--config", config)
    (tmp_path / "state" / "known-time").write_text("4000000000\n")  # 2096-10-02T07:06:40Z
    made = run("token", "--config", config, "--ttl", "1h", "--json")
    assert json.loads(made.stdout)["expires"].startswith("2096-10-02T08:06:4")


def test_revoking_somebody_unknown_fails_with_a_sentence(config: Path, tmp_path: Path) -> None:
    run("init", "--config", config)
    failed = run("revoke", "cam-1", "--config", config)
    assert failed.returncode == 1
    assert "no certificate of a device 'cam-1' is on record" in failed.stderr
    run("issue", "cam-1", "-o", tmp_path / "cam-1", "--config", config)
    assert re.fullmatch(r"revoked: [0-9a-f]{20,40}\n", run("revoke", "cam-1", "--config", config).stdout)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("state_dir: [", "companion.yaml"),
        ("listne: 1.2.3.4:5", "listne"),
        ("listen: nowhere", "listen"),
        ("", "state_dir"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "init"])
def test_a_bad_configuration_exits_78_with_one_sentence(tmp_path: Path, text: str, word: str, command: str) -> None:
    path = tmp_path / "companion.yaml"
    path.write_text(text)
    failed = run(command, "--config", path)
    assert failed.returncode == 78
    assert word in failed.stderr
    assert "Traceback" not in failed.stderr
    assert failed.stdout == ""


def test_a_missing_configuration_exits_78_and_wrong_usage_2(tmp_path: Path) -> None:
    assert run("serve", "--config", tmp_path / "none.yaml").returncode == 78
    assert run("serve").returncode == 2
    assert run("token", "--config", tmp_path / "none.yaml").returncode == 78
    for ttl in ("1y", "0s", "-1h", "31d", "nanh", ""):
        assert run("token", "--ttl", ttl, "--config", tmp_path / "none.yaml").returncode == 2
    assert run().returncode == 2


def refused(config: Path, env: dict[str, str] | None = None) -> str:
    """The one sentence with which `serve` refuses to start."""
    failed = run("serve", "--config", config, env=env)
    assert failed.returncode == 78, failed.stderr
    (sentence,) = [line for line in failed.stderr.splitlines() if line.startswith("isthmus-cloud: ")]
    assert "Traceback" not in failed.stderr
    assert failed.stdout == ""
    return sentence


def test_an_address_that_is_taken_or_is_none_exits_78_naming_its_key(config: Path) -> None:
    run("init", "--config", config)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        for key, place in (("LISTEN", address), ("HTTP", address), ("LISTEN", "192.0.2.1:7"), ("HTTP", "192.0.2.1:7")):
            said = refused(config, {f"ISTHMUS__{key}": place})
            assert f"{key.lower()}: " in said
            assert place in said


@pytest.mark.parametrize("part", ["cert", "key", "ca"])
def test_identity_files_that_are_missing_or_garbage_exit_78_naming_key_file_and_command(
    config: Path, tmp_path: Path, part: str
) -> None:
    run("init", "--config", config)
    file = tmp_path / "id" / f"{part}.pem"
    file.write_text("nothing of the kind")
    for what in ("garbage", "missing"):
        said = refused(config)
        assert f"identity.{part}" in said, what
        assert str(file) in said
        assert "isthmus-cloud init" in said
        file.unlink(missing_ok=True)


def test_a_pair_that_does_not_match_and_a_device_certificate_exit_78(config: Path, tmp_path: Path) -> None:
    run("init", "--config", config)
    run("issue", "camera-1", "-o", tmp_path / "camera-1", "--config", config)
    device = {
        f"ISTHMUS__IDENTITY__{part.upper()}": str(tmp_path / "camera-1" / f"{part}.pem") for part in ("cert", "key")
    }
    assert "identity.key" in refused(config, {"ISTHMUS__IDENTITY__KEY": device["ISTHMUS__IDENTITY__KEY"]})
    assert "identity.cert" in (said := refused(config, device))
    assert "companion" in said


def test_an_authority_that_did_not_issue_the_certificate_exits_78(config: Path, tmp_path: Path) -> None:
    run("init", "--config", config)
    other = tmp_path / "other.yaml"
    other.write_text(config.read_text().replace("state_dir: state", "state_dir: other").replace("id/", "other-id/"))
    run("init", "--config", other)
    said = refused(config, {"ISTHMUS__IDENTITY__CA": str(tmp_path / "other-id" / "ca.pem")})
    assert f"identity.ca: {tmp_path / 'other-id' / 'ca.pem'} did not issue" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_exits_78(config: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o500)
    assert f"state_dir: {tmp_path / 'state'}" in refused(config)


def test_a_file_in_the_place_of_a_folder_exits_78(config: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert f"cache_dir: {tmp_path / 'cache'}" in refused(config)


async def test_the_service_manager_hears_ready_once_it_listens_and_stopping_at_sigterm(
    config: Path, tmp_path: Path
) -> None:
    run("init", "--config", config)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cloud.cli", "serve", "--config", str(config)),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"},
        )
        try:
            heard: list[str] = []

            def hear_until(word: str) -> None:
                while word not in heard:
                    heard.extend(manager.recv(200).decode().splitlines())

            await asyncio.to_thread(hear_until, "READY=1")
            assert process.stderr is not None
            port, _ = await ports(process.stderr)  # at READY the line is written: nothing is waited for
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
            heard.clear()
            await asyncio.to_thread(hear_until, "WATCHDOG=1")
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(hear_until, "STOPPING=1")
            await process.communicate()
            assert process.returncode == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


async def test_a_device_is_served_from_its_certificate_to_the_goodbye(
    config: Path, tmp_path: Path, chain, feeds
) -> None:
    run("init", "--config", config)
    run("issue", "camera-1", "-o", tmp_path / "camera-1", "--config", config)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cloud.cli", "serve", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(90):
            port, http = await ports(process.stderr)
            drain = asyncio.create_task(process.stderr.read())
            assert await get(http, "/v2/health/live") == (200, "")
            assert (await get(http, "/v2/health/ready"))[0] == 200
            await serve_one_device(port, tmp_path / "camera-1", chain, feeds, process, http)
            assert await process.wait() == 0
            log = (await drain).decode()
            assert "device=camera-1" in log
            assert "Traceback" not in log
            assert "PRIVATE KEY" not in log
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def serve_one_device(port, folder, chain, feeds, process, http) -> None:
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", random.Random(1).randbytes(1000), b"\x16\x03\x01"):
        _, rude = await asyncio.open_connection("127.0.0.1", port)
        rude.write(garbage)
        rude.transport.abort()
    identity = Identity(cert=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem")
    greeting = Hello(major=1, minor=0, agent="test", runtime="test", max_message_bytes=1 << 26, codecs=("raw",))
    channel = await dial("127.0.0.1", port, identity=identity, hello=greeting, timeout_s=10)
    assert (channel.peer.role, channel.peer.name) == ("companion", "companion")
    channel.send(chain.offer)
    await channel.receive()
    channel.send(ModelChunk(digest=chain.digest, file="model.onnx", offset=0, last=True), [chain.path.read_bytes()])
    ready = (await channel.receive()).message
    assert isinstance(ready, ModelReady), ready
    cut = chain.card.cuts[0]
    for wanted in (cut, chain.every_cut()[-1]):  # a candidate, and one that is made when asked for
        channel.send(SegmentOpen(digest=chain.digest, cut=wanted.id, node_bitmap=wanted.node_bitmap))
        opened = (await channel.receive()).message
        assert isinstance(opened, SegmentReady), opened
    message = Infer(request_id="1", attempt=1, digest=chain.digest, cut=cut.id, codec="raw", budget_ms=10_000)
    channel.send(message, encode(chain.crossing(cut, feeds), "raw"))
    incoming = await channel.receive()
    assert isinstance(incoming.message, Reply), incoming.message
    outputs = decode(incoming.payload, max_bytes=1 << 20)
    expected = chain.whole(feeds)
    assert all(relative_difference(outputs[name], expected[name]) <= 1e-5 for name in cut.tail_outputs)
    status, text = await get(http, "/metrics")
    assert status == 200
    assert re.search(r'isthmus_cloud_requests_total\{outcome="ok"\} 1\.0', text)
    for path, expected in (("/v2/health/ready", 200), ("/v2/health/ready?x=1", 200), ("/nowhere", 404)):
        assert (await get(http, path))[0] == expected
    stranger = Identity(cert=identity.cert, key=identity.key, ca=folder / "nobody.pem")
    with pytest.raises(IdentityError):
        await dial("127.0.0.1", port, identity=stranger, hello=greeting, timeout_s=10)
    process.send_signal(signal.SIGTERM)
    assert isinstance((await channel.receive()).message, Goodbye)
    with pytest.raises(ConnectionLost):
        await channel.receive()
    await channel.close("done")


async def ports(log: asyncio.StreamReader) -> tuple[int, int]:
    """The companion's port and its HTTP port, from the lines it logs when it is ready."""
    text = ""
    while not (main := re.search(r"isthmus-cloud listening on 127\.0\.0\.1:(\d+)", text)):
        line = await log.readline()
        assert line, text
        text += line.decode()
    http = re.search(r"health and metrics on 127\.0\.0\.1:(\d+)", text)
    assert http is not None
    return int(main[1]), int(http[1])


async def get(port: int, path: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""

    return await asyncio.to_thread(fetch)
