"""How numbers become the slots of a stream, told in a way that compiled kernels understand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvpact.formats.packed import TrellisForm


@dataclass(frozen=True)
class Encoding:
    """What a codec's `encode` does; `encode` itself is the definition, to the bit.

    Fields are known by their names: ``codes``, ``scale``, ``zero``, ``mean`` and ``mean_step``,
    ``balance``, ``base``.

    Parameters
    ----------
    kind : {"codebook", "symmetric", "affine", "channel", "float8", "balanced", "trellis"}
        Levels of a codebook (`quantizers.codebooks`); GGUF's integers, or integers with a zero
        point (`quantizers.uniform`), per token; the latter per channel and group of tokens; 8-bit
        floating point; KVarN's tiles; a trellis (`quantizers.trellis`).
    bits : int
        Width of the codes.
    limit : float
        Tokens without a larger magnitude can be encoded, whatever else they are.
    choice : {"ls", "l2", "unbiased", "e4m3", "e5m2", ""}
        The scale of a codebook, or the kind of 8-bit number.
    group : int
        Tokens that are encoded together; 1 for none. With a codebook, their mean is taken out.
    channels : int
        Channels that share a scale; 0 for all.
    levels : tuple of float
        The codebook.
    trellis : TrellisForm or None
        What there is to know of a trellis.
    """

    kind: Literal["codebook", "symmetric", "affine", "channel", "float8", "balanced", "trellis"]
    bits: int
    limit: float
    choice: str = ""
    group: int = 1
    channels: int = 0
    levels: tuple[float, ...] = ()
    trellis: TrellisForm | None = None

    @property
    def boundaries(self) -> tuple[float, ...]:
        """What is between the levels."""
        book = torch.tensor(self.levels, dtype=torch.float32, device="cpu")
        return tuple(((book[1:] + book[:-1]) / 2).tolist())


def search_tree(boundaries: tuple[float, ...]) -> list[float]:
    """Return `2**n - 1` ascending boundaries as a search tree: root at 1, ends of i at 2i, 2i+1."""
    count = len(boundaries) + 1
    tree, width = [0.0] * count, count
    for first in (1 << depth for depth in range(count.bit_length() - 1)):
        for i in range(first):
            tree[first + i] = boundaries[i * width + width // 2 - 1]
        width //= 2
    return tree
