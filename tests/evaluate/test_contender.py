"""What is no contender for the leaderboard is refused."""

import pytest

from kvpact.errors import RegistrationError
from kvpact.evaluate import Contender


@pytest.mark.parametrize(("fields", "message"), [
    ({"caches": {}}, "caches should map names"),
    ({"caches": {"a": 3}}, "caches should map names"),
    ({"caches": {"a": print}, "requires": ("numpy", "x==1")}, "exact versions .* not numpy"),
])  # fmt: skip
def test_what_is_no_contender_is_refused(fields, message):
    with pytest.raises(RegistrationError, match=message):
        Contender(package="mine", **fields)
