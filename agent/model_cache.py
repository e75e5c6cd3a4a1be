"""What the workbench made of models, as it lies in the cache: which folder is a model's, and which is nobody's any
more. One folder for each content of a file at each place (`split/workbench/cut.py`).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from split.codec.calibration import Calibration
from split.errors import InvalidModel
from split.graph.card import ModelCard, file_is, read_card
from split.profiles.contract import contract_beside
from split.profiles.demands import demands_of

log = logging.getLogger(__name__)


def find_card(cache_dir: Path, path: Path, calibration: Calibration | None) -> tuple[Path, ModelCard] | None:
    """Folder and card made from exactly these bytes at this place for the contract beside them, without parsing the
    model, with the cuts of the `calibration` beside them (`calibrated.sidecar_beside`; another model's asks for none),
    every segment as the workbench wrote it; None where there is none. ConfigError as `contract_beside`."""
    contract = contract_beside(path)
    calibrated = {} if calibration is None else {calibration.model: frozenset(calibration.tables)}
    for folder, card in _cards(cache_dir):
        if (  # what costs most comes last: hashing takes a second per gigabyte
            card.path == str(path.resolve())
            and card.demands == str(demands_of(contract, [spec.name for spec in card.inputs]))
            and calibrated.get(card.digest, frozenset()) <= set(card.calibrated)
            and _is_of(card, path)
            and all(file_is(folder / name, *made) for name, made in card.made.items())
        ):
            return folder, card
    return None


def remove_former(cache_dir: Path, path: Path, repository: Path, *, in_use: Collection[Path]) -> None:
    """Remove what was made of other contents of this file, and of files of the repository that are gone: else each
    update of a model would leave some copies of its weights behind. Folders `in_use` stay.

    A file that is put back is cut and measured again.
    """
    for folder, card in list(_cards(cache_dir)):
        made_of = Path(card.path)
        replaced = made_of == path.resolve() and not _is_of(card, path)
        gone = made_of.is_relative_to(repository.resolve()) and not made_of.exists()
        if (replaced or gone) and folder not in in_use:
            log.info("%s is removed: %s is %s", folder, made_of, "gone" if gone else "another file now")
            shutil.rmtree(folder, ignore_errors=True)


def _cards(cache_dir: Path) -> Iterator[tuple[Path, ModelCard]]:
    """Folders whose card this program reads."""
    for folder in sorted((cache_dir / "models").glob("*/")):
        try:
            yield folder, read_card(folder)
        except InvalidModel:
            continue


def _is_of(card: ModelCard, path: Path) -> bool:
    """Whether the file at `path`, with its external data, is the one that the card was made of."""
    return all(file_is(path.parent / name, size, sha256) for name, size, sha256 in card.files)
