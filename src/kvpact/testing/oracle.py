"""The specification of appends and rollbacks: a stream in its simplest form.

`StreamOracle` keeps plain tensors and quantises every token exactly once. The state machines of the
tests compare caches with it after every step; `Stream` (`kvpact/cache/stream/stream.py`) does it
with packed slots, shared segments and a short tail.
"""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from kvpact.arithmetic import tree_sum
from kvpact.kernels import known_by_position
from kvpact.key_offset import KeyOffset
from kvpact.methods import Codec
from kvpact.methods.context import Context
from kvpact.spec import Spec
from kvpact.testing.data import integers


class StreamOracle:
    """K or V of one layer.

    Parameters
    ----------
    codec : Codec
        Encodes whole groups of tokens.
    sinks, window : int
        First and most recent tokens that read back exactly.
    offset : KeyOffset, optional
        What is taken off tokens before they are encoded, and added to what is decoded.

    Attributes
    ----------
    given : Tensor or None
        `[B, H, length, D]`, all tokens as they were given.
    shown : Tensor or None
        `[B, H, packed, D]`, the packed tokens, decoded when they were packed and never again.
    groups : list of dict
        The arrays of each packed group, of a codec with groups.
    offset : RowOffset, RowRotation or None
        The offset, and which token of each row stands at position 0.

    Notes
    -----
    The rules are these:

    1. A token is packed once, when it leaves the window, together with the other tokens of its
       unit: a group, or after a window as many groups as fill a tile. Units stand at absolute
       positions.
    2. Tokens that are not packed are known exactly.
    3. A rollback removes tokens. What was packed stays; the tokens that follow in a group that it
       cut are coded with the group's side information.
    4. In a new group, the mean of the other tokens stands in the place of sinks and padding.
    5. A codec that learns does so from the first tokens of the cache, as given, once they have all
       left the window; nothing makes it learn again, and until then nothing is packed.
    6. Reading gives sinks, and what is not packed, as they were given and the rest as packed.
    """

    def __init__(
        self, codec: Codec, sinks: int, window: int, offset: KeyOffset | None = None
    ) -> None:
        self.offset = known_by_position(codec, True, offset)
        self.codec, self.sinks, self.window = codec, sinks, window
        self.given: Tensor | None = None
        self.shown: Tensor | None = None
        self.groups: list[dict[str, Tensor]] = []

    @property
    def length(self) -> int:
        """Tokens held."""
        return 0 if self.given is None else self.given.shape[2]

    @property
    def packed(self) -> int:
        """Tokens that have slots."""
        return 0 if self.shown is None else self.shown.shape[2]

    def append(self, x: Tensor, padding: Sequence[int]) -> None:
        """Store tokens `[B, H, new, D]` of rows with so much left padding."""
        self.given = x if self.given is None else torch.cat([self.given, x], 2)
        length, group = self.length, self.codec.group
        if self.shown is None:
            self.shown = x[:, :, :0]
        unit = group * -(-32 // group) if self.window else group
        out = max(length - self.window, 0) // unit * unit
        if not self.codec.ready and out < self.codec.learns_from:
            return
        if group == 1 and self.packed < out:
            self._show(self.codec.encode(self._coded(self.packed, out)))
        while group > 1 and self.packed < out:
            inside = self.packed % group
            if inside:
                self._continue(self._coded(self.packed, self.packed + group - inside), inside)
                continue
            if not self.codec.ready:
                known = Context(integers(*padding), self.sinks)
                self.codec = self.codec.learn(self._coded(0, self.codec.learns_from), known)
            self.groups.append(self.codec.encode(self._group(padding)))
            self._show(self.groups[-1])

    def _coded(self, start: int, end: int) -> Tensor:
        assert self.given is not None
        x = self.given[:, :, start:end].float()
        return x if self.offset is None else self.offset.without(x, start)

    def _group(self, padding: Sequence[int]) -> Tensor:
        """Return the next group without its sinks and padding."""
        assert self.given is not None
        start, rows = self.packed, []
        coded = self._coded(start, start + self.codec.group)
        for row, first in enumerate(padding):
            x = coded[row : row + 1].clone()
            left_out = min(max(first + self.sinks - start, 0), x.shape[2])
            x[:, :, :left_out] = 0
            mean = tree_sum(x, 2) / max(x.shape[2] - left_out, 1)
            x[:, :, :left_out] = mean
            rows.append(x)
        dtype = self.given.dtype if self.offset is None else torch.float32
        return torch.cat(rows).to(dtype).float()

    def _continue(self, x: Tensor, inside: int) -> None:
        """Add tokens to a group that a rollback has cut, with the group's side information."""
        arrays = self.groups[-1]
        frozen = {field.name: arrays[field.name] for field in self.codec.fields if field.per_group}
        for name, new in self.codec.encode(x, frozen).items():
            arrays[name] = arrays[name].clone()
            arrays[name][:, :, inside : inside + new.shape[2]] = new
        self._show(arrays, inside, inside + x.shape[2])

    def _show(self, arrays: dict[str, Tensor], start: int = 0, end: int | None = None) -> None:
        assert self.given is not None and self.shown is not None
        y = self.codec.transform.inverse(self.codec.decode(arrays))[:, :, start:end]
        if self.offset is not None:
            y = self.offset.put_back(y.clone(), self.packed)
        self.shown = torch.cat([self.shown, y.to(self.given.dtype)], 2)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        if self.given is None or self.shown is None:
            return
        self.given = self.given[:, :, :length]
        self.shown = self.shown[:, :, :length]
        del self.groups[-(-self.packed // self.codec.group) :]

    def select(self, indices: Sequence[int]) -> None:
        """Keep some rows, in this order; rows may repeat."""
        if self.given is None or self.shown is None:
            return
        rows = list(indices)
        self.given, self.shown = self.given[rows], self.shown[rows]
        self.groups = [{name: array[rows] for name, array in g.items()} for g in self.groups]
        if self.offset is not None:
            origin = self.offset.origin
            self.offset = self.offset.begun_at(origin and tuple(origin[i] for i in rows))

    def read(self, padding: Sequence[int]) -> Tensor:
        """Return what a cache should show, `[B, H, length, D]`; sinks follow each row's padding."""
        assert self.given is not None and self.shown is not None
        x = self.given.clone()
        x[:, :, : self.packed] = self.shown
        for row, first in enumerate(padding):
            part = slice(first, first + self.sinks)
            x[row, :, part] = self.given[row, :, part]
        return x


class LayerOracle:
    """One layer: two streams, and each row's padding.

    Parameters
    ----------
    spec, dim, v_dim, dtype
        Of the cache, and of its K and V.
    offset : KeyOffset, optional
        What keys are encoded without; each row's first token that is no padding is at position 0.
    """

    def __init__(
        self, spec: Spec, dim: int, v_dim: int, dtype: torch.dtype, offset: KeyOffset | None = None
    ) -> None:
        self._offset = offset
        self._spec, self._widths, self._dtype = spec, (dim, v_dim), dtype
        self.reset()

    def reset(self) -> None:
        """Forget everything, padding included."""
        key, value = self._spec.key, self._spec.value
        k, v = self._spec.codecs(*self._widths, self._dtype)
        self.k = StreamOracle(k, key.sinks, key.window, self._offset)
        self.v = StreamOracle(v, value.sinks, value.window)
        self.padding: list[int] = []

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.k.length

    @property
    def batch(self) -> int | None:
        """Rows; None while nothing is held."""
        return None if self.k.given is None else self.k.given.shape[0]

    def append(self, k: Tensor, v: Tensor, padding: Sequence[int] | None = None) -> None:
        """Store tokens; `padding` is known with a row's first tokens."""
        self.padding = list(padding or self.padding or [0] * k.shape[0])
        if self.k.offset is not None and not self.length:
            self.k.offset = self.k.offset.begun_at(tuple(self.padding))
        self.k.append(k, self.padding)
        self.v.append(v, self.padding)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; never extends."""
        if length < self.length:
            self.k.truncate(length)
            self.v.truncate(length)
            self.padding = self.padding if length else [0] * len(self.padding)

    def keep(self, index: Tensor) -> None:
        """Keep some tokens alone, `[B, H, n]`; what is after a gap is given again, as it shows."""
        places = torch.arange(index.shape[2], dtype=torch.int64, device=index.device)
        first = int((index == places).all(0).all(0).cumprod(0).sum())
        if index.shape[2] == self.length:
            return
        shown = [x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])) for x in self.read()]
        self.truncate(first)
        if index.shape[2] > first:
            self.append(shown[0][:, :, first:], shown[1][:, :, first:])

    def select(self, indices: Sequence[int]) -> None:
        """Keep some rows, in this order; rows may repeat."""
        self.k.select(indices)
        self.v.select(indices)
        self.padding = [self.padding[i] for i in indices]

    def fork(self) -> Self:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return K and V of all tokens held, as a cache should show them."""
        return self.k.read(self.padding), self.v.read(self.padding)
