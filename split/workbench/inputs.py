"""Tensors from an `.npz` file: what `--inputs` names. Nothing in it is executed (no pickles)."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Final

import numpy as np

from split.errors import InvalidRequest
from split.tensor import Tensors, dtype_name

_DAMAGED: Final = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, MemoryError)
"""What zipfile and numpy raise on archives that are damaged, encrypted or claim to be larger than memory."""


def read_inputs(path: Path | None) -> Tensors | None:
    """The tensors of the file by name; None for no file.

    InvalidRequest when it is missing, no `.npz`, or holds what is no tensor of a supported type.
    """
    if path is None:
        return None
    if path.exists() and not path.is_file():  # a pipe that nobody writes into would be waited for
        raise InvalidRequest(f"{path} is no file; expected an .npz file with the model's inputs")
    try:
        with path.open("rb") as stream:  # numpy leaves a file open that turns out to be no archive
            if not zipfile.is_zipfile(stream):
                raise InvalidRequest(
                    f"{path} is no .npz file; expected an archive with one array for each input, by name"
                )
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as archive:
                tensors: Tensors = {name: archive[name] for name in archive.files}
        if foreign := [name for name, array in tensors.items() if not isinstance(array, np.ndarray)]:
            raise InvalidRequest(
                f"{path} is no .npz file: {foreign[0]!r} in it is no array; expected one for each input"
            )
    except FileNotFoundError:
        raise InvalidRequest(f"{path} is not there; expected an .npz file with the model's inputs") from None
    except _DAMAGED as error:
        raise InvalidRequest(f"{path} is no .npz file of plain arrays: {error or type(error).__name__}") from error
    for array in tensors.values():
        dtype_name(array.dtype)
    return tensors
