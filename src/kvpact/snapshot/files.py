"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any


def write_atomic(path: str | PathLike[str], data: Any) -> None:
    """Write a file that nobody ever sees half: beside its place, to the disk, then renamed.

    Parameters
    ----------
    path : path
        Replaced if it is there. The file can be read by its owner alone (mode 0600).
    data : bytes-like
        What to write.

    Raises
    ------
    OSError
        The folder is not there, the disk is full, …; what was there before is there still.
    """
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a loss of power, where folders can be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
