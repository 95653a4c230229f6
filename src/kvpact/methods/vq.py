"""Vector quantisation: sub-vectors as words of a codebook that k-means fits (product VQ).

Rotate (random signs, Hadamard), normalise to a mean square of 1, cut the D coordinates into
sub-vectors of `dims`, and replace each by the nearest of `codebook_size` words. After the rotation
all positions are equal, so one codebook serves them all. With ``stages=2`` a second codebook codes
the residual (residual VQ). The fp16 scale of a token is the least-squares one, `<c, y> / |c|^2`.

Words are fp16. A codebook is fitted to 64 sub-vectors per word, but to at least 4,096 and at most
262,144 of them; where the tokens give fewer, samples of N(0, 1) are added, which is what rotated
coordinates look like. Bits per value: stages log2(codebook_size) / dims + 16/D, where logarithm and
number of sub-vectors are rounded up, and K's codes fill whole words of 32 bits. The codebook comes
on top. See product quantisation (Jegou, Douze, Schmid, TPAMI 2011).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpact.arithmetic import square_root, tree_sum
from kvpact.errors import NonFiniteError
from kvpact.formats import CodesField, Field, Order, TokenField
from kvpact.methods.base import Arrays, Codec
from kvpact.methods.fitted import FittedCodec, FittedMethod
from kvpact.quantizers.kmeans import kmeans, nearest
from kvpact.quantizers.numbers import half
from kvpact.transforms import RandomHadamard

_LOW = 8
_MOST_VECTORS = 1 << 18


class VectorCodec(FittedCodec):
    """Indices of words; of more than 8 bits the low and the high ones are fields of their own."""

    def __init__(
        self, dim: int, codebook_size: int, dims: int, stages: int, seed: int, order: Order
    ) -> None:
        super().__init__(dim)
        self._size, self._dims, self._stages, self._seed = codebook_size, dims, stages, seed
        self.transform = RandomHadamard(dim, seed)
        self._bits = (codebook_size - 1).bit_length()
        count = -(-dim // dims)
        fields: list[Field] = []
        for stage in range(stages):
            fields.append(CodesField(f"low{stage}", min(self._bits, _LOW), count, order))
            if self._bits > _LOW:
                fields.append(CodesField(f"high{stage}", self._bits - _LOW, count, order))
        self.fields = (*fields, TokenField("scale", 1))

    def state_bytes(self, heads: int) -> int:
        """Return the bytes of the codebooks."""
        return self._stages * self._size * self._dims * torch.float16.itemsize

    def _cut(self, y: Tensor) -> Tensor:
        """Cut `[..., D]` into sub-vectors `[..., D / dims, dims]`, the last one padded."""
        y = torch.nn.functional.pad(y, (0, -self._dim % self._dims))
        return torch.unflatten(y, -1, (-1, self._dims))

    def _normal(self, y: Tensor) -> Tensor:
        norm = square_root(tree_sum(y.square()))
        safe = torch.where(norm == 0, torch.ones_like(norm), norm)
        return y * (math.sqrt(self._dim) / safe)

    def _learn(self, x: Tensor) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        vectors = self._cut(self._normal(self.transform.forward(x))).flatten(0, -2)
        if not torch.isfinite(vectors).all():
            raise NonFiniteError("calibration tokens are too large to be rotated")
        wanted = min(max(64 * self._size, 4096), _MOST_VECTORS)
        if len(vectors) > wanted:
            count = len(vectors)
            order = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")
            vectors = vectors[order[:wanted].to(vectors.device)]
        missing = (wanted - len(vectors), self._dims)
        more = torch.randn(missing, generator=generator, dtype=torch.float32, device="cpu")
        vectors, codebooks = torch.cat([vectors, more.to(vectors.device)]), []
        for _ in range(self._stages):
            words = kmeans(vectors, self._size, generator).to(torch.float16)
            codebooks.append(words)
            points = words.to(torch.float32)
            vectors = vectors - points[nearest(vectors, points)]
        return {"codebooks": torch.stack(codebooks)}

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        self._check(set(state) == {"codebooks"}, ", ".join(sorted(state)))
        books = state["codebooks"]
        wanted = (self._stages, self._size, self._dims)
        self._check(books.shape == wanted and books.is_floating_point(), "shape of the codebooks")
        self._check(bool(torch.isfinite(books).all()), "numbers of the codebooks")

    def _encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        y = self.transform.forward(x)
        left, out = self._cut(self._normal(y)), {}
        total = torch.zeros_like(left)
        for stage, words in enumerate(self._state["codebooks"].to(torch.float32)):
            index = nearest(left.flatten(0, -2), words).view(left.shape[:-1])
            points = words[index]
            left, total = left - points, total + points
            out[f"low{stage}"] = (index & ((1 << _LOW) - 1)).to(torch.uint8)
            if self._bits > _LOW:
                out[f"high{stage}"] = (index >> _LOW).to(torch.uint8)
        points = total.flatten(-2)[..., : self._dim]
        energy = tree_sum(points.square())
        safe = torch.where(energy == 0, torch.ones_like(energy), energy)
        out["scale"] = half(tree_sum(points * y) / safe, "scale of a token")
        return out

    def _decode(self, arrays: Arrays) -> Tensor:
        total: Tensor | None = None
        for stage, words in enumerate(self._state["codebooks"].to(torch.float32)):
            index = arrays[f"low{stage}"].to(torch.int32)
            if self._bits > _LOW:
                index = index | (arrays[f"high{stage}"].to(torch.int32) << _LOW)
            # Slots that nobody wrote may hold anything; they must not lead out of the codebook.
            points = words[index.clamp(max=self._size - 1)]
            total = points if total is None else total + points
        assert total is not None
        return total.flatten(-2)[..., : self._dim] * arrays["scale"].to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class VectorQuantization(FittedMethod):
    """Sub-vectors as words of a codebook that k-means fits to the first tokens.

    Parameters
    ----------
    codebook_size : int
        Words, 2 to 65,536. Each takes `2 dims` bytes, and large codebooks are slow to fit.
    dims : int
        Coordinates of a sub-vector, 1 to 64.
    stages : {1, 2}
        With 2 the residual is coded, too, by a codebook of its own.
    seed : int
        Chooses the rotation's signs and the start of k-means.
    """

    name: ClassVar[str] = "vq"
    examples: ClassVar[Mapping[str, float]] = {"vq:codebook_size=16": 0.61}
    variants: ClassVar[Mapping[str, float]] = {
        "vq:codebook_size=256": 0.33,
        "vq:codebook_size=300,dims=4": 0.33,
        "vq:codebook_size=16,dims=2,stages=2": 0.128,
        "vq:codebook_size=5,dims=3": 0.71,
    }
    codebook_size: int = 256
    dims: int = 4
    stages: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("codebook_size", 2 <= self.codebook_size <= 65_536, "a number from 2 to 65536")
        self.check("dims", 1 <= self.dims <= 64, "a number from 1 to 64")
        self.check_choice("stages", (1, 2))
        self.check("seed", 0 <= self.seed < 1 << 63, "a number from 0 to 2**63 - 1")

    def codec(self, dim: int, dtype: torch.dtype, order: Order) -> Codec:
        """Return the codec for keys or for values, not fitted yet."""
        return VectorCodec(dim, self.codebook_size, self.dims, self.stages, self.seed, order)
