"""Steps taken back: a layer holds again what it held before them."""

from __future__ import annotations

from typing import NamedTuple

from kvpact.cache.layer.held import Held
from kvpact.cache.layer.layer import CacheLayer


class Moment(NamedTuple):
    """A layer's state at one moment, which it can hold again, to the byte, after appends."""

    layer: CacheLayer
    held: Held

    @classmethod
    def of(cls, layer: CacheLayer) -> Moment:
        """Return the present one."""
        return cls(layer, layer._held)

    def restore(self) -> None:
        """Let the layer hold that again, unless it was rolled back, reordered or reset since."""
        version = self.layer._held.version
        if version == self.held.version:
            # What carries out steps has counted those that came since.
            rewind(self.layer, self.held._replace(version=version + 1, runner=None))


def rewind(layer: CacheLayer, held: Held) -> None:
    """Let a layer hold again what it held before steps that made nothing lie elsewhere."""
    with layer.lock:
        layer.clean = False
        layer._held = held
        layer.settle()
