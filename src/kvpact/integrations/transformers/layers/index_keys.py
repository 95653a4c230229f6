"""Keys of an index, by which a layer chooses the tokens it attends to: 8-bit integers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvpact.cache.stream.advance import MOST_STEP
from kvpact.errors import GeometryError
from kvpact.integrations.transformers.held.shared import SharedState
from kvpact.integrations.transformers.layers.index_scan import KeysHandle, PackedKeys
from kvpact.quantizers.channels import GROUP, to_integers


class IndexKeys:
    """Keys of an index: 8-bit `index_codes` with scales, an exact `index_tail` of 64 or more."""

    _shared: SharedState
    _index: int
    index_codes: Tensor | None
    index_scale: Tensor | None
    index_tail: Tensor | None

    def forget_keys(self) -> None:
        """Hold no keys."""
        self.index_codes = self.index_scale = self.index_tail = None

    @property
    def indexer_keys(self) -> Tensor | None:
        """Keys of all tokens, `[B, T, D]`; None before the first."""
        tail = self.index_tail
        if tail is None or self.index_codes is None or self.index_scale is None:
            return tail
        return PackedKeys(self.index_codes, self.index_scale, tail).whole()

    @indexer_keys.setter
    def indexer_keys(self, keys: Tensor) -> None:
        self.index_codes = self.index_scale = None
        self.index_tail = keys
        self._pack()

    def append_keys(self, new: Tensor) -> Tensor:
        """Append keys `[B, S, D]`; return all, the new ones exact; for few tokens a handle."""
        tail, new = self.index_tail, new.detach()
        if not new.shape[1]:  # of entries that are not whole yet
            held = self.indexer_keys
            return new if held is None else held
        whole = tail = new if tail is None else torch.cat([tail, new], 1)
        if self.index_codes is not None and self.index_scale is not None:
            compute = self._shared.compute
            requested = "auto" if compute is None else compute.requested
            keys = PackedKeys(self.index_codes, self.index_scale, tail, requested)
            few = new.shape[1] <= MOST_STEP and not new.is_meta
            whole = KeysHandle.of(keys) if few else keys.whole()
        self.index_tail = tail
        self._pack()
        return whole

    def _pack(self) -> None:
        """Make integers of the groups before the last 64 tokens."""
        tail = self.index_tail
        if tail is None or self._shared.specs[self._index].key.name == "none":
            return
        count = tail.shape[1] // GROUP * GROUP - GROUP
        if count > 0:
            codes, scale = to_integers(tail[:, :count], 1, 0)
            if self.index_codes is not None and self.index_scale is not None:
                codes = torch.cat([self.index_codes, codes], 1)
                scale = torch.cat([self.index_scale, scale], 1)
            self.index_codes, self.index_scale = codes, scale
            self.index_tail = tail[:, count:].clone()

    @property
    def key_count(self) -> int | None:
        """Tokens whose keys are held; None before the first."""
        if self.index_tail is None:
            return None
        packed = 0 if self.index_codes is None else self.index_codes.shape[1]
        return packed + self.index_tail.shape[1]

    def cut_keys(self, length: int) -> None:
        """Forget the keys from `length` on; at least one token is held then."""
        keys, codes = self.indexer_keys, self.index_codes
        if keys is None or keys.shape[1] <= length:
            return
        packed = 0 if codes is None else codes.shape[1]
        if codes is not None and self.index_scale is not None and packed >= length:
            kept = (length - 1) // GROUP  # groups; at least one token is exact
            packed = kept * GROUP
            self.index_codes = codes[:, :packed] if kept else None
            self.index_scale = self.index_scale[:, :kept] if kept else None
        self.index_tail = keys[:, packed:length].clone()

    def check_parts(self, parts: Mapping[str, Tensor], tokens: int) -> None:
        """Raise `GeometryError` unless parts of a snapshot are an index of so many tokens."""
        codes, scale, tail = (parts.get(f"index_{x}") for x in ("codes", "scale", "tail"))
        shapes = [None if x is None else tuple(x.shape) for x in (codes, scale, tail)]
        if tail is None:
            fits = codes is scale is None
        elif tail.dim() != 3 or codes is None or scale is None:
            fits = codes is scale is None and tail.dim() == 3 and tail.shape[1] == tokens
        else:
            rows, count, width = tail.shape
            groups, rest = divmod(tokens - count, GROUP)
            wanted = [(rows, tokens - count, width), (rows, groups, width)]
            fits = not rest and shapes[:2] == wanted and codes.dtype == torch.int8
            fits = fits and scale.dtype == torch.float32 and bool(scale.isfinite().all())
        numbers = tail is None or (tail.is_floating_point() and bool(tail.isfinite().all()))
        if not (fits and numbers):
            raise GeometryError(f"the snapshot has an index of {shapes}, not of {tokens} tokens")
