"""What commands are given: texts, prompts, folders for results."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from kvpact.data import book_path
from kvpact.errors import BackendUnavailable, KVPactError


class InputError(KVPactError, ValueError):
    """A command was given something it can't use."""


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, or of stdin for ``-``.

    Raises
    ------
    InputError
        No such file, a folder, no permission, not UTF-8, or nothing but white space in it.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text; convert it first") from error
    if not text.strip():
        raise InputError(f"{path} holds no text; give a text file")
    return text


def prompt_text(file: Path | None, prompt: str | None, purpose: str) -> str:
    """Return the text of a file and a prompt, a blank line between them.

    Raises
    ------
    InputError
        There is neither, or the file can't be read.
    """
    parts = [read_text(file)] if file is not None else []
    parts += [prompt] if prompt else []
    if not parts:
        raise InputError(f"nothing to {purpose}; give a prompt or --file")
    return "\n\n".join(parts)


def texts_of(paths: list[Path]) -> list[tuple[str, str]]:
    """Return names and contents of texts, all of them read; the shipped book's if there are none.

    Raises
    ------
    InputError
        One of them can't be read, or is given twice.
    """
    if not paths:
        return [("northanger_abbey.txt", book_path().read_text("utf-8"))]
    if len(set(paths)) < len(paths):
        raise InputError("--text names a file twice; give each once")
    names = [path.name for path in paths]
    same = len(set(names)) < len(names)
    return [(str(path) if same else path.name, read_text(path)) for path in paths]


@contextmanager
def results_folder(path: Path | None) -> Iterator[None]:
    """Make a folder for results before the work starts; remove it again if the work fails.

    Parameters
    ----------
    path : Path or None
        The folder; folders that existed, or hold files, stay. None makes nothing.

    Raises
    ------
    InputError
        It can't be made or written to.
    """
    if path is None:
        yield
        return
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{path} can't be made: {error.strerror}; give another --out"
            ) from error
        if not os.access(path, os.W_OK):
            raise InputError(f"{path} can't be written to; give another --out")
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def require(*packages: str, extra: str) -> None:
    """Raise `BackendUnavailable` with the pip command where a package of an extra is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            f"{' and '.join(missing)} not installed; pip install 'kvpact[{extra}]'"
        )
