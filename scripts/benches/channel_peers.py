"""The libraries that `channel` is measured beside, in a venv of their own: they are no dependency of the project."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from scripts.benches.figure import CACHE

PEERS: Final = {"grpc": "grpcio==1.85.3", "aioquic": "aioquic==1.7.2"}
"""Module → what is installed."""
VENV: Final = CACHE.parent / "channel-peers"
PYTHON: Final = str(VENV / "bin" / "python")
NAME: Final = "bench"
"""In the certificate; these libraries compare names."""


def prepare(folder: Path) -> None:
    """Install what can be had, once, and make a certificate; without a network the rows are left out."""
    if not (folder / "peer.pem").exists():
        _make_certificate(folder)
    done = VENV / "installed"
    if done.exists() and done.read_text() == str(PEERS):
        return
    if not Path(PYTHON).exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    tried = [subprocess.run([*command, wanted], check=False).returncode for wanted in PEERS.values()]
    if not any(tried):
        done.write_text(str(PEERS))


def missing(peer: str) -> str:
    """Why a library cannot be measured; empty when it can."""
    found = Path(PYTHON).exists() and subprocess.run([PYTHON, "-c", f"import {peer}"], check=False, capture_output=True)
    return "" if found and found.returncode == 0 else f"{PEERS[peer]} could not be installed"


def _make_certificate(folder: Path) -> None:
    """`peer.pem`, self-signed and its own authority, and `peer-key.pem`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "peer-key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / "peer.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
