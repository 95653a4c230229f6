"""The checks of all caches, with a budget that is not reached: rungs ahead change nothing."""

import pytest
from matrix import SOME_SHAPES

from kvpact.errors import BudgetExceeded
from kvpact.testing import CacheContract


class _Budget(CacheContract):
    operations = ("attend", "store", "truncate", "fork", "select", "reorder", "stats", "snapshot")
    shapes = SOME_SHAPES

    rungs = ()

    def options(self, geometry):
        return {"key_offsets": self.key_offsets(geometry), "budget": "1GB", "rungs": self.rungs}

    def test_select_more(self):
        with pytest.raises(BudgetExceeded, match="planned for 3 rows, not 5"):
            super().test_select_more()


@pytest.mark.slow
class TestFromTurboquant(_Budget):
    spec = "turboquant:bits=4"
    rungs = ("turboquant:bits=4", "turboquant:bits=2")


class TestFromExact(_Budget):
    spec = "none"
    rungs = ("none", "turboquant:bits=4", "turboquant:bits=2")
