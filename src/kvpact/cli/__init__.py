"""The command line: ``kvpact eval``, ``generate``, ``size``, ``methods``, ``doctor``, ``demo``."""

from kvpact.cli.entry import main

__all__ = ["main"]
