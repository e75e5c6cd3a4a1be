"""`isthmus agent` with companions, without files that any of them would take: exit 78 with a sentence, at the start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from split.identity.certificates import issue, make_authority


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_authority(tmp_path / "ca")
    issue(tmp_path / "ca", "camera-1", "device", tmp_path / "id")
    (tmp_path / "models").mkdir()
    path = tmp_path / "agent.yaml"
    path.write_text(
        """
        models: models
        state_dir: state
        cache_dir: cache
        listen: {http: 127.0.0.1:0}
        companions: [127.0.0.1:9]
        identity: {cert: id/cert.pem, key: id/key.pem, ca: id/ca.pem}
        """
    )
    return path


def refused(config: Path) -> str:
    failed = subprocess.run(
        [sys.executable, "-m", "agent.cli", "agent", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
        check=False,
    )
    assert failed.returncode == 78, failed.stderr
    assert "Traceback" not in failed.stderr
    (sentence,) = [line for line in failed.stderr.splitlines() if line.startswith("isthmus: ")]
    return sentence


@pytest.mark.parametrize("part", ["cert", "key", "ca"])
def test_a_missing_file_is_bad_configuration(config: Path, tmp_path: Path, part: str) -> None:
    (tmp_path / "id" / f"{part}.pem").unlink()
    said = refused(config)
    assert f"identity.{part}: " in said
    assert "isthmus-cloud issue" in said


def test_the_authority_of_somebody_else_is_bad_configuration(config: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "ca.pem", tmp_path / "id" / "ca.pem")
    assert "did not issue" in refused(config)


def test_a_companions_certificate_is_bad_configuration_on_a_device(config: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "id")
    issue(tmp_path / "ca", "companion-1", "companion", tmp_path / "id")
    assert "identity.cert" in refused(config)
