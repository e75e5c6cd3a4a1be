"""Tensors from an `.npz` file: what `--inputs` names. Nothing in it is executed (no pickles)."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from split.errors import InvalidRequest
from split.tensor import Tensors, dtype_name


def read_inputs(path: Path | None) -> Tensors | None:
    """The tensors of the file by name; None for no file.

    InvalidRequest when it is missing, no `.npz`, or holds what is no tensor of a supported type.
    """
    if path is None:
        return None
    try:
        with path.open("rb") as stream:  # numpy leaves a file open that turns out to be no archive
            if not zipfile.is_zipfile(stream):
                raise InvalidRequest(
                    f"{path} is no .npz file; expected an archive with one array for each input, by name"
                )
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as archive:
                tensors: Tensors = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InvalidRequest(f"{path} is not there; expected an .npz file with the model's inputs") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidRequest(f"{path} is no .npz file of plain arrays: {error}") from error
    for array in tensors.values():
        dtype_name(array.dtype)
    return tensors
