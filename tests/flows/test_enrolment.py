"""A device enrols at a companion: both sides in this process over loopback, and at the end as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import re
import signal
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from cryptography import x509

import cloud.enrolment
from agent.commands import enroll
from agent.enrolment import NewIdentity, enrol
from cloud.enrolment import Enrolment
from cloud.register import Register
from cloud.tokens import TokenStore
from scripts.client import Client
from scripts.pair import free_ports
from split.errors import ConnectionLost, IdentityError, IsthmusError, TokenRefused
from split.identity.certificates import issue, make_authority, serial_of
from split.identity.contexts import Identity
from split.identity.credentials import Credentials
from split.identity.enrolment import AskAuthority, Enrol, Enrolled, NotEnrolled, decode_line, encode_line
from split.identity.tokens import JoinToken, pin_of
from split.profiles.address import HostPort
from split.transport.listener import listen
from split.wire.limits import MIB
from split.wire.messages import Hello

HELLO = Hello(major=1, minor=0, agent="a", runtime="r", max_message_bytes=MIB, codecs=("raw",))


@dataclass
class Office:
    """A companion as far as enrolment needs it."""

    enrolment: Enrolment
    tokens: TokenStore
    register: Register
    identity: Identity
    clock_s: float

    @property
    def place(self) -> HostPort:
        return HostPort(f"127.0.0.1:{self.enrolment.port}")

    def token(self, name: str = "", ttl_s: float = 60.0) -> JoinToken:
        pin = pin_of(self.register.authority.read_text())
        token = self.tokens.make(name=name, pin=pin, ttl_s=ttl_s, now_s=self.clock_s)
        self.enrolment.look()
        return token


@asynccontextmanager
async def office(folder: Path, companion: Identity | None = None) -> AsyncIterator[Office]:
    if not (folder / "ca").exists():
        make_authority(folder / "ca", now=datetime.now(UTC) - timedelta(days=400))
    identity = companion or issue(folder / "ca", "c", "companion", folder / "c")
    register, tokens = Register(folder / "ca"), TokenStore(folder / "tokens")
    now_s = time.time()
    made: list[Office] = []
    enrolment = Enrolment(
        HostPort("127.0.0.1:0"),
        identity=identity,
        register=register,
        tokens=tokens,
        days=30.0,
        now_s=lambda: made[0].clock_s,
    )
    made.append(Office(enrolment=enrolment, tokens=tokens, register=register, identity=identity, clock_s=now_s))
    try:
        yield made[0]
    finally:
        await enrolment.close()


@pytest.fixture(autouse=True)
def _wrong_tokens_cost_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud.enrolment, "WRONG_TOKEN_S", 0.0)


async def refused(token: JoinToken, place: HostPort) -> IsthmusError:
    with pytest.raises(IsthmusError) as caught:
        await enrol(token, place)
    return caught.value


def holders(folder: Path, data: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and data in path.read_bytes()]


async def test_a_token_becomes_a_certificate_for_a_key_that_never_left(tmp_path: Path) -> None:
    async with office(tmp_path) as companion:
        token = companion.token("cam-1")
        made = await enrol(token, companion.place)
    certificate = x509.load_pem_x509_certificate(made.chain)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://isthmus/device/cam-1"]
    assert made.name == "cam-1"
    assert made.authority == companion.register.authority.read_bytes()
    assert not holders(tmp_path, made.key), "on the companion's side nothing holds the device's key"
    # and a companion takes it
    identity = Identity(cert=tmp_path / "d.pem", key=tmp_path / "d-key.pem", ca=companion.identity.ca)
    identity.cert.write_bytes(made.chain)
    identity.key.write_bytes(made.key)
    identity.key.chmod(0o600)
    assert Credentials(identity, "device").require() == ""


async def test_without_a_name_the_companion_makes_one_up(tmp_path: Path) -> None:
    async with office(tmp_path) as companion:
        made = await enrol(companion.token(), companion.place)
        other = await enrol(companion.token(), companion.place)
    assert re.fullmatch(r"device-[0-9a-f]{8}", made.name)
    assert made.name != other.name


async def test_the_listener_is_open_only_while_a_token_lives(tmp_path: Path) -> None:
    async with office(tmp_path) as companion:
        companion.enrolment.look()
        assert companion.enrolment.port == 0
        token = companion.token(ttl_s=60.0)
        place = companion.place
        companion.clock_s += 61.0
        companion.enrolment.look()
        assert companion.enrolment.port == 0
        error = await refused(token, place)
        assert isinstance(error, ConnectionLost)
        assert "the port is open only while one does" in str(error)
        await enrol(companion.token(), companion.place)
        companion.enrolment.look()
        assert companion.enrolment.port == 0


async def test_used_expired_and_unknown_tokens_are_refused_each_with_its_code(tmp_path: Path) -> None:
    async with office(tmp_path) as companion:
        companion.token(ttl_s=1000.0)  # keeps the listener open
        used, expired = companion.token(), companion.token(ttl_s=10.0)
        await enrol(used, companion.place)
        companion.clock_s += 11.0
        unknown = JoinToken(secret=bytes(20), pin=used.pin, expires_at_s=used.expires_at_s)
        for token, code in ((used, "TOKEN_USED"), (expired, "TOKEN_EXPIRED"), (unknown, "TOKEN_UNKNOWN")):
            error = await refused(token, companion.place)
            assert isinstance(error, TokenRefused)
            assert error.code == code
            assert "isthmus-cloud token" in str(error)


async def test_of_two_devices_that_race_with_one_token_one_is_enrolled(tmp_path: Path) -> None:
    async with office(tmp_path) as companion:
        token = companion.token("cam-1")
        done = await asyncio.gather(*(enrol(token, companion.place) for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(one, NewIdentity) for one in done) == 1
    assert sum(isinstance(one, TokenRefused) for one in done) == 5


async def test_another_companion_behind_the_address_gets_nothing_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bytes] = []
    real = cloud.enrolment.decode_line

    def listening_in(data: bytes) -> object:
        heard.append(data)
        return real(data)

    monkeypatch.setattr(cloud.enrolment, "decode_line", listening_in)
    async with office(tmp_path / "real") as real_one, office(tmp_path / "fake") as fake:
        fake.token()
        error = await refused(real_one.token(), fake.place)
    assert isinstance(error, IdentityError)
    assert "has another authority than the one that made the token: nothing was sent" in str(error)
    assert heard == [encode_line(AskAuthority())]


async def test_one_that_shows_the_right_authority_without_a_certificate_by_it_gets_nothing_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A man in the middle knows the authority's certificate: it is public."""
    make_authority(tmp_path / "thief")
    thief = issue(tmp_path / "thief", "c", "companion", tmp_path / "thief-id")
    heard: list[bytes] = []
    real = cloud.enrolment.decode_line

    def listening_in(data: bytes) -> object:
        heard.append(data)
        return real(data)

    monkeypatch.setattr(cloud.enrolment, "decode_line", listening_in)
    async with office(tmp_path, companion=thief) as companion:
        error = await refused(companion.token(), companion.place)
    assert isinstance(error, IdentityError)
    assert "comes from another authority" in str(error)
    assert heard == [encode_line(AskAuthority())]


@pytest.mark.parametrize(
    ("days", "said"),
    [(-390, "has expired"), (400, r"is not valid yet: set this host's clock \(this device's clock says")],
)
async def test_a_wrong_clock_is_told_as_such(tmp_path: Path, days: int, said: str) -> None:
    """As seen from a device whose clock is wrong: the companion's certificate is out of its time."""
    make_authority(tmp_path / "ca", now=datetime.now(UTC) - timedelta(days=400))
    then = datetime.now(UTC) + timedelta(days=days)
    companion = issue(tmp_path / "ca", "c", "companion", tmp_path / "c", now=then, days=30)
    async with office(tmp_path, companion=companion) as there:
        error = await refused(there.token(), there.place)
    assert isinstance(error, IdentityError)
    assert re.search(said, str(error))


async def test_a_devices_certificate_cannot_play_the_companion_at_enrolment(tmp_path: Path) -> None:
    make_authority(tmp_path / "ca")
    device = issue(tmp_path / "ca", "d", "device", tmp_path / "d")
    async with office(tmp_path, companion=device) as there:
        error = await refused(there.token(), there.place)
    assert isinstance(error, IdentityError)
    assert "is for another role" in str(error)


async def test_the_port_for_requests_says_that_it_is_not_the_one_for_enrolment(tmp_path: Path) -> None:
    make_authority(tmp_path / "ca")
    companion = issue(tmp_path / "ca", "c", "companion", tmp_path / "c")

    async def nothing(_: object) -> None:
        return

    listener = await listen(
        "127.0.0.1", 0, identity=companion, make_hello=lambda: HELLO, on_channel=nothing, max_sessions=1
    )
    token = JoinToken(secret=bytes(20), pin=bytes(32), expires_at_s=2_000_000_000)
    try:
        error = await refused(token, HostPort(f"127.0.0.1:{listener.port}"))
    finally:
        await listener.close()
    assert "enrolment is at `enroll_listen`" in str(error)


async def test_a_request_that_cannot_be_signed_costs_no_token(tmp_path: Path) -> None:
    async with office(tmp_path) as companion:
        token = companion.token("cam-1")
        answer = await say(companion.place, encode_line(Enrol(secret=token.secret, request="nothing")))
        assert isinstance(decode_line(answer), NotEnrolled)
        assert isinstance(await enrol(token, companion.place), NewIdentity)


async def test_an_authority_that_cannot_sign_just_now_costs_no_token(tmp_path: Path) -> None:
    async with office(tmp_path) as companion:
        token = companion.token("cam-1")
        key = tmp_path / "ca" / "ca-key.pem"
        key.rename(tmp_path / "elsewhere")
        assert not isinstance(await refused(token, companion.place), TokenRefused)
        (tmp_path / "elsewhere").rename(key)
        assert (await enrol(token, companion.place)).name == "cam-1"


async def say(place: HostPort, data: bytes) -> bytes:
    """Whatever is sent, over TLS that verifies nothing; what comes back, b"" when it hangs up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(place.host, place.port, ssl=context)
    try:
        writer.write(data)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def test_strangers_that_send_garbage_much_or_nothing_are_dropped_and_devices_still_enrol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud.enrolment, "MAX_CONNECTIONS", 4)
    seeded = random.Random(5)
    async with office(tmp_path) as companion:
        token = companion.token("cam-1")
        for garbage in (
            b"\n",
            b"GET / HTTP/1.1\r\n",
            b"{}\n",
            b'{"t": "enrol"}\n',
            b'{"t": "enrol", "secret": 5, "request": ""}\n',
            encode_line(Enrolled(name="x", chain="")),
            b"[" * 10_000 + b"\n",
            b"x" * (64 << 10),
            seeded.randbytes(1000) + b"\n",
        ):
            assert await say(companion.place, garbage) == b""
        silent = [
            await asyncio.open_connection("127.0.0.1", companion.enrolment.port) for _ in range(20)
        ]  # they make room
        assert (await enrol(token, companion.place)).name == "cam-1"
        assert len(companion.enrolment._talking) <= 4
        for _, writer in silent:
            writer.transport.abort()


async def test_while_half_a_new_pair_lies_there_one_is_hung_up_on_and_the_next_is_served(
    tmp_path: Path,
) -> None:
    async with office(tmp_path) as companion:
        token = companion.token("cam-1")
        good = companion.identity.cert.read_bytes()
        companion.identity.cert.write_bytes(good[:100])
        assert isinstance(await refused(token, companion.place), ConnectionLost)
        companion.identity.cert.write_bytes(good)
        assert (await enrol(token, companion.place)).name == "cam-1"


# ---- the command


def command(arguments: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    enroll.add_arguments(parser)
    return enroll.run(parser.parse_args(arguments))


async def test_the_command_writes_where_the_configuration_says_with_the_right_modes_and_overwrites_nothing(
    tmp_path: Path,
) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(
        "models: models\nstate_dir: state\ncache_dir: cache\n"
        "identity: {cert: id/device.crt, key: secret/device.key, ca: id/ca.crt}\n"
    )
    async with office(tmp_path / "there") as companion:
        first, second = companion.token("cam-1").text(), companion.token("cam-2").text()
        arguments = ["--companion", str(companion.place), "--config", str(config), "--token"]
        assert await asyncio.to_thread(command, [*arguments, first]) == 0
        paths = [tmp_path / name for name in ("id/device.crt", "secret/device.key", "id/ca.crt")]
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o644, 0o600, 0o644]
        before = [path.read_bytes() for path in paths]
        with pytest.raises(IdentityError, match="exists already and is not overwritten"):
            await asyncio.to_thread(command, [*arguments, second])
        assert [path.read_bytes() for path in paths] == before
        assert await asyncio.to_thread(command, [*arguments, second, "--force"]) == 0, "the token was not used up"
        assert [path.read_bytes() for path in paths][:2] != before[:2]
        assert paths[2].read_bytes() == before[2]
    assert sorted(os.listdir(tmp_path / "id")) == ["ca.crt", "device.crt"]


async def test_without_a_configuration_it_writes_beside_and_reads_the_token_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    async with office(tmp_path / "there") as companion:
        monkeypatch.setattr(sys, "stdin", io.StringIO(companion.token("cam-1").text() + "\n"))
        arguments = ["--companion", str(companion.place), "--token", "-", "--json"]
        assert await asyncio.to_thread(command, arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"name": "cam-1", "cert": "identity/cert.pem", "key": "identity/key.pem", "ca": "identity/ca.pem"}
    assert sorted(os.listdir(tmp_path / "identity")) == ["ca.pem", "cert.pem", "key.pem"]


async def test_a_configuration_without_identity_and_a_folder_that_cannot_be_cost_no_token(tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text("models: models\nstate_dir: state\ncache_dir: cache\n")
    (tmp_path / "file").write_text("")
    async with office(tmp_path / "there") as companion:
        token = companion.token().text()
        for place, said in (
            (["--config", str(config)], "says nothing of `identity`"),
            (["-o", str(tmp_path / "file" / "id")], "cannot be made"),
        ):
            with pytest.raises(IdentityError, match=said):
                await asyncio.to_thread(command, ["--companion", str(companion.place), "--token", token, *place])
        assert companion.tokens.live(companion.clock_s) == 1


# ---- real processes

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
chain (float[n, 4] x) => (float[n, 4] y) { a = Neg (x)  b = Exp (a)  c = Tanh (b)  y = Add (c, x) }
"""
PROGRAM = {"cloud": [sys.executable, "-m", "cloud.cli"], "agent": [sys.executable, "-m", "agent.cli"]}


def run(program: str, *arguments: object, ok: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*PROGRAM[program], *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done


def wait_until(
    true: Callable[[], bool], what: str, *, said: Callable[[], str] = lambda: "", timeout_s: float = 90.0
) -> None:
    """`said`: what the programs said, for the one who reads that it never came."""
    deadline_at_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() >= deadline_at_s:
            pytest.fail(f"it never came to it that {what}\n{said()}")
        time.sleep(0.1)


@contextlib.contextmanager
def running(program: str, log: Path, *arguments: object):  # type: ignore[no-untyped-def]  # a generator of one process
    with log.open("wb") as file:
        process = subprocess.Popen([*PROGRAM[program], *map(str, arguments)], stderr=file, env=dict(os.environ))
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_from_init_over_token_and_enroll_to_a_split_request_a_renewal_and_revoke_to_a_refusal(tmp_path: Path) -> None:
    port, enrol_port, http = free_ports(3)
    onnx.save(onnx.parser.parse_model(MODEL), _made(tmp_path / "models" / "chain" / "1") / "model.onnx")
    companion, device = tmp_path / "companion.yaml", tmp_path / "agent.yaml"
    companion.write_text(
        yaml.safe_dump(
            {
                "state_dir": "c-state",
                "cache_dir": "c-cache",
                "identity": {part: f"c-id/{part}.pem" for part in ("cert", "key", "ca")},
                "listen": f"127.0.0.1:{port}",
                "enroll_listen": f"127.0.0.1:{enrol_port}",
                "certificate_days": 0.02,  # 29 min; from an hour before it is made, so it is due for renewal at once
                "http": None,
            }
        )
    )
    device.write_text(
        yaml.safe_dump(
            {
                "models": "models",
                "state_dir": "state",
                "cache_dir": "cache",
                "listen": {"http": f"127.0.0.1:{http}"},
                "companions": [f"127.0.0.1:{port}"],
                "identity": {part: f"id/{part}.pem" for part in ("cert", "key", "ca")},
            }
        )
    )
    run("cloud", "init", "--config", companion)
    log = tmp_path / "companion.log"
    with running("cloud", log, "serve", "--config", companion):
        wait_until(lambda: b"listening on" in log.read_bytes(), "the companion serves")
        assert b"enrolment is open" not in log.read_bytes()
        token = json.loads(run("cloud", "token", "--config", companion, "--name", "cam-1", "--json").stdout)["token"]
        wait_until(lambda: b"enrolment is open" in log.read_bytes(), "a running companion notices the token")
        enrolling = ["enroll", "--token", token, "--companion", f"127.0.0.1:{enrol_port}"]
        assert "enrolled as: cam-1" in run("agent", *enrolling, "--config", device).stdout
        wait_until(lambda: b"is closed" in log.read_bytes(), "enrolment closes with the last token")
        assert "cannot be reached for enrolment" in run("agent", *enrolling, "-o", tmp_path / "id2", ok=False).stderr
        agent_log = tmp_path / "agent.log"
        with running("agent", agent_log, "agent", "--config", device):
            x = np.arange(8, dtype=np.float32).reshape(2, 4)
            last: list[object] = []

            def split_works() -> bool:
                last.clear()
                try:
                    with Client(http) as client:
                        answer = client.infer("chain", {"x": x}, mode="split", deadline_ms=5000)
                except Exception as error:
                    last.append(error)
                    return False
                last.append((answer.placement, answer.fallback))
                np.testing.assert_allclose(answer.outputs["y"], np.tanh(np.exp(-x)) + x, rtol=1e-5)
                return answer.placement == "split"

            enrolled = serial_of((tmp_path / "id" / "cert.pem").read_bytes())
            wait_until(
                split_works,
                "a split request is answered",
                said=lambda: f"{last}\n{agent_log.read_text()}\n{log.read_text()}",
            )
            wait_until(
                lambda: serial_of((tmp_path / "id" / "cert.pem").read_bytes()) != enrolled,
                "the certificate is renewed over the channel",
            )
            assert b"renewed device=cam-1" in log.read_bytes()
            assert split_works(), "the running connection goes on"
            assert run("cloud", "revoke", "cam-1", "--config", companion).stdout.startswith("revoked: ")
            wait_until(lambda: b"was revoked" in log.read_bytes(), "the companion ends the session")
            wait_until(lambda: b"refused our certificate" in agent_log.read_bytes(), "the device is told so")
            assert not split_works()
            with Client(http) as client:
                assert client.infer("chain", {"x": x}, mode="auto", deadline_ms=5000).placement == "local"
    text = log.read_text() + agent_log.read_text()
    assert "Traceback" not in text
    assert "PRIVATE KEY" not in text
    assert token not in text


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
