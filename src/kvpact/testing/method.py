"""`MethodContract`: what a method has to keep to."""

from __future__ import annotations

from kvpact.testing.method_codec import CodecChecks
from kvpact.testing.method_slots import SlotChecks
from kvpact.testing.method_spec import SpecChecks


class MethodContract(SpecChecks, CodecChecks, SlotChecks):
    """Inherit this in a test module and set `spec`; pytest does the rest.

    Attributes
    ----------
    spec : str
        The spec to be tested, e.g. ``"mine:bits=4"``; a slash for unlike K and V is fine.
    max_relative_error : float
        Limit of `|decoded - x| / |x|` over normally distributed tokens; 1.0 (better than storing
        nothing) unless a subclass knows better.

    Notes
    -----
    A conforming method round-trips as text and JSON; declares every array that it stores; is
    deterministic, independent of other rows, heads and groups, and stores the same bytes however
    the tokens are cut into pieces; counts all its bytes; never reads unused slots; returns finite
    numbers or a named error; and codes on after a rollback has cut one of its groups.
    """
