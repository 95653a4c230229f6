"""Slots byte by byte: bit order against numpy, tile geometry, sizes, rollback."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.formats import FORMAT_VERSION, TILE, CodesField, GroupField, TokenField
from kvpact.formats.bitpack import planes

CPU = torch.device("cpu")
ALL_BITS = range(1, 9)
ORDERS = ("token", "channel")
ODD_DIMS = (1, 3, 31, 33, 64, 80, 96, 576)


def random_codes(bits: int, tokens: int, dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 3, tokens, dim)
    return torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8)


def words(bits: np.ndarray) -> np.ndarray:
    """Return bits along the last axis as little-endian 32-bit words, the last one filled up."""
    fill = np.zeros((*bits.shape[:-1], -bits.shape[-1] % 32), np.uint8)
    padded = np.concatenate([bits, fill], axis=-1)
    return np.packbits(padded, axis=-1, bitorder="little").view("<i4")


def oracle(codes: np.ndarray, bits: int, order: str) -> np.ndarray:
    """Return the words of one tile's codes `[32, dim]`, bit arithmetic by numpy alone."""
    parts, low = [], 0
    for width in planes(bits):
        plane = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., low : low + width]
        rows = plane if order == "token" else plane.swapaxes(0, 1)
        parts.append(words(rows.reshape(len(rows), -1)))
        low += width
    whole = np.concatenate(parts, axis=-1)
    return whole.reshape(2, 16, -1).swapaxes(1, 2) if order == "token" else whole.T


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_codes_are_packed_as_numpy_packs_them(bits, order):
    for dim in ODD_DIMS:
        field = CodesField("codes", bits, dim, order)
        codes = random_codes(bits, 2 * TILE, dim, seed=bits)
        storage = field.allocate(2, 3, 2 * TILE, CPU)
        field.write(storage, 0, codes)
        assert storage.shape == (2, 3, 2, *field.shape)
        for index in ((0, 0, 0), (1, 2, 1)):
            part = codes.unflatten(2, (2, TILE))[index].numpy()
            np.testing.assert_array_equal(storage[index].numpy(), oracle(part, bits, order))
        assert torch.equal(field.read(storage), codes)


def test_planes_keep_every_bit_once_and_low_bits_first():
    assert FORMAT_VERSION == 1
    assert {bits: planes(bits) for bits in ALL_BITS} == {
        1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,),
    }  # fmt: skip


def make_field(kind: str, bits: int, dim: int):
    if kind == "group":
        return GroupField("mean", dim, TILE)
    if kind == "scale":
        return TokenField("scale", dim)
    if kind == "bytes":
        return TokenField("codes", dim, torch.uint8, "codes")
    return CodesField("codes", bits, dim, kind)


def make_values(field, bits: int, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(field, CodesField) or field.dtype == torch.uint8:
        return random_codes(bits, tokens, field.dim if hasattr(field, "dim") else field.count, seed)
    count = tokens // field.tokens if field.per_group else tokens
    return torch.randn(2, 3, count, field.count, generator=generator).half()


APPEND = st.tuples(st.just("append"), st.integers(1, 70))
TRUNCATE = st.tuples(st.just("truncate"), st.floats(0, 1))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([*ORDERS, "scale", "bytes"]),
    bits=st.sampled_from(ALL_BITS),
    dim=st.sampled_from((1, 3, 33, 64, 80)),
    steps=st.lists(st.one_of(APPEND, TRUNCATE), min_size=1, max_size=8),
)
def test_pieces_and_rollbacks_leave_the_bytes_of_one_write(kind, bits, dim, steps):
    field, capacity = make_field(kind, bits, dim), 20 * TILE
    storage = field.allocate(2, 3, capacity, CPU)
    held = make_values(field, bits, 0, 0)
    for seed, (step, number) in enumerate(steps):
        length = held.shape[2]
        if step == "append":
            new = make_values(field, bits, number, seed)
            field.write(storage, length, new)
            held = torch.cat([held, new], dim=2)
        else:
            held = held[:, :, : int(number * length)]
            field.clear_from(storage, held.shape[2])
    fresh = field.allocate(2, 3, capacity, CPU)
    if held.shape[2]:
        field.write(fresh, 0, held)
    assert torch.equal(storage, fresh)
    assert torch.equal(field.read(storage)[:, :, : held.shape[2]], held)
    assert not field.read(storage)[:, :, held.shape[2] :].any()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_group_that_is_cut_keeps_its_side_information(group):
    field = GroupField("mean", 5, group)
    values = torch.arange(1.0, 2 * 3 * 4 * 5 + 1).view(2, 3, 4, 5).half()
    storage = field.allocate(2, 3, 4 * group, CPU)
    field.write(storage, 0, values[:, :, :1])
    field.write(storage, group, values[:, :, 1:])
    assert torch.equal(field.read(storage), values)
    field.clear_from(storage, 2 * group + 1)
    assert torch.equal(storage[:, :, :3], values[:, :, :3])
    assert not storage[:, :, 3].any()
    field.clear_from(storage, 2 * group)
    assert torch.equal(storage[:, :, :2], values[:, :, :2])
    assert not storage[:, :, 2:].any()


@pytest.mark.parametrize("number", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_numbers_per_token_lie_side_by_side(number):
    field = TokenField("scale", 3, number)
    values = (torch.arange(2 * 3 * 40 * 3) % 251).view(2, 3, 40, 3).to(number)
    storage = field.allocate(2, 3, 2 * TILE, CPU)
    field.write(storage, 0, values[:, :, :7])
    field.write(storage, 7, values[:, :, 7:])
    assert storage.shape == (2, 3, 2, 3, TILE)
    assert torch.equal(storage[1, 2, 1, 0, 5], values[1, 2, 37, 0])
    assert torch.equal(field.read(storage)[:, :, :40], values)
