"""The command line: one file per command."""

from kvpact.cli.entry import main

__all__ = ["main"]
