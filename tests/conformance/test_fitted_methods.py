"""Every method that learns from tokens goes through the conformance kit, fitted; on pages, too.

Which of its specs goes through which checks: `tests/helpers/matrix.py`. Variants, which learn large
codebooks, are in `make test-slow`.
"""

from matrix import kit_classes

globals().update(kit_classes(__name__, "Method", "Cache", "Paged", fitted=True))
