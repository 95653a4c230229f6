"""Codes of unlike widths as one string of bits, against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.errors import FormatError
from kvpact.formats.bitpack import pack_bits, unpack_bits


@settings(deadline=None, max_examples=60)
@given(
    widths=st.lists(st.integers(0, 8), min_size=1, max_size=40),
    heads=st.integers(1, 4),
    shape=st.tuples(st.integers(1, 2), st.integers(0, 5)),
    seed=st.integers(0, 1000),
)
def test_bytes_are_those_of_numpy(widths, heads, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.stack(
        [torch.randint(0, 1 << width, shape, generator=generator) for width in widths], -1
    ).to(torch.uint8)
    size = -(-sum(widths) // (8 * heads)) or 1
    packed = pack_bits(codes, widths, heads, size)
    assert packed.shape == (shape[0], heads, shape[1], size)
    assert torch.equal(unpack_bits(packed, widths), codes)
    for row in range(shape[0]):
        for token in range(shape[1]):
            numbers = codes[row, token].tolist()
            pairs = zip(numbers, widths, strict=True)
            bits = [number >> i & 1 for number, width in pairs for i in range(width)]
            bits += [0] * (8 * heads * size - len(bits))
            wanted = np.packbits(np.array(bits, dtype=np.uint8), bitorder="little")
            assert packed[row, :, token].flatten().tolist() == wanted.tolist()


def test_no_room_for_the_codes_is_an_error():
    with pytest.raises(FormatError):
        pack_bits(torch.zeros(1, 1, 3, dtype=torch.uint8), [8, 8, 8], 1, 2)
