"""Methods go through the conformance kit in the paged cache, too: `tests/helpers/matrix.py`."""

from matrix import kit_classes

globals().update(kit_classes(__name__, "Paged", fitted=False))
