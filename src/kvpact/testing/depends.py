"""Dependencies of checks on codecs, so that not every spec has to go through every check."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

Reason = Literal["bytes", "groups", "bias", "pages"]
Check = TypeVar("Check", bound=Callable[..., Any])


def depends_on(reason: Reason) -> Callable[[Check], Check]:
    """Say of a check of a kit what of a codec it depends on; all others depend on its facts alone.

    Parameters
    ----------
    reason : str
        ``bytes``: what the codec stores, so that every spec has to pass. ``groups``, ``bias``: the
        same, but the check is skipped where a codec has no groups of tokens, or no bias. ``pages``:
        the bytes in pages, of all checks on pages.
    """

    def said(check: Check) -> Check:
        check.depends_on = reason  # type: ignore[attr-defined]
        return check

    return said


def without(contract: type, keep: Callable[[str], bool]) -> dict[str, None]:
    """Return members of a subclass of a contract that leave out all checks but some.

    Parameters
    ----------
    contract : type
        A class of checks.
    keep : callable
        Given what a check depends on (`depends_on`; empty for others), returns whether it stays.
    """
    names = (name for name in dir(contract) if name.startswith("test_"))
    return {
        name: None for name in names if not keep(getattr(getattr(contract, name), "depends_on", ""))
    }
