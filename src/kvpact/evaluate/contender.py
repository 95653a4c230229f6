"""Contenders, a package's entries in the leaderboard: caches for transformers, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpact.errors import RegistrationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEADERBOARD_GROUP = "kvpact.leaderboard"
"""The group of entry points through which other packages bring their `Contender`."""

CacheMaker = Callable[["PreTrainedModel"], Any]
"""Called as ``make(model)``; returns an empty cache for ``model(cache=…)``."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A package whose caches are measured for the leaderboard.

    ``benchmarks/leaderboard.py`` measures every cache on the same work: KL, bytes held, time of a
    prompt and of a decode step. A package offers its own through an entry point in the group
    ``kvpact.leaderboard``.

    Parameters
    ----------
    package : str
        The distribution that is measured; its installed version stands in the table.
    caches : mapping of str to callable
        By name, what makes an empty cache of transformers for a model. It imports the package
        itself, so that reading a `Contender` imports nothing.
    requires : tuple of str
        Requirements with exact versions (``name==version``), installed without what they depend
        on into a folder of their own, because packages overwrite each other's modules. Empty
        where the package is installed together with kvpact.
    changed : str
        What was changed to make it run, as a sentence; empty if nothing was.
    note : str
        What a reader has to know of its figures, as a sentence.

    Raises
    ------
    RegistrationError
        There is no cache, a maker can't be called, or a requirement has no exact version.
    """

    package: str
    caches: Mapping[str, CacheMaker]
    requires: tuple[str, ...] = ()
    changed: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        wrong = [name for name, make in self.caches.items() if not callable(make)]
        if wrong or not self.caches:
            raise RegistrationError(
                f"contender {self.package!r}: caches should map names to functions of a model, "
                f"not {self.caches!r}"
            )
        loose = [requirement for requirement in self.requires if "==" not in requirement]
        if loose:
            raise RegistrationError(
                f"contender {self.package!r}: requirements need exact versions (name==version), "
                f"not {', '.join(loose)}"
            )
