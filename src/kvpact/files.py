"""Files: written as a whole or not at all, and read only where they are regular files."""

from __future__ import annotations

import math
import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from kvpact.errors import DtypeError, FormatError, KVPactError


def check_path(path: object) -> None:
    """Raise `DtypeError` for anything but a path."""
    if not isinstance(path, str | PathLike):
        raise DtypeError(f"a path such as 'chat.kv' should stand here, not {type(path).__name__}")
    if str(path).startswith("~/"):
        raise KVPactError(f"{path}: a tilde is the shell's; write: Path(path).expanduser()")


def open_regular(path: str | PathLike[str], *, follow: bool = True) -> int:
    """Open a regular file (no pipe, no device), a link to one if `follow`. Raises `FormatError`."""
    check_path(path)
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    refused = FormatError(f"{path} is no regular file")
    if not follow and Path(path).is_symlink():
        raise refused
    try:
        handle = os.open(path, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    except OSError:
        # A socket can't be opened at all, nor a folder on some systems.
        with suppress(OSError):
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise refused from None
        raise
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise refused


def read_regular(path: str | PathLike[str], *, follow: bool = True) -> bytes:
    """Return the bytes of a regular file; parameters and errors as of `open_regular`."""
    with os.fdopen(open_regular(path, follow=follow), "rb") as file:
        return file.read()


def write_atomic(path: str | PathLike[str], data: Any) -> None:
    """Write a file (mode 0600) whole or, with an `OSError` that names it, not at all."""
    check_path(path)
    target = Path(path)
    try:
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
        sync_folder(target.parent)
    except OSError as error:
        told = "make its folder" if isinstance(error, FileNotFoundError) else "make room there"
        why = f"{error.strerror or error}; {told}, or write to another place"
        raise OSError(error.errno, why, str(target)) from error


def is_of_others(path: str | PathLike[str], read: Callable[[Path], object]) -> bool:
    """Return whether a file is there that `read` does not accept: kvpact did not write it."""
    check_path(path)
    try:
        if Path(path).exists():
            read(Path(path))
    except (KVPactError, OSError):
        return True
    return False


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a loss of power, where folders can be opened."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def json_ready(value: Any) -> Any:
    """Return data with None in the place of NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: json_ready(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(entry) for entry in value]
    return value


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(text: str) -> int:
    """Return the bytes that a text such as ``300MB`` or ``1.5GiB`` means; 0 where it is none."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    return 0 if found is None or unit is None else int(float(found[1]) * unit)


def share_of(text: str) -> float | None:
    """Return the share that a text such as ``25%`` means; None where it is none."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", text.strip())
    return float(found[1]) / 100 if found else None


def size_text(count: float) -> str:
    """Return bytes in the unit that reads best, powers of 1,000 as in the reports."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return a table as text: the first column is text, the others are numbers."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in cells)
