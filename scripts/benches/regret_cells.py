"""What `regret` goes through: requests of models, links, device speeds, and which of the cells a run looks at."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import yaml
from PIL import Image

from scripts import models, natural
from scripts.lab_pair import Conditions
from split.codec.calibration import CALIBRATION_FILE
from split.profiles.contract import CONTRACT_FILE
from split.tensor import Tensors

JPEG_QUALITY: Final = 90
PHOTO: Final = "chelsea.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, and the form in which its requests come."""

    model: str
    form: str
    kind: str

    def __str__(self) -> str:
        return f"{self.model} ({self.form})"

    def inputs(self) -> Tensors:
        """One natural request, the same each time."""
        if self.form != "JPEG":
            return natural.NATURAL[self.model]()
        data = io.BytesIO()
        Image.open(models.photo_path(PHOTO)).convert("RGB").save(data, "JPEG", quality=JPEG_QUALITY)
        return {"input": np.array([data.getvalue()], dtype=object)}


SUBJECTS: Final = (
    Subject(model="efficientnet-lite0", form="JPEG", kind="mobile CNN"),
    Subject(model="efficientnet-lite0", form="tensor", kind="mobile CNN"),
    Subject(model="yolox-ddddocr-det", form="tensor", kind="detector with skips"),
    Subject(model="ppocrv4-det", form="tensor", kind="OCR detector, dynamic size"),
    Subject(model="mlsd-tiny-512", form="tensor", kind="encoder-decoder, tiny"),
    Subject(model="minilm-l6-int8w", form="tokens", kind="text transformer"),
    Subject(model="vit-s-focus", form="tensor", kind="vision transformer"),
    Subject(model="silero-vad", form="tensor", kind="audio"),
)

LINKS: Final = (
    Conditions(rate_mbit=1, rtt_ms=60),
    Conditions(rate_mbit=5, rtt_ms=40),
    Conditions(rate_mbit=10, rtt_ms=20),
    Conditions(rate_mbit=10, rtt_ms=40, loss_ratio=0.01),
    Conditions(rate_mbit=50, rtt_ms=10),
    Conditions(rate_mbit=50, rtt_ms=150),
    Conditions(rate_mbit=50, rtt_ms=40, loss_ratio=0.01),
    Conditions(rate_mbit=200, rtt_ms=5),
)
SLOWDOWNS: Final = (1.0, 5.0, 20.0)

CONTESTED: Final = 1.5
"""A cell is contested where a second placement takes at most so many times as long as the best one."""

ORDINARY_QUICK, CONTESTED_QUICK, FAST_MBIT = 2, 2, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What one daemon has to be prepared for: it serves the models of these subjects and no other."""

    name: str
    subjects: tuple[Subject, ...]
    links: tuple[Conditions, ...]
    slowdowns: tuple[float, ...]
    """Ascending."""

    def cells(self) -> list[Cell]:
        return [
            Cell(subject=subject, link=link, slowdown=slowdown)
            for slowdown, subject, link in itertools.product(self.slowdowns, self.subjects, self.links)
        ]


ALL: Final = Grid(name="all", subjects=SUBJECTS, links=LINKS, slowdowns=SLOWDOWNS)
QUICK: Final = Grid(
    name="quick",
    subjects=tuple(subject for subject in SUBJECTS if subject.model == "efficientnet-lite0"),
    links=LINKS,
    slowdowns=(5.0,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    subject: Subject
    link: Conditions
    slowdown: float

    def __str__(self) -> str:
        return f"{self.subject}, {self.link}, {self.slowdown:g}× slower"


Nearness = Callable[[Cell], float]
"""Second-best placement over the best, by the sums of stages."""


def cells_default(nearness: Nearness) -> list[Cell]:
    """One for each subject and speed: half of them where that subject's placements come closest, which is where it is
    easy to be wrong; the others walk through the links whatever they hold."""
    cells = []
    for number, (slowdown, subject) in enumerate(itertools.product(SLOWDOWNS, SUBJECTS)):
        there = [Cell(subject=subject, link=link, slowdown=slowdown) for link in LINKS]
        turn = number + number // len(SUBJECTS)  # so that a subject's turn is another one at another speed
        cells.append(min(there, key=nearness) if turn % 2 else there[number * 3 % len(LINKS)])
    return cells


def cells_quick(nearness: Nearness) -> list[Cell]:
    """Four: those where the placements come closest, and those where they are farthest apart; none over a slow link,
    for which fifty seconds are no time."""
    cells = sorted((cell for cell in QUICK.cells() if cell.link.rate_mbit >= FAST_MBIT), key=nearness)
    return cells[:CONTESTED_QUICK] + cells[-ORDINARY_QUICK:]


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """By speed, since each is a start of the daemon, then by link."""
    return sorted(cells, key=lambda cell: (cell.slowdown, LINKS.index(cell.link), SUBJECTS.index(cell.subject)))


def lay_models(folder: Path, subjects: Sequence[Subject]) -> None:
    """The models of these subjects as a repository in `folder`; Unavailable when one cannot be had.

    Contracts lose their behaviour: latency alone counts here, and no deadline ends a slow plan. A calibration that
    somebody has laid beside a model stays out: the pool of plans is the same on every machine.
    """
    for name in dict.fromkeys(subject.model for subject in subjects):
        source = models.lay_in_repository(name)
        for file in source.rglob("*"):
            if file.is_file() and file.name != CALIBRATION_FILE:
                data = file.read_bytes()
                if file.name == CONTRACT_FILE:
                    data = yaml.safe_dump({k: v for k, v in yaml.safe_load(data).items() if k != "behaviour"}).encode()
                _write(folder / name / file.relative_to(source), data)


def _write(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
