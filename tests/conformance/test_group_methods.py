"""Every method of groups of tokens goes through the kit, as `tests/helpers/matrix.py` says."""

from matrix import kit_classes

globals().update(kit_classes(__name__, "Method", "Cache", fitted=False, grouped=True))
