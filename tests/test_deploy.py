"""What is in deploy/ fits the programs: units, image, and the configurations of its README; none of it is run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.config import load_config as load_agent
from cloud.config import CompanionConfig
from cloud.config import load_config as load_companion
from cloud.health import HealthServer
from cloud.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
CONTAINERFILE = (DEPLOY / "container" / "Containerfile").read_text()


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_is_notified_watched_and_not_started_again_with_a_wrong_configuration(unit: Path) -> None:
    text = unit.read_text()
    for line in ("Type=notify", "RestartPreventExitStatus=78", "DynamicUser=yes", "ProtectSystem=strict"):
        assert f"\n{line}\n" in text
    assert re.search(r"\nWatchdogSec=\d+s\n", text)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_finds_nothing_wrong_with_a_unit_and_little_exposed(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"/opt/isthmus/venv/bin/\S+", "/bin/true", unit.read_text()))
    verified = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", copy]  # 2.0 of 10
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_devices_unit_takes_no_accelerator_away() -> None:
    """ProtectClock= implies DeviceAllow=char-rtc, and before systemd 253 a list of allowed devices forbids all others
    (JetPack 6 and Ubuntu 22.04 have 249, bookworm 252); without CAP_SYS_TIME no clock can be set anyhow."""
    text = (DEPLOY / "systemd" / "isthmus-agent.service").read_text()
    settings = set(re.findall(r"^(\w+)=", text, re.MULTILINE))
    assert settings.isdisjoint({"ProtectClock", "DeviceAllow", "DevicePolicy", "PrivateDevices"})
    assert "\nCapabilityBoundingSet=\n" in text


def test_the_image_runs_as_nobody_special_stops_by_sigterm_and_keeps_its_folders_as_volumes() -> None:
    assert re.search(r"^USER [1-9]\d*$", CONTAINERFILE, re.MULTILINE)
    assert "\nSTOPSIGNAL SIGTERM\n" in CONTAINERFILE
    assert 'VOLUME ["/var/lib/isthmus-cloud", "/var/cache/isthmus-cloud"]' in CONTAINERFILE


def test_the_image_asks_for_health_where_the_companion_answers() -> None:
    (port, path) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[^']*)'", CONTAINERFILE)[0]
    assert f":{port}" in str(CompanionConfig.__struct_defaults__)
    answer = HealthServer(metrics=Metrics(), live=lambda: True, ready=lambda: True)._answer(f"GET {path} ".encode())
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_all_that_the_image_copies_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--)(.*)$", CONTAINERFILE, re.MULTILINE)]
    sources = {source for words in copied for source in words}
    assert sources == kept
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_the_configurations_of_the_readme_load(tmp_path: Path) -> None:
    device, companion = re.findall(r"```yaml\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "config.yaml"
    path.write_text(device)
    assert load_agent(path, {}).companions
    path.write_text(companion)
    assert load_companion(path, {}).identity.key.is_relative_to(load_companion(path, {}).state_dir)


def test_every_kernel_setting_exists_is_explained_and_says_where_it_is_installed() -> None:
    lines = (DEPLOY / "sysctl" / "90-isthmus.conf").read_text().splitlines()
    assert "/etc/sysctl.d/90-isthmus.conf" in "\n".join(lines[:3])
    settings = [n for n, line in enumerate(lines) if line and not line.startswith("#")]
    assert len(settings) == 2
    for n in settings:
        name = lines[n].partition("=")[0].strip()
        assert Path("/proc/sys", *name.split(".")).exists(), name
        assert lines[n - 1].startswith("# ")
    assert "bbr" in lines[settings[1]]
    modules = (DEPLOY / "modules-load" / "isthmus.conf").read_text().splitlines()
    assert [line for line in modules if not line.startswith("#")] == ["tcp_bbr"]
