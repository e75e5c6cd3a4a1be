"""Under which conditions the demo asks, by which roads its requests may go, and what it asks about."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from PIL import Image

from scripts import models
from split.codec.calibration import CALIBRATION_FILE
from split.codec.image import prepare_image
from split.plan.plan import WITH_LEVELS
from split.profiles.contract import Contract, load_contract
from split.tensor import Tensors

MODEL: Final = "efficientnet-lite0"

Roads = Mapping[str, Mapping[str, str]]
"""Name → what is wished for in its requests."""

ROADS: Final[Roads] = {
    "local": {"mode": "local"},
    "best split": {"mode": "split"},
    "offload raw": {"mode": "offload", "codec": "raw"},
    "offload encoded": {"mode": "offload", "codec": "encoded"},
}
"""The alternatives that are forced, one by one."""

CALIBRATED_ROADS: Final[Roads] = {
    "local": {"mode": "local"},
    "best split": {"mode": "split", "codec": "klt"},
    "offload raw": {"mode": "offload", "codec": "raw"},
    "offload jpeg": {"mode": "offload", "codec": "jpeg"},
    "offload webp": {"mode": "offload", "codec": "webp"},
}
"""Those where the model was calibrated: split and pictures at the setting that its curves give for the same bound."""

ALL_ROADS: Final = tuple(dict.fromkeys((*ROADS, *CALIBRATED_ROADS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    name: str
    slowdown: float
    rtt_ms: float
    rate_mbit: float
    down_mbit: float | None = None
    """Where it differs from the way up."""
    input: str = "tensor"
    """tensor (FP32, 602 KB, lossless), jpeg or png (as received); photos: five, each as such a tensor, in turns."""
    privacy: str = "any"
    down: bool = False
    calibrated: bool = False
    """Whether the contract allows klt, jpeg and webp. The device is then started over a fast link."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Roads that are not asked for → why."""
    rounds: int = 5
    """Each road is asked so often, and each input as often as any other. More where roads take about as long: from run
    to run this machine's times differ by half, which `slowdown` multiplies."""

    @property
    def roads(self) -> Roads:
        return CALIBRATED_ROADS if self.calibrated else ROADS


CONDITIONS: Final = (
    Condition(name="fast device, LAN, tensor", slowdown=1, rtt_ms=2, rate_mbit=200),
    Condition(name="fast device, 10 Mbit/s, JPEG", slowdown=1, rtt_ms=20, rate_mbit=10, input="jpeg"),
    Condition(name="20x slower, fast LAN, tensor", slowdown=20, rtt_ms=1, rate_mbit=900),
    Condition(name="20x slower, fast LAN, JPEG", slowdown=20, rtt_ms=1, rate_mbit=900, input="jpeg"),
    Condition(name="20x slower, 10 Mbit/s, tensor", slowdown=20, rtt_ms=20, rate_mbit=10),
    Condition(name="20x slower, 10 Mbit/s, PNG", slowdown=20, rtt_ms=20, rate_mbit=10, input="png"),
    Condition(name="20x slower, 10 Mbit/s, JPEG", slowdown=20, rtt_ms=20, rate_mbit=10, input="jpeg"),
    Condition(name="20x slower, link down, JPEG", slowdown=20, rtt_ms=20, rate_mbit=10, input="jpeg", down=True),
    Condition(
        name="40x slower, 0.5 Mbit/s up, tensor, calibrated",
        slowdown=40,
        rtt_ms=20,
        rate_mbit=0.5,
        down_mbit=10,
        input="photos",
        calibrated=True,
        rounds=15,
        left_out={"offload raw": "602 KB take ten seconds at 0.5 Mbit/s"},
    ),
    Condition(
        name="20x slower, 10 Mbit/s, JPEG, no-raw-input",
        slowdown=20,
        rtt_ms=20,
        rate_mbit=10,
        input="jpeg",
        privacy="no-raw-input",
    ),
    Condition(
        name="20x slower, LAN, JPEG, local-only",
        slowdown=20,
        rtt_ms=1,
        rate_mbit=900,
        input="jpeg",
        privacy="local-only",
    ),
)

PHOTOS: Final = ("motorcycle_left.png", "astronaut.png", "coffee.png", "rocket.jpg", "chelsea.png")
"""What the package of the cat has besides; none is among those that the demo calibrates on."""

START: Final = CONDITIONS[0]
"""What the device is started over where the condition's own link would take minutes for a model and its calibration."""


def lay_models(folder: Path, sidecar: Path, *, privacy: str = "any", calibrated: bool = False) -> None:
    """The demo's repository: the model as `scripts/models` lays it and its calibration, under its contract with this
    privacy; without the codecs that need the calibration unless `calibrated`."""
    source = models.lay_in_repository(MODEL)
    place = folder / MODEL
    shutil.copytree(source, place, dirs_exist_ok=True)
    shutil.copyfile(sidecar, place / "1" / CALIBRATION_FILE)
    contract = yaml.safe_load((source / "contract.yaml").read_text())
    (place / "contract.yaml").write_text(yaml.safe_dump(contract_for(contract, privacy, calibrated=calibrated)))


def contract_for(contract: Mapping[str, Any], privacy: str, *, calibrated: bool) -> dict[str, Any]:
    """The contract as `lay_models` lays it."""
    data = dict(contract["data"])
    plain = [codec for codec in data["codecs"] if codec not in WITH_LEVELS]
    data |= {"privacy": privacy, "codecs": [*plain, *(WITH_LEVELS if calibrated else ())]}
    return {**contract, "data": data}


def shipped_contract() -> Contract:
    """Of the model, as it lies in its repository."""
    return load_contract(models.REPOSITORY / MODEL / "contract.yaml")


def make_inputs() -> dict[str, Sequence[Tensors]]:
    """One photo (scikit-image's cat), three ways: as a JPEG and a PNG as received, and as the tensor of the PNG; and
    all photos as tensors, the cat last."""
    png = models.photo_path("chelsea.png").read_bytes()
    jpeg = io.BytesIO()
    Image.open(io.BytesIO(png)).save(jpeg, "JPEG", quality=90)
    (tensor_input,) = shipped_contract().data.inputs
    spec = tensor_input.encoded
    assert spec is not None
    photos = [prepare_image(models.photo_path(name).read_bytes(), spec) for name in PHOTOS]
    return {
        "tensor": [{"input": prepare_image(png, spec)}],
        "png": [{"input": np.array([png], dtype=object)}],
        "jpeg": [{"input": np.array([jpeg.getvalue()], dtype=object)}],
        "photos": [{"input": photo} for photo in photos],
    }
