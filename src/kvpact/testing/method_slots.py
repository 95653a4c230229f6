"""Checks of the bytes: written ones can be read, counted, cleared, and continued after a cut."""

import math

import pytest
import torch
from torch import Tensor

from kvpact.errors import KVPactError, NonFiniteError
from kvpact.methods import Codec, bytes_per_slot
from kvpact.testing import method_base
from kvpact.testing.data import Shape, floats, integers, random_tokens
from kvpact.testing.held import difference, held_bytes, same_bytes


class SlotChecks(method_base.MethodKit):
    """A codec's fields in storage."""

    @method_base.both_sides("bytes")
    def test_storage_gives_back_what_was_written(self, side: str, shape: Shape) -> None:
        """Arrays read from storage decode to the same numbers, bit for bit."""
        codec, x = self.sample(side, shape)
        arrays, count = codec.encode(x), x.shape[2]
        storage = method_base.allocate(codec, x, method_base.capacity(codec, count))
        method_base.write(codec, storage, 0, arrays)
        for field in codec.fields:
            units = count // codec.group if field.per_group else count
            read = field.read(storage[field.name])[:, :, :units]
            assert same_bytes(read, arrays[field.name]), field.name
        decoded = method_base.decode_storage(codec, storage)[:, :, :count]
        assert same_bytes(decoded, codec.decode(arrays))

    @method_base.both_sides()
    def test_pieces_are_the_whole(self, side: str, shape: Shape) -> None:
        """Written in pieces or at once, cleared and written again: the same bytes."""
        codec, x = self.sample(side, shape)
        whole = method_base.stored(codec, x)
        pieces = method_base.allocate(codec, x, method_base.capacity(codec, x.shape[2]))
        step, start = codec.group if codec.group > 1 else 23, 0
        while start < x.shape[2]:
            part = x[:, :, start : start + step]
            method_base.write(codec, pieces, start, codec.encode(part))
            start += part.shape[2]
        assert not difference(whole, pieces)
        kept = x.shape[2] // 2 // codec.group * codec.group
        for field in codec.fields:
            field.clear_from(pieces[field.name], kept)
        cleared = method_base.allocate(codec, x, method_base.capacity(codec, x.shape[2]))
        if kept:
            method_base.write(codec, cleared, 0, codec.encode(x[:, :, :kept]))
        assert not difference(cleared, pieces)
        method_base.write(codec, pieces, kept, codec.encode(x[:, :, kept:]))
        assert not difference(whole, pieces)

    @method_base.both_sides("bytes")
    def test_bytes_are_those_declared(self, side: str, shape: Shape) -> None:
        """`bytes_per_slot` is what storage takes, and the fields know their storage's shape."""
        codec, x = self.sample(side, shape)
        tokens = method_base.capacity(codec, 2 * x.shape[2])
        storage = method_base.allocate(codec, x, tokens)
        for field in codec.fields:
            units = tokens // field.tokens
            wanted = (*x.shape[:2], units, *field.shape)
            assert storage[field.name].shape == wanted, field.name
            assert storage[field.name].dtype == field.dtype, field.name
            assert field.kind in ("codes", "side")
        rows = x.shape[0] * x.shape[1]
        assert held_bytes(storage) == bytes_per_slot(codec) * tokens * rows

    @method_base.both_sides("bytes")
    def test_unused_slots_are_zero_and_never_read(self, side: str) -> None:
        """Slots that nobody wrote are zero; garbage in them doesn't change what is read."""
        for dim in (64, 96):
            codec = self.codec(side, dim)
            used = codec.group if codec.group > 1 else 63
            x = random_tokens(2, 1, used, dim)
            storage = method_base.stored(codec, x, 4 * max(used, 64))
            wanted = method_base.decode_storage(codec, storage)[:, :, :used].clone()
            for field in codec.fields:
                first = -(-used // field.tokens)
                unused = storage[field.name][:, :, first:]
                assert not unused.contiguous().flatten().view(torch.uint8).any(), field.name
                unused.fill_(torch.nan if field.dtype.is_floating_point else 0xAA - 0x55)
            assert same_bytes(method_base.decode_storage(codec, storage)[:, :, :used], wanted)

    def _grouped(self, side: str, dim: int, heads: int = 1) -> Codec:
        codec = self.codec(side, dim, heads=heads)
        if codec.group == 1:
            pytest.skip("no groups of tokens")
        return codec

    @method_base.both_sides("groups")
    def test_a_cut_group_continues(self, side: str) -> None:
        """After a rollback into a group its side information stays and codes new tokens."""
        for dim in (64, 80):
            codec = self._grouped(side, dim, heads=2)
            x = random_tokens(2, 2, 2 * codec.group, dim, offset=2.0)
            new = random_tokens(2, 2, codec.group, dim, seed=1, offset=2.0)
            for kept in (1, codec.group // 2 + 1, codec.group - 1):
                storage, cut = method_base.stored(codec, x), codec.group + kept
                before = method_base.decode_storage(codec, storage)[:, :, :cut].clone()
                for field in codec.fields:
                    field.clear_from(storage[field.name], cut)
                frozen = {
                    field.name: field.read(storage[field.name])[:, :, 1:2].clone()
                    for field in codec.fields
                    if field.per_group
                }
                arrays = codec.encode(new[:, :, kept:], frozen)
                per_token = {field.name for field in codec.fields if not field.per_group}
                assert set(arrays) == per_token, "a frozen group's side information came again"
                method_base.write(codec, storage, cut, arrays)
                decoded = method_base.decode_storage(codec, storage)
                assert same_bytes(decoded[:, :, :cut], before)
                again = codec.transform.inverse(decoded[:, :, cut:])
                assert method_base.relative_error(new[:, :, kept:], again) < self.max_relative_error

    @method_base.both_sides("groups")
    def test_a_cut_group_of_any_kind_continues(self, side: str) -> None:
        """Whatever a group held, ordinary tokens after a cut are taken, hard ones or refused."""
        codec = self._grouped(side, 64)
        ordinary, other = (random_tokens(1, 1, codec.group, 64, seed=seed) for seed in (0, 1))
        tiny = [other * scale for scale in (1e-30, 1e-8, 1e-6, 1e-4, 1e-2)]
        for held in [*(other * 0 + held for held in (0.0, 1e-30, 1e-6, 3.0, 1e3)), *tiny]:
            arrays = codec.encode(held)
            frozen = _side_information(codec, arrays)
            for scale in (0.0, 1e-30, 1.0, 50.0, 6e4, 1e30):
                try:
                    later = codec.encode(ordinary * scale, frozen)
                except KVPactError:
                    assert scale > 50, "ordinary tokens were refused"
                    continue
                assert torch.isfinite(codec.decode({**later, **frozen})).all()

    @method_base.both_sides("groups")
    def test_what_is_in_range_fits_every_group(self, side: str) -> None:
        """A codec with groups encodes later than tokens come: `check_range` has to suffice."""
        for dim in (1, 64, 80):
            codec = self._grouped(side, dim)
            for x in _largest(codec, dim):
                codec.check_range(x)
                arrays = codec.encode(x)
                assert torch.isfinite(codec.decode(arrays)).all()
                ordinary = codec.encode(x * 0 + 1.0)
                frozen = _side_information(codec, ordinary)
                assert torch.isfinite(codec.decode({**codec.encode(x, frozen), **frozen})).all()
                with pytest.raises(NonFiniteError):
                    codec.check_range(x * 1.01)
            with pytest.raises(NonFiniteError):
                codec.check_range(floats(*[3e38] * dim).view(1, 1, 1, dim))

    @method_base.both_sides("bias")
    def test_bias_is_a_part_of_the_whole(self, side: str) -> None:
        """A codec with a bias gives it apart, finite, in the same space."""
        codec = self.codec(side, 96, heads=2)
        arrays = codec.encode(random_tokens(1, 2, max(codec.group, 32), 96))
        if not codec.has_bias:
            pytest.skip("no bias")
        bias = codec.decode_bias(arrays)
        assert bias.shape == codec.decode(arrays).shape
        assert torch.isfinite(bias).all()
        assert bool(bias.any())


def _side_information(codec: Codec, arrays: method_base.Arrays) -> method_base.Arrays:
    """Return a group's arrays besides its codes."""
    return {field.name: arrays[field.name] for field in codec.fields if field.per_group}


def _largest(codec: Codec, dim: int) -> list[Tensor]:
    """Return groups of tokens at the limits of a codec's range: even, random, in one coordinate."""
    signs = (-1.0) ** floats(*range(codec.group)).view(-1, 1)
    first, ones = integers(*range(dim)) == 0, floats(1.0).expand(codec.group, dim)
    kinds = [
        ones.clone(),
        ones * signs,
        random_tokens(1, 1, codec.group, dim)[0, 0],
        first.expand(codec.group, dim) * signs,
        (integers(*range(codec.group)).view(-1, 1) == 0) * first + 1e-6 * signs,
    ]
    # In the space of the codec one coordinate is the hardest to scale.
    kinds += [codec.transform.inverse(x) for x in kinds[3:]]
    found = []
    for x in kinds:
        scales = []
        for limit, order in ((codec.max_abs, math.inf), (codec.max_norm, 2)):
            size = torch.linalg.vector_norm(x, order, dim=-1).max()
            scales.append(limit * 0.9999 / float(size))
        found.append((x * min(scales))[None, None])
    return found
