"""The command line: one file per command; typer and rich may be missing here."""

import sys
from importlib.util import find_spec

__all__ = ["main"]


def main() -> None:
    """Run the command line on ``sys.argv`` and exit.

    Raises
    ------
    SystemExit
        0 after success, 1 where typer or rich is missing, 2 after bad input, 130 after Ctrl-C.
    """
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        print(f"error: the command line needs {names}; pip install 'kvpact[cli]'", file=sys.stderr)
        raise SystemExit(1)
    from kvpact.cli.app import app

    app(prog_name="kvpact")
