"""The check of `make lint` for modules that import one another in a circle."""

import pytest
from lint_circles import circles

TYPED = "if TYPE_CHECKING:\n    from p.a import A"
LATE = "def f():\n    from p import a"


@pytest.mark.parametrize("back", ["from p.a import A", TYPED, LATE, "import p.a"])
def test_circles_are_found_wherever_the_import_stands(back):
    sources = {"p": "", "p.a": "from p.b import B", "p.b": back, "p.c": "from p.a import A"}
    assert circles(sources) == [["p.a", "p.b"]]


def test_modules_that_import_downwards_are_no_circle():
    sources = {"p": "from p.a import A", "p.a": "import os\nfrom p.b import B", "p.b": ""}
    assert circles(sources) == []
