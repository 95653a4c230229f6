"""Every method that codes tokens one by one goes through the conformance kit.

Which of its specs goes through which checks: `tests/helpers/matrix.py`.
"""

from matrix import kit_classes

globals().update(kit_classes(__name__, "Method", "Cache", fitted=False, grouped=False))
