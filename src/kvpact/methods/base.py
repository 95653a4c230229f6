"""Methods: frozen dataclasses that make a codec for K and one for V."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvpact.errors import NonFiniteError, RegistrationError, SpecError
from kvpact.formats import Field, Order
from kvpact.formats.form import Form
from kvpact.key_rotation import KeyRotation
from kvpact.methods.context import Context
from kvpact.quantizers.checks import checks_are_deferred, require
from kvpact.spec import option_types
from kvpact.transforms import IDENTITY, Transform

Arrays = Mapping[str, Tensor]


class Codec(ABC):
    """Encodes and decodes one stream (K or V of a layer).

    Attributes
    ----------
    fields : tuple of Field
        What is stored; the arrays that `encode` returns and `decode` takes go by their names.
    group : int
        Tokens that are quantised together; 1, or a multiple of the tile. Groups stand at absolute
        positions; `encode` gets whole ones.
    transform : Transform
        `decode` returns transformed vectors; `transform.inverse` leads back.
    has_bias : bool
        Whether `decode_bias` gives a part.
    exact : bool
        Whether the numbers are kept as they are, or cast: then nothing is taken off them before.
    learns_from : int
        First tokens of a cache that `learn` wants; 0 for none, or, of a codec that is not `ready`,
        for all that are encoded first.
    joint : bool
        Whether all heads of a token are encoded together, into bytes that belong to all of them.
    rotation : KeyRotation or None
        Keys are encoded as they are before this rotation by their positions; the codec's own
        transform is none then.
    form : Form or None
        `encode` and `decode` in terms that kernels read; the two remain the definition. None where
        they are torch's alone. Its fields are the codec's.
    max_abs, max_norm : float
        The largest magnitude of a number, and the largest L2 norm of a vector, that `encode` takes
        whatever else stands in its group. A codec with groups encodes later than its tokens
        come, so it has to declare what it can hold; others may leave the refusal to `encode`.

    Raises
    ------
    RegistrationError
        The class compares or hashes its codecs by value, as a dataclass does. What kernels prepare
        for a codec is kept under the codec itself, so two codecs are never the same key; write
        `@dataclass(eq=False)`.
    """

    fields: tuple[Field, ...]
    group: int = 1
    transform: Transform = IDENTITY
    has_bias: bool = False
    exact: bool = False
    learns_from: int = 0
    joint: bool = False
    rotation: KeyRotation | None = None
    max_abs: float = math.inf
    max_norm: float = math.inf
    form: Form | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse a class that compares by value."""
        if cls.__eq__ is not object.__eq__ or cls.__hash__ is not object.__hash__:
            raise RegistrationError(
                f"{cls.__name__} compares its codecs by value, but a codec has to be a key of its "
                "own: write @dataclass(eq=False), or leave out __eq__ and __hash__"
            )
        return super().__new__(cls)

    def check_range(self, x: Tensor, size: float | None = None) -> None:
        """Raise `NonFiniteError` where a vector of `x` is beyond the range; `size`: its largest."""
        if self.max_abs == self.max_norm == math.inf or x.is_meta or not x.numel():
            return
        if checks_are_deferred():
            norms = torch.linalg.vector_norm(x.to(torch.float32), dim=-1)
            good = (x.abs() <= self.max_abs).all() & (norms <= self.max_norm).all()
            require(good, lambda: NonFiniteError("beyond the range of the method"))
            return
        if size is None:
            low, high = torch.aminmax(x)
            size = max(-float(low), float(high))
        what, limit = "a number", self.max_abs
        # No vector is longer than its largest number times sqrt(D).
        if size <= limit and size * math.sqrt(x.shape[-1]) > self.max_norm:
            size = float(torch.linalg.vector_norm(x.to(torch.float32), dim=-1).max())
            what, limit = "the norm of a vector", self.max_norm
        if not size <= limit:
            raise NonFiniteError(
                f"{what} is {size:.4g}, beyond the {limit:.6g} that this method can hold; "
                "scale the input down or keep this layer at 'none'"
            )

    @abstractmethod
    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Encode tokens.

        Parameters
        ----------
        x : Tensor
            `[B, H, T, D]` finite fp32, T a multiple of `group`.
        frozen : mapping, optional
            For tokens of a group that a rollback has cut: the group's side information
            (`[B, H, 1, …]` by field name), to be used as it is. T is then any number, and the
            fields of the group are not returned.

        Returns
        -------
        dict
            An array by field name: `[B, H, T, …]`, or `[B, H, T / group, …]` for group fields.
        """

    def learn(self, x: Tensor, context: Context) -> Codec:
        """Return a codec that learnt from `[B, H, T, D]` fp32 tokens; see `learns_from`."""
        return self

    @abstractmethod
    def decode(self, arrays: Arrays) -> Tensor:
        """Return the transformed vectors, `[B, H, T, D]` fp32, of what `encode` returned."""

    def state(self) -> dict[str, Tensor]:
        """Return what the codec has learnt from tokens (see `methods.fitted`); mostly nothing."""
        return {}

    def state_bytes(self, heads: int) -> int:
        """Return the bytes that `state` will have for `heads` heads, once it is there."""
        return 0

    @property
    def unplanned(self) -> str:
        """The bytes that only the tokens decide, in words; empty where there are none."""
        return ""

    @property
    def ready(self) -> bool:
        """True once the codec has learnt all that it learns from tokens."""
        return True

    def require_fitted(self) -> None:
        """Raise `SpecError` if the codec would learn from the tokens that it encodes first."""
        return None

    def decode_bias(self, arrays: Arrays) -> Tensor:
        """Return the part of `decode` that belongs to `DequantResult.logit_bias`."""
        raise NotImplementedError(f"{type(self).__name__} has no bias")


class NothingCodec(Codec):
    """Stores vectors of width 0, in no bytes: keys that are made of values."""

    exact = True

    def __init__(self) -> None:
        self.fields = ()

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def decode(self, arrays: Arrays) -> Tensor:
        """Is never called: who decodes no numbers calls nobody."""
        raise NotImplementedError("vectors of width 0 are not decoded")


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Base of all methods; options are the fields of the dataclass.

    Parameters
    ----------
    sinks : int
        First tokens of each sequence that are also held exactly.
    window : int
        Most recent tokens, held exactly: tokens are packed when they leave the window.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    paper: ClassVar[str] = ""
    key_only: ClassVar[tuple[str, ...]] = ()
    """Options that change the codec for K alone."""
    added: ClassVar[tuple[str, ...]] = ()
    """Options that came after the first files of this version: they are left out of JSON where they
    have their defaults, so that older files, and the keys of older prefixes, are the same."""
    examples: ClassVar[Mapping[str, float]] = {}
    """Specs to test the method with, the most telling one first, and the largest relative error
    `|decoded - x| / |x|` over N(0, 1) tokens of each: what `kvpact.testing` makes its table of."""
    variants: ClassVar[Mapping[str, float]] = {}
    """Further options of the same codecs, with their errors, for tests of the codecs alone."""

    learnt_by: ClassVar[tuple[str, ...] | None] = None
    """Options that what codecs learn depends on; None for all but `sinks` and `window`."""

    sinks: int = 4
    window: int = 64

    def __post_init__(self) -> None:
        for option, kind in option_types(type(self)).items():
            self.check(option, type(getattr(self, option)) is kind, f"of type {kind.__name__}")
        for option in ("sinks", "window"):
            self.check(option, 0 <= getattr(self, option) <= 65_536, "a number from 0 to 65536")

    def check(self, option: str, good: bool, wanted: str) -> None:
        """Raise `SpecError` unless an option is good."""
        if not good:
            value = getattr(self, option)
            raise SpecError(f"{self.name!r}: {option}={value!r} should be {wanted}")

    def check_choice(self, option: str, choices: Iterable[Any]) -> None:
        """Raise `SpecError` unless an option is one of `choices`."""
        choices = list(choices)
        value = getattr(self, option)
        good = value in choices and type(value) in {type(choice) for choice in choices}
        self.check(option, good, "one of " + ", ".join(map(str, choices)))

    def learnt_name(self) -> str:
        """Return a name of what codecs learn: methods with equal names learn the same."""
        options = self.learnt_by
        if options is None:
            own = option_types(type(self))
            options = tuple(name for name in own if name not in ("sinks", "window"))
        given = ",".join(f"{name}={getattr(self, name)}" for name in options)
        return f"{self.name}/{self.version}" + (f":{given}" if given else "")

    def codec(self, dim: int, dtype: torch.dtype, order: Order) -> Codec:
        """Return the codec for keys (``token``) or values (``channel``), where there is one."""
        raise NotImplementedError(f"{type(self).__name__} has neither codec nor {order!r} codecs")

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys of width `dim`, given in `dtype`."""
        return self.codec(dim, dtype, "token")

    def value_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for values of width `dim`, given in `dtype`."""
        return self.codec(dim, dtype, "channel")


def bytes_per_slot(codec: Codec) -> float:
    """Bytes of packed codes and side information per token and head."""
    return sum(field.bytes_per_token for field in codec.fields)


def make_codec(method: Any, key: bool, dim: int, dtype: torch.dtype) -> Codec:
    """Return a method's codec for K or V of a width, which may be 0 of keys."""
    if not dim:
        return NothingCodec()
    made: Codec = method.key_codec(dim, dtype) if key else method.value_codec(dim, dtype)
    return made
