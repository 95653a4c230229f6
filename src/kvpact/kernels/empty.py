"""What layers of a cache begin with."""

from __future__ import annotations

from typing import Any


class Empty(dict[Any, Any]):
    """Streams that hold no token yet, by what they are made for."""

    def held_parts(self) -> tuple[()]:
        """Hold no memory (see `kvpact.testing.held_tensors`)."""
        return ()
