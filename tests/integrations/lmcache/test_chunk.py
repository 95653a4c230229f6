"""Chunks as bytes: as many as said before, the same numbers again, and no changed bit unnoticed."""

from types import SimpleNamespace

import pytest
import torch

from kvpact import KVCacheCompressor, errors
from kvpact.integrations.chunks import ChunkFormat
from kvpact.integrations.lmcache.layout import ChunkLayout, CPUPages
from kvpact.integrations.lmcache.server import key_hash
from kvpact.stores.records import seal, unseal
from kvpact.testing.held import same_bytes

NAME = "a" * 64
SPECS = [
    "turboquant:bits=4", "int:bits=8/turboquant:bits=3", "fp8", "kivi", "kvarn",
    "trellis:bits=4,center=0,first=false,weights=false,blocks=false", "none",
]  # fmt: skip
# Layers, heads, tokens; the widths of K and V; how LMCache lays them out.
LAYOUTS = [
    ((2, 3, 64), (64, 64), "fused"), ((3, 2, 96), (80, 80), "apart"),
    ((1, 1, 64), (128, 64), "latent"), ((2, 1, 160), (33, 33), "fused"),
]  # fmt: skip


def chunk(sizes, widths, kind, dtype=torch.bfloat16, seed=0):
    """Return a chunk as LMCache has it, and its K and V, `[L, H, T, D]`."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(*sizes, width, generator=generator).to(dtype) for width in widths)
    if kind == "apart":
        return torch.stack([x.transpose(1, 2).flatten(2) for x in (k, v)]), k, v
    whole = torch.cat([k, v], -1).transpose(1, 2).flatten(2)
    return whole[None] if kind == "latent" else whole, k, v


def packed(form, x):
    data = form.pack([x], NAME)
    assert len(data) == form.nbytes([(x.shape, x.dtype)])
    return data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("sizes", "widths", "kind"), LAYOUTS, ids=lambda x: str(x))
@pytest.mark.parametrize("spec", SPECS)
def test_a_chunk_comes_back_as_each_layer_alone_is_compressed(spec, sizes, widths, kind, dtype):
    if "kivi" in spec or "kvarn" in spec:
        sizes = (*sizes[:2], -(-sizes[2] // 128) * 128)
    x, k, v = chunk(sizes, widths, kind, dtype)
    form = ChunkFormat(spec, ChunkLayout(*widths))
    again = torch.zeros_like(x)
    form.unpack(packed(form, x), NAME, [again])
    compressor = KVCacheCompressor(spec)
    stored = [compressor.compress_kv_3d(*layer) for layer in zip(k, v, strict=True)]
    pairs = [compressor.decompress_kv_3d(layer) for layer in stored]
    for read, wanted in zip(form.layout.split(again), zip(*pairs, strict=True), strict=True):
        assert same_bytes(read.contiguous(), torch.stack(wanted))
    assert spec != "none" or same_bytes(again, x)


PAGE, DIM = 32, 48


def orders(dtype):
    """Some order for each side, another one for each dtype: vLLM's depends on the processor."""
    generator = torch.Generator().manual_seed(dtype.itemsize)
    k, v = (torch.randperm(PAGE * DIM, generator=generator) for _ in range(2))
    return k, v


PAGES = CPUPages(48, orders)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", ["turboquant:bits=4", "int:bits=8/none"])
def test_the_pages_of_vllms_cpu_worker_are_read_by_tokens(spec, dtype):
    layers, heads, count = 2, 3, 4
    _, k, v = chunk((layers, heads, count * PAGE), (DIM, DIM), "apart", dtype)

    def paged(k, v):
        """What LMCache gathers of pages `[P, H, N, 2 D]` whose halves have these orders."""
        pages = torch.zeros(layers, count, heads, 2, PAGE * DIM, dtype=dtype)
        for layer in range(layers):
            for page in range(count):
                for side, (x, order) in enumerate(zip((k, v), orders(dtype), strict=True)):
                    part = x[layer, :, page * PAGE : (page + 1) * PAGE].flatten(1)
                    pages[layer, page, :, side][:, order] = part
        rows = pages.view(layers, count, heads, PAGE, 2 * DIM).transpose(2, 3)
        return rows.reshape(layers, count * PAGE, -1)

    form = ChunkFormat(spec, ChunkLayout(DIM, DIM, CPUPages(PAGE, orders)))
    x, again = paged(k, v), torch.zeros(layers, count * PAGE, heads * 2 * DIM, dtype=dtype)
    form.unpack(packed(form, x), NAME, [again])
    compressor = KVCacheCompressor(spec)
    wanted = paged(*compressor.decompress_kv(compressor.compress_kv(k, v)))
    assert same_bytes(again, wanted)
    for read, given in zip(form.layout.split(x), (k, v), strict=True):
        assert same_bytes(read, given)


def test_the_groups_of_a_chunk_follow_each_other():
    form = ChunkFormat("int:bits=8", ChunkLayout(32, 32))
    first, second = chunk((2, 2, 32), (32, 32), "fused")[0], chunk((1, 4, 64), (32, 32), "apart")[0]
    data = form.pack([first, second], NAME)
    assert len(data) == form.nbytes([(x.shape, x.dtype) for x in (first, second)])
    again = [torch.zeros_like(first), torch.zeros_like(second)]
    form.unpack(data, NAME, again)
    for x, y in zip((first, second), again, strict=True):
        assert 0 < (x - y).float().norm() < 0.01 * x.float().norm()


SMALL = ((1, 1, 32), (32, 32), "fused")


@pytest.fixture(scope="module")
def small():
    """A format, a chunk, its bytes, and a function that says what reading bytes raises."""
    form, (x, _, _) = ChunkFormat("turboquant:bits=2", ChunkLayout(32, 32)), chunk(*SMALL)

    def refused(data, name=NAME, into=None):
        out = torch.full_like(x, 7) if into is None else into
        before = out.clone()
        with pytest.raises(errors.KVPactError) as found:
            form.unpack(data, name, [out])
        assert same_bytes(out, before)
        return found.type

    return SimpleNamespace(form=form, x=x, data=packed(form, x), refused=refused)


def test_every_flipped_bit_truncation_and_other_name_is_found(small):
    def flipped(place):
        data = bytearray(small.data)
        data[place // 8] ^= 1 << place % 8
        return bytes(data)

    for place in range(8 * len(small.data)):
        assert small.refused(flipped(place)) is errors.IntegrityError
    cut = [small.data[:length] for length in range(len(small.data))]
    for data in (*cut, small.data + b"\0", bytes(len(small.data))):
        assert small.refused(data) is errors.IntegrityError
    assert small.refused(small.data, name="b" * 64) is errors.IntegrityError


@pytest.mark.parametrize(("spec", "sizes", "dtype"), [
    ("turboquant:bits=2,scale=l2", (1, 1, 32), torch.bfloat16),
    ("int:bits=2", (1, 1, 32), torch.bfloat16),
    ("turboquant:bits=2", (1, 1, 32), torch.float16),
    ("turboquant:bits=2", (1, 1, 64), torch.bfloat16),
    ("turboquant:bits=2", (2, 1, 32), torch.bfloat16),
    ("turboquant:bits=2", (1, 2, 32), torch.bfloat16),
], ids=lambda x: str(x))  # fmt: skip
def test_another_spec_dtype_or_shape_is_found(small, spec, sizes, dtype):
    x, _, _ = chunk(sizes, (32, 32), "fused", dtype)
    other = packed(ChunkFormat(spec, ChunkLayout(32, 32)), x)
    assert small.refused(other) is errors.MismatchError


def test_shapes_of_as_many_bytes_are_told_apart():
    form = ChunkFormat("turboquant:bits=2", ChunkLayout(32, 32))
    x, _, _ = chunk((2, 3, 32), (32, 32), "fused")
    y, _, _ = chunk((3, 2, 32), (32, 32), "fused")
    assert len(packed(form, x)) == len(packed(form, y))
    with pytest.raises(errors.MismatchError, match=r"where .* is wanted"):
        form.unpack(packed(form, x), NAME, [y])


def test_a_later_version_is_no_damage(small):
    blob = bytearray(unseal(NAME, small.data).blob)
    at = blob.index(b'"version":"1"')
    header, rest = seal(NAME, memoryview(blob[:at] + b'"version":"2"' + blob[at + 13 :]), 0.0)
    assert small.refused(header + rest) is errors.FormatError


@pytest.mark.parametrize(("spec", "reason"), [
    ("trellis:bits=4", "method of K learns from its tokens"),
    ("lowrank", "method of K learns from its tokens"),
    ("int:bits=8/vq", "method of V learns from its tokens"),
    ("pca:bits=4", "method of K learns from its tokens"),
    ("turboquant:bits=4,mode=prod", "method of K stores more than slots"),
    ("recipe.toml", "a recipe by layer is not covered"),
    ("turbo", "turbo"),
])  # fmt: skip
def test_methods_whose_bytes_are_not_known_before_are_refused(spec, reason):
    with pytest.raises(errors.SpecError, match=reason):
        ChunkFormat(spec, ChunkLayout(64, 64))


FP16, WIDTHS = torch.float16, "set the widths of the model's heads"


@pytest.mark.parametrize(("widths", "shape", "dtype", "error", "reason"), [
    ((64, 64), (2, 128), FP16, errors.GeometryError, WIDTHS),
    ((64, 64), (2, 3, 32, 100), FP16, errors.GeometryError, WIDTHS),
    ((64, 64), (3, 32, 64), FP16, errors.GeometryError, WIDTHS),
    ((64, 32), (2, 3, 32, 64), FP16, errors.GeometryError, WIDTHS),
    ((64, 64), (4, 3, 32, 128), FP16, errors.GeometryError, WIDTHS),
    ((64, 64), (3, 0, 128), FP16, errors.GeometryError, WIDTHS),
    ((64, 64, PAGES), (2, 2, 96, 64), FP16, errors.GeometryError, WIDTHS),
    ((64, 64, PAGES), (2, 64, 128), FP16, errors.GeometryError, "no whole number of pages of 48"),
    ((64, 64), (2, 32, 128), torch.uint8, errors.DtypeError, r"uint8; fp32, fp16 and bf16"),
])  # fmt: skip
def test_what_the_layout_does_not_fit_is_refused(widths, shape, dtype, error, reason):
    form = ChunkFormat("int:bits=8", ChunkLayout(*widths))
    with pytest.raises(error, match=reason):
        form.nbytes([(shape, dtype)])


@pytest.mark.parametrize("width", [0, -1, 64.0, "64", True])
def test_widths_are_whole_numbers(width):
    with pytest.raises(errors.GeometryError, match="should be the width of a head"):
        ChunkLayout(64, width)


def test_vllms_cpu_worker_has_one_width():
    with pytest.raises(errors.GeometryError, match="one width in vLLM's CPU worker"):
        ChunkLayout(64, 32, PAGES)


def test_a_chunk_is_a_whole_number_of_groups():
    form = ChunkFormat("kivi", ChunkLayout(64, 64))
    with pytest.raises(
        errors.GeometryError, match=r"48 tokens.* packs 32 of K together.*--chunk-size"
    ):
        form.nbytes([((2, 48, 128), FP16)])


def test_tokens_that_are_no_numbers_are_refused(small):
    x = small.x.clone()
    x[0, 5, 3] = torch.nan
    with pytest.raises(errors.NonFiniteError):
        small.form.pack([x], NAME)


def test_every_field_of_a_key_counts():
    def key(**fields):
        base = {
            "chunk_hash": b"\1\2", "model_name": "a", "kv_rank": 1, "object_group_id": 0,
            "cache_salt": "b",
        }  # fmt: skip
        return key_hash(SimpleNamespace(**{**base, **fields}))

    keys = [
        key(), key(chunk_hash=b"\1"), key(model_name="ab"), key(kv_rank=0x01010100),
        key(object_group_id=1), key(cache_salt=""), key(model_name="a1", kv_rank=10),
        key(kv_rank=10, object_group_id=0), key(kv_rank=1, object_group_id=10),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
