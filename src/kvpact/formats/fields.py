"""The kinds of fields: packed codes, numbers per token, numbers per group of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvpact.formats.base import Field, Order, Places
from kvpact.formats.bitpack import (
    Blocks,
    block_words,
    pack_blocks_by_token,
    pack_by_channel,
    unpack_blocks_by_token,
    unpack_by_channel,
)
from kvpact.units import TILE

HALF = TILE // 2


def _tiled(values: Tensor, start: int, tokens: int) -> Tensor:
    """Pad `[B, H, T, N]` with zero tokens to whole tiles and return `[B, H, tiles, 32, N]`."""
    batch, heads, count, width = values.shape
    tiles = -(-(start % TILE + count) // TILE)
    padded = values.new_zeros(batch, heads, tiles * TILE, width)
    padded[:, :, start % TILE : start % TILE + count] = values
    return padded.view(batch, heads, tiles, TILE, width)


@dataclass(frozen=True)
class CodesField(Field):
    """Codes of `bits` bits, `[B, H, T, dim]` uint8 on the outside, 32-bit words inside.

    Parameters
    ----------
    bits : int
        1 to 8; 3, 5, 6 and 7 are stored as planes of 4, 2 and 1 bits.
    dim : int
        Codes per token.
    order : {"token", "channel"}
        ``token`` (for K): a word holds consecutive channels of one token, `[2, words, 16]` per
        tile, so that 16 tokens lie side by side. ``channel`` (for V): a word holds consecutive
        tokens of one channel, `[bits, dim]` per tile.
    interleave : {0, 4, 8}
        Bits of the wider codes that kernels make of these; 0 for none (see `formats.bitpack`).
    blocks : tuple
        Channels and bits of blocks of channels that differ in their bits, for ``token``; `dim` and
        `bits` are then their sum and the largest. Empty for one block.
    """

    kind = "codes"
    dtype = torch.int32  # the sign bit of a word is a bit like any other
    tokens = TILE

    name: str
    bits: int
    dim: int
    order: Order
    interleave: int = 0
    blocks: Blocks = ()

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Words of one tile."""
        if self.order == "token":
            return (2, block_words(self._blocks), HALF)
        return (self.bits, self.dim)

    @cached_property
    def places(self) -> Places | None:
        """Words of a token lie 16 apart; of a channel's codes, those of 8 bits are bytes."""
        if self.order == "token":
            _, words, _ = self.shape
            first = (i // HALF * words * HALF * 4 + i % HALF * 4 for i in range(TILE))
            return Places(tuple(first), words, HALF * 4, 4)
        if self.bits != 8:
            return None
        return Places(tuple(i // 4 * self.dim * 4 + i % 4 for i in range(TILE)), self.dim, 4, 1)

    @property
    def _blocks(self) -> Blocks:
        return self.blocks or ((self.dim, self.bits),)

    def _pack(self, tiles: Tensor) -> Tensor:
        if self.order == "token":
            return pack_blocks_by_token(tiles, self._blocks, self.interleave)
        return pack_by_channel(tiles, self.bits, self.interleave)

    def write(self, storage: Tensor, start: int, values: Tensor) -> None:
        """OR the codes into place."""
        words = self._pack(_tiled(values, start, TILE))
        first = start // TILE
        storage[:, :, first : first + words.shape[2]] |= words

    def read(self, storage: Tensor) -> Tensor:
        """Return codes `[B, H, T, dim]` as uint8."""
        if self.order == "token":
            tiles = unpack_blocks_by_token(storage, self._blocks, self.interleave)
        else:
            tiles = unpack_by_channel(storage, self.bits, self.interleave)
        return tiles.flatten(2, 3)

    def clear_from(self, storage: Tensor, start: int) -> None:
        """Zero the codes of later tokens; other bits of their words stay."""
        tile, inside = divmod(start, TILE)
        if inside:
            keep = torch.zeros(1, 1, 1, TILE, self.dim, dtype=torch.uint8, device=storage.device)
            keep[..., :inside, :] = (1 << self.bits) - 1
            storage[:, :, tile] &= self._pack(keep)[:, :, 0]
            tile += 1
        storage[:, :, tile:] = 0


@dataclass(frozen=True)
class TokenField(Field):
    """`count` numbers per token, `[B, H, T, count]` outside, `[count, 32]` per tile inside.

    Parameters
    ----------
    count : int
        Numbers per token.
    dtype : torch.dtype
        Their dtype.
    kind : {"side", "codes"}
        Side information, or (``codes``) what the method stores instead of codes.
    """

    tokens = TILE

    name: str
    count: int
    dtype: torch.dtype = torch.float16
    kind: Literal["codes", "side"] = "side"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Tokens lie side by side."""
        return (self.count, TILE)

    @cached_property
    def places(self) -> Places:
        """Numbers of a token lie a tile apart."""
        size = self.dtype.itemsize
        return Places(tuple(i * size for i in range(TILE)), self.count, TILE * size, size)

    def write(self, storage: Tensor, start: int, values: Tensor) -> None:
        """Copy the numbers into place."""
        end, done = start + values.shape[2], start
        while done < end:
            tile, inside = divmod(done, TILE)
            take = min(TILE - inside, end - done)
            if inside == 0 and end - done >= TILE:
                tiles = (end - done) // TILE
                take = tiles * TILE
                chunk = values[:, :, done - start : done - start + take]
                storage[:, :, tile : tile + tiles] = torch.unflatten(chunk, 2, (tiles, TILE)).mT
            else:
                chunk = values[:, :, done - start : done - start + take]
                storage[:, :, tile, :, inside : inside + take] = chunk.mT
            done += take

    def read(self, storage: Tensor) -> Tensor:
        """Return `[B, H, T, count]`."""
        return storage.mT.flatten(2, 3)

    def clear_from(self, storage: Tensor, start: int) -> None:
        """Zero the numbers of later tokens."""
        tile, inside = divmod(start, TILE)
        if inside:
            storage[:, :, tile, :, inside:] = 0
            tile += 1
        storage[:, :, tile:] = 0


@dataclass(frozen=True)
class GroupField(Field):
    """`count` numbers per group of tokens, `[B, H, groups, count]` outside and inside.

    Parameters
    ----------
    count : int
        Numbers per group.
    tokens : int
        Tokens per group, a multiple of the tile.
    dtype : torch.dtype
        Their dtype.
    """

    kind = "side"
    per_group = True

    name: str
    count: int
    tokens: int
    dtype: torch.dtype = torch.float16

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The numbers of one group."""
        return (self.count,)

    def write(self, storage: Tensor, start: int, values: Tensor) -> None:
        """Copy the numbers of whole groups into place."""
        first = start // self.tokens
        storage[:, :, first : first + values.shape[2]] = values

    def read(self, storage: Tensor) -> Tensor:
        """Return `[B, H, groups, count]`."""
        return storage

    def clear_from(self, storage: Tensor, start: int) -> None:
        """Zero the groups that begin at or after `start`; a group that is cut stays."""
        storage[:, :, -(-start // self.tokens) :] = 0


def base_fields(dim: int, center: int, first: bool) -> tuple[Field, ...]:
    """Return the fields of bases: flags, and the mean of `center` tokens; see `methods.bases`."""
    flags = (CodesField("base", 2, 1, "channel"),) if center or first else ()
    if not center:
        return flags
    return (
        *flags,
        GroupField("mean", dim, center, torch.int8),
        GroupField("mean_step", 1, center),
    )
