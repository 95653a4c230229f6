"""The codec of `pca`: components of a token of all heads as one string of bits."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.arithmetic import divide, square_root, tree_sum
from kvpact.errors import GeometryError, NonFiniteError
from kvpact.formats import TokenField
from kvpact.formats.bitpack import pack_bits, unpack_bits
from kvpact.key_rotation import KeyRotation
from kvpact.methods.base import Arrays
from kvpact.methods.fitted import Calibrating, FittedCodec
from kvpact.quantizers import trellis
from kvpact.quantizers.numbers import cast, from_e5m3, half, to_e5m3
from kvpact.transforms.subspace import expand, project

SMALL = 0.45
"""A token is of the second kind if its value's norm is less than so much of the median."""
LEAST_WEIGHT = 0.05
_RIDGE = 0.01
_LEAST_DEVIATION = 1e-5  # of the largest one


def principal_components(
    x: Tensor, small: Tensor | None = None, weight: Tensor | None = None
) -> dict[str, Tensor]:
    """Return means, weights, components and deviations of tokens `[N, C]` of all heads.

    `small` `[N]`: tokens with a mean of their own; `weight` `[C]`: 1 if omitted.
    """
    width = x.shape[1]
    ones = x.new_ones(width, dtype=torch.float32)
    w = half(ones if weight is None else weight.float().to(x.device), "weight of a channel")
    tokens, wide = x.double(), w.double()
    first = second = tokens.mean(0)
    if small is not None and int(small.sum()) > 1 and not bool(small.all()):
        first, second = tokens[~small].mean(0), tokens[small].mean(0)
    means = cast(torch.stack([first, second]), torch.float32, "mean of tokens")
    first, second = ((tokens - mean) * wide for mean in means.double())
    nearer = second.square().sum(1, keepdim=True) < first.square().sum(1, keepdim=True)
    z = torch.where(nearer, second, first)
    # LAPACK may not converge where numbers are near the ends of their range.
    size = z.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    z = z / size
    covariance = z.mT @ z / len(z)
    covariance += torch.diag_embed(_RIDGE * covariance.diagonal())
    variance, basis = torch.linalg.eigh(covariance)
    deviation = variance.flip(0).clamp(min=0).sqrt()
    largest = deviation[0]
    if not largest > 0:
        deviation, size = torch.ones_like(deviation), torch.ones_like(size)
    deviation = deviation.clamp(min=float(largest) * _LEAST_DEVIATION) * size
    deviation = deviation.clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "mean": means,
        "weight": w,
        "basis": basis.flip(1).to(torch.float16).contiguous(),
        "deviation": cast(deviation, torch.float32, "deviation of a component"),
    }


def key_weights(energy: Tensor, channels: Tensor) -> Tensor:
    """Return the weights of keys by squares of queries `[H_kv, D]`, one for each RoPE pair."""
    paired = energy.double().clone()
    if len(channels):
        first, second = channels.long().unbind(1)
        both = (paired[:, first] + paired[:, second]) / 2
        paired[:, first], paired[:, second] = both, both
    return _relative(paired.sqrt())


def value_weights(energy: Tensor) -> Tensor:
    """Return the weights of values, `[H_kv D_v]` fp32, by squares of outputs `[H_kv, D_v]`."""
    return _relative(energy.double().sqrt())


def _relative(weight: Tensor) -> Tensor:
    if weight.dim() != 2 or not weight.numel():
        raise GeometryError(f"energies are [H_kv, D], not {list(weight.shape)}")
    if not bool(weight.isfinite().all()):
        raise NonFiniteError("energies hold NaN, infinity or negative numbers")
    size = weight.square().mean().sqrt()
    relative = weight / size if size > 0 else torch.ones_like(weight)
    return relative.clamp(min=LEAST_WEIGHT).flatten().float()


MOST_BITS = 6
LEAST_BYTES = 3
"""Of a token and head: scale, flag, and a bit for each number of the shortest trellis."""
_SIDE = (8, 2)  # bits of the scale and of the flag, in front of the codes
_DISTORTION = (1.0, 0.2957, 0.0827, 0.0225, 0.0062, 0.0017, 0.00045)
_ROTATION = ("frequencies", "channels")
_DTYPES = {
    "mean": torch.float32,
    "weight": torch.float16,
    "basis": torch.float16,
    "deviation": torch.float32,
}


_BETWEEN = 0.7
"""Error between levels, relative to that of normal numbers: components are rarely as wide."""
_BASES = 3  # the flag has room for four
_AT_A_TIME = 256
_FACTORS = tuple(2 ** (j / 4) for j in range(-4, 13))


class _Tables(NamedTuple):
    """The tables of a fitted codec: C numbers of a token, n components with bits.

    `bases` `[4, C]`: both means, and twice nothing; `basis` `[1, C, n]`; of each component what its
    error counts, its largest level, and its expected error at a scale of 1.
    """

    bases: Tensor
    weight: Tensor
    basis: Tensor
    deviation: Tensor
    importance: Tensor
    largest: Tensor
    distortion: Tensor


class _Chosen(NamedTuple):
    """Of each token: the number of its base, scale and components, `[B, T, 1 or n]`."""

    flag: Tensor
    size: Tensor
    y: Tensor


class PcaCodec(FittedCodec):
    """All heads of a token together, `size` bytes each; keys have a rotation in the state."""

    joint = True

    def __init__(self, dim: int, size: int, states: int, key: bool) -> None:
        super().__init__(dim)
        self._states, self._key, self._size, self.before_rope = states, key, size, key
        self._bits: list[int] = []
        self.fields = (TokenField("codes", self._size, torch.uint8, "codes"),)

    def state_bytes(self, heads: int) -> int:
        """Return the bytes of means, weights, components and deviations; RoPE's come on top."""
        width = heads * self._dim
        return width * (2 * 4 + 2 + 2 * width + 4)

    @property
    def unplanned(self) -> str:
        """A rotation is a few bytes more."""
        return "pca: the frequencies of RoPE, with calibration" if not self.fitted else ""

    def _learn(self, x: Tensor) -> dict[str, Tensor]:
        return principal_components(_joint(x))

    def calibrated(self, x: Tensor, known: Calibrating) -> PcaCodec:
        """Return a codec with weights and two means, for keys as they are before RoPE."""
        self.fit(x[:, :, :1])  # checks the shape
        heads, sinks = x.shape[1], known.sinks if x.shape[2] > known.sinks else 0
        norm = _joint(known.v[:, :, sinks:]).double().square().sum(1).sqrt()
        small = norm < SMALL * norm.median()  # attention sinks inside the text
        weight, rotation = None, known.rotation if self._key else None
        if rotation is not None:
            rotation.check(self._dim)
        channels = x.new_zeros(0, 2) if rotation is None else rotation.channels
        if self._key:
            energy = known.query_energy[:, :, sinks:].double().mean((0, 2))
            weight = key_weights(energy, channels)
        elif known.output_energy is not None:
            weight = value_weights(known.output_energy)
        if weight is not None and len(weight) != heads * self._dim:
            raise GeometryError(f"{len(weight)} weights for {heads} heads of width {self._dim}")
        state = principal_components(_joint(x[:, :, sinks:]), small, weight)
        if rotation is None:
            return self.restore(state)
        positions = torch.arange(x.shape[2], dtype=torch.int64, device=x.device).view(1, 1, -1)
        x = rotation.turn(x.to(torch.float32, copy=True), positions, back=True)
        turned = principal_components(_joint(x[:, :, sinks:]), small, weight)
        # Some models leave RoPE out in some layers: then turning back scatters the keys.
        if turned["deviation"].log().sum() > state["deviation"].log().sum():
            return self.restore(state)
        return self.restore(turned | dict(zip(_ROTATION, rotation, strict=True)))

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        names, rotated = {"mean", "weight", "basis", "deviation"}, set(_ROTATION)
        known = [names, names | rotated] if self._key else [names]
        self._check(set(state) in known, ", ".join(sorted(state)))
        width = state["deviation"].numel()
        shapes = {"mean": (2, width), "weight": (width,), "basis": (width, width)}
        for name, shape in {**shapes, "deviation": (width,)}.items():
            tensor = state[name]
            good = tuple(tensor.shape) == shape and tensor.dtype is _DTYPES[name]
            self._check(good and bool(tensor.isfinite().all()), name)
        self._check(width > 0 and width % self._dim == 0, "width")
        deviation = state["deviation"]
        self._check(bool((deviation > 0).all() and (deviation.diff() <= 0).all()), "deviation")
        self._check(bool((state["weight"] > 0).all()), "weight")
        if rotated <= set(state):
            KeyRotation(*(state[name] for name in _ROTATION)).check(self._dim)

    def _set(self, state: Mapping[str, Tensor]) -> None:
        super()._set(state)
        heads = state["deviation"].numel() // self._dim
        room = 8 * heads * self._size - sum(_SIDE)
        self._bits = allocated_bits(state["deviation"].tolist(), room)
        self.rotation = None
        if "frequencies" in state:
            self.rotation = KeyRotation(*(state[name] for name in _ROTATION))

    def _tables(self) -> _Tables:
        """Return the tables, in fp32: of as many components as the shortest trellis needs."""
        count, state = len(self._bits), self._state
        basis = state["basis"][:, :count].to(torch.float32)
        missing = count - basis.shape[1]
        deviation = state["deviation"][:count]
        deviation = torch.nn.functional.pad(deviation, (0, missing), value=float(deviation[-1]))
        largest = [
            float(trellis.levels(k, basis.device)[-1]) * trellis.UNITS[k] for k in self._bits
        ]
        between = [_BETWEEN * _DISTORTION[k] for k in self._bits]
        return _Tables(
            torch.nn.functional.pad(state["mean"], (0, 0, 0, 2)),
            state["weight"].to(torch.float32),
            torch.nn.functional.pad(basis, (0, missing)).unsqueeze(0),
            deviation,
            (deviation / deviation[0]).square(),
            basis.new_tensor(largest),
            basis.new_tensor(between),
        )

    def _encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        heads = x.shape[1]
        self._check_heads(heads)
        tables = self._tables()
        chosen = _chosen_base(x.transpose(1, 2).flatten(2), tables)
        scale = to_e5m3(chosen.size, "size of a token")
        empty = scale == 0
        n = torch.where(empty, torch.ones_like(chosen.size), from_e5m3(scale))
        states = trellis.states_of(len(self._bits), self._states)
        codes = trellis.encode_mixed(chosen.y / n, self._bits, tables.importance, states)
        whole = torch.cat([scale, chosen.flag, codes.masked_fill(empty, 0)], -1)
        return {"codes": pack_bits(whole, (*_SIDE, *self._bits), heads, self._size)}

    def _decode(self, arrays: Arrays) -> Tensor:
        data = arrays["codes"]
        heads = data.shape[1]
        self._check_heads(heads)
        whole = unpack_bits(data, (*_SIDE, *self._bits))
        scale, flag, codes = torch.tensor_split(whole, (1, 2), -1)
        states, tables = trellis.states_of(len(self._bits), self._states), self._tables()
        y = trellis.lookup_mixed(codes, self._bits, states) * from_e5m3(scale) * tables.deviation
        z = expand(y.unsqueeze(1), tables.basis).squeeze(1) / tables.weight
        joint = z + tables.bases[flag.squeeze(-1).to(torch.int64)]
        return torch.unflatten(joint, -1, (heads, self._dim)).transpose(1, 2).contiguous()

    def check_heads(self, heads: int) -> None:
        """Raise `FormatError` if the state is of another number of heads."""
        if self.fitted:
            self._check(self._state["deviation"].numel() == heads * self._dim, f"not {heads} heads")

    def _check_heads(self, heads: int) -> None:
        known = self._state["deviation"].numel() // self._dim
        if heads != known:
            raise GeometryError(f"the codec was fitted to {known} heads, these tokens have {heads}")


def _chosen_base(joint: Tensor, tables: _Tables) -> _Chosen:
    """Return tokens `[B, T, C]` less the base with which their error is expected least."""
    bases = tables.bases[:_BASES].unsqueeze(1)
    rest = (joint.unsqueeze(1) - bases) * tables.weight
    y = project(rest, tables.basis) / tables.deviation
    parts = [_best_scale(part, tables) for part in torch.split(y, _AT_A_TIME, 2)]
    size, cost = (torch.cat(found, 2) for found in zip(*parts, strict=True))
    inside = tree_sum((y * tables.deviation).square())
    left_out = (tree_sum(rest.square()) - inside).clamp(min=0)
    cost = left_out + cost * tables.deviation[0].square()
    cost = cost.masked_fill(cost.isnan(), torch.inf)  # squares beyond fp32
    flag = torch.zeros_like(cost[:, 0], dtype=torch.uint8)
    best, chosen, scale = cost[:, 0], y[:, 0], size[:, 0]
    for index in range(1, _BASES):
        closer = cost[:, index] < best
        flag = flag.masked_fill(closer, index)
        best = torch.where(closer, cost[:, index], best)
        chosen = torch.where(closer, y[:, index], chosen)
        scale = torch.where(closer, size[:, index], scale)
    return _Chosen(flag, scale, chosen)


def _best_scale(y: Tensor, tables: _Tables) -> tuple[Tensor, Tensor]:
    """Return the scale of least expected error of each token, and that error, `[…, 1]`."""
    size = square_root(divide(tree_sum(y.square()), float(y.shape[-1])))
    n = size.unsqueeze(-1) * y.new_tensor(_FACTORS).view(-1, 1)
    beyond = (y.abs().unsqueeze(-2) - n * tables.largest).clamp(min=0).square()
    found = tree_sum((beyond + n.square() * tables.distortion) * tables.importance).squeeze(-1)
    cost, which = found.min(-1, keepdim=True)
    return n.squeeze(-1).gather(-1, which), cost


def _joint(x: Tensor) -> Tensor:
    """Return tokens `[B, H, T, D]` of all heads together, `[B T, H D]`."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


def allocated_bits(deviation: Sequence[float], room: int) -> list[int]:
    """Return the bits of each component, the largest first, given one by one where they pay most.

    Sums are of Python floats in a fixed order, the same on every machine.
    """
    bits = [0] * max(len(deviation), trellis.LEAST)
    size = [*(s * s for s in deviation), *[0.0] * (len(bits) - len(deviation))]

    def worth(i: int) -> float:
        return -size[i] * (_DISTORTION[bits[i]] - _DISTORTION[bits[i] + 1])

    for i in range(trellis.LEAST):
        bits[i] = 1
    queue = [(worth(i), i) for i in range(len(bits))]
    heapq.heapify(queue)
    for _ in range(min(room, MOST_BITS * len(bits)) - trellis.LEAST):
        _, i = heapq.heappop(queue)
        bits[i] += 1
        if bits[i] < MOST_BITS:
            heapq.heappush(queue, (worth(i), i))
    return [count for count in bits if count]
