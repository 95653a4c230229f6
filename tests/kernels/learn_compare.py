"""What the native kernel learns against what the torch body does."""

import itertools
from typing import NamedTuple

import torch
from encode_compare import DTYPES, SPECIAL, codec_of
from guards import guarded_outputs
from matrix import LEARNT
from torch import Tensor

from kvpact.errors import KVPactError
from kvpact.kernels.cpu import prompt as native
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.torch.backend import TORCH
from kvpact.methods.context import Context

WIDTHS = (16, 32, 64, 80, 96, 128, 256)
KINDS = ("bases", "empty channels", "large", "small", "uneven", "zeros", "equal", "special")


class Case(NamedTuple):
    """Tokens to learn from: `padding` of each row; queries were seen or not."""

    spec: str
    dim: int
    heads: int
    kind: str
    dtype: torch.dtype
    padding: tuple[int, ...] | None = None
    sinks: int = 4
    queries: bool = True
    view: str = "plain"


def tokens(case: Case, rows: int, count: int) -> Tensor:
    """Return keys `[rows, heads, count, dim]` of a kind, in fp32."""
    shape, generator = (rows, case.heads, count, case.dim), torch.Generator().manual_seed(case.dim)
    x = torch.randn(shape, generator=generator)
    if case.kind == "bases":
        mean, first = 4 * torch.randn(2, rows, case.heads, 1, case.dim, generator=generator)
        place = torch.arange(count).view(-1, 1)
        x = x + torch.where(place % 5 == 0, first, torch.where(place % 7 == 3, 0 * mean, mean))
    elif case.kind == "empty channels":
        x[..., ::3] = 0.0
        x[..., 1] = -0.0
    elif case.kind == "large":
        x = (1e4 * x + 3e4).clamp(-59_000, 59_000)
    elif case.kind == "small":
        x = 1e-7 * x
    elif case.kind == "uneven":
        x = x * 10.0 ** torch.linspace(-6, 4, case.dim)
        x[:, :, ::9] *= 100
        x = x.clamp(-59_000, 59_000)
    elif case.kind == "zeros":
        x = 0 * x
    elif case.kind == "equal":  # channels are equally important: they keep their order
        x = x[..., :1].expand(shape)
    elif case.kind == "special":
        values = torch.tensor(SPECIAL)
        x = values[torch.randint(len(SPECIAL), shape, generator=generator)]
    return x.contiguous()


def placed(x: Tensor, view: str) -> Tensor:
    """Return the same numbers, elsewhere in memory."""
    if view == "transposed":  # tokens before heads
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if view == "sliced":  # from the middle of wider vectors, not aligned
        return torch.nn.functional.pad(x, (3, 2, 1, 0))[:, :, 1:, 3:-2]
    if view == "gaps":  # between the channels
        return torch.stack((x, x + 1), -1).flatten(-2)[..., ::2]
    return x


def learnt(backend, case: Case) -> dict[str, Tensor] | str:
    """Return what a backend learns, or the error that it raises."""
    codec = codec_of(case.spec, "k", case.dim, case.dtype)
    assert not backend.covers("learn", codec, case.dtype)
    rows = len(case.padding or (0,))
    x = placed(tokens(case, rows, codec.learns_from).to(case.dtype), case.view)
    padding = None if case.padding is None else torch.tensor(case.padding)
    energy = None
    if case.queries:
        generator = torch.Generator().manual_seed(case.heads)
        energy = torch.randn(case.heads, case.dim, generator=generator).square()
        energy = torch.ones_like(energy) if case.kind == "equal" else energy
    try:
        return backend.learn(codec, x, Context(padding, case.sinks, energy)).state()
    except KVPactError as error:
        return f"{type(error).__name__}: {error}"


def compare(case: Case) -> str:
    """Return what differs between what the native kernel and the torch body learn."""
    expected = learnt(TORCH, case)
    with guarded_outputs(native):
        found = learnt(CPU, case)
    if isinstance(expected, str) or isinstance(found, str):
        return "" if expected == found else f"{expected} and {found}"
    if list(expected) != list(found):
        return f"{[*expected]} and {[*found]}"
    for name, wanted in expected.items():
        if wanted.shape != found[name].shape or wanted.dtype != found[name].dtype:
            return f"{name}: another shape or dtype"
        if not torch.equal(wanted.contiguous().view(torch.int16), found[name].view(torch.int16)):
            return f"{name}: other bytes"
    return ""


def cases() -> list[Case]:
    """Return every spec with every width, kind, dtype, view and padding, though not all at once."""
    turns = zip(
        itertools.cycle(range(1, 6)),
        itertools.cycle(DTYPES),
        itertools.cycle((None, (0, 7), (3, 0, 100, 64, 130), None, (200,))),
        itertools.cycle((4, 0, 70, 4, 1, 33, 128)),
        itertools.cycle((True, True, False)),
        itertools.cycle(("plain", "transposed", "sliced", "gaps")),
    )
    return [
        Case(spec, dim, heads, kind, dtype, padding, sinks, queries, view)
        for (spec, dim, kind), (heads, dtype, padding, sinks, queries, view) in zip(
            itertools.product(LEARNT, WIDTHS, KINDS), turns, strict=False
        )
    ]
