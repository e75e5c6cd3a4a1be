"""What lies in the repository folder, told apart by names alone: no file is opened.

Layout as Triton has it: `MODELS/<name>/<version>/model.onnx`. Hidden folders and those without a
version are no models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.log_lines import printable
from split.errors import ConfigError
from split.ids import MODEL_NAME, MODEL_NAME_IN_WORDS, ModelName

_LONGEST_SHOWN: Final = 128
_TAKEN: Final = "stats"
"""GET /v2/models/stats is Triton's statistics of all models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """One model's place; `version` and `path` (its `model.onnx`) are the newest version's."""

    version: str
    path: Path
    why_not: str = ""
    """Why nothing in it can be served, as a sentence; "" otherwise."""


def find_models(folder: Path) -> dict[ModelName, ModelFolder]:
    """Everything that looks like a model in the repository, by name. ConfigError when the folder cannot be read.

    A name that no URL can hold is given in printable form, and its folder says that it must be renamed.
    """
    try:
        places = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"models: {folder} cannot be read ({error.strerror}); it holds the model folders") from None
    found: dict[ModelName, ModelFolder] = {}
    for place in places:
        if place.name.startswith("."):
            continue
        try:
            model = _look_into(place)
        except OSError as error:
            model = ModelFolder(version="", path=place, why_not=f"{place} cannot be read ({error.strerror})")
        if model is not None:
            found[ModelName(_shown(place.name))] = model
    return found


def _look_into(place: Path) -> ModelFolder | None:
    if not place.is_dir():
        return None
    versions = [one for one in place.iterdir() if one.name.isascii() and one.name.isdigit() and one.is_dir()]
    if not versions:
        return None
    newest = max(versions, key=lambda one: int(one.name))
    why_not = ""
    if not MODEL_NAME.fullmatch(place.name):
        why_not = (
            f"the folder's name is no model name ({MODEL_NAME_IN_WORDS}), so that no URL could ask for it; rename it"
        )
    elif place.name == _TAKEN:
        why_not = f"a model cannot be called {_TAKEN}: that is a path of the protocol; rename the folder"
    return ModelFolder(version=newest.name, path=newest / "model.onnx", why_not=why_not)


def _shown(name: str) -> str:
    """Itself, where it is a name; with escapes for what cannot be shown, and cut short, otherwise."""
    if MODEL_NAME.fullmatch(name):
        return name
    shown = printable(name)
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"
