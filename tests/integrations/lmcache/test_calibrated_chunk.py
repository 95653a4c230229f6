"""Chunks of a calibrated `trellis`: the heads of each layer have what was learnt of them."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from kvpact import KVCacheCompressor
from kvpact.calibration import Calibration, LayerCalibration
from kvpact.errors import FormatError, MismatchError, SpecError
from kvpact.integrations.chunks import ChunkFormat
from kvpact.integrations.lmcache.layout import ChunkLayout
from kvpact.integrations.lmcache.server import Served
from kvpact.spec import parse_spec
from kvpact.testing.held import same_bytes

LAYERS, HEADS, TOKENS, DIM = 3, 2, 128, 64
NAME = "a" * 64
SPECS = ["trellis:bits=4", "trellis:bits=4,center=0", "trellis:bits=4,first=false/int:bits=8"]


@cache
def learnt(spec, seed):
    """What the keys of each layer led to, unlike in each."""
    generator = torch.Generator().manual_seed(seed)
    method, layers = parse_spec(spec).key, {}
    for layer in range(LAYERS):
        x = torch.randn(1, HEADS, 256, DIM, generator=generator)
        x = x * torch.rand(HEADS, 1, DIM, generator=generator) * 4 + 2 * layer
        state = method.key_codec(DIM, torch.float32).fit(x).state()
        layers[layer] = LayerCalibration(HEADS, DIM, DIM, {method.learnt_name(): state})
    return Calibration(layers)


@pytest.fixture
def file(tmp_path):
    def save(spec, seed=0, change=lambda held: held):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.kvcal"
        change(learnt(spec, seed)).save(path)
        return str(path)

    return save


@pytest.fixture(scope="module")
def x():
    shape = LAYERS, TOKENS, HEADS * 2 * DIM
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16()


@pytest.mark.parametrize("spec", SPECS)
def test_each_layer_is_packed_with_what_was_learnt_of_it(spec, file, x):
    form = ChunkFormat(spec, ChunkLayout(DIM, DIM), file(spec))
    data, again = form.pack([x], NAME), torch.full_like(x, torch.nan)
    assert len(data) == form.nbytes([(x.shape, x.dtype)])
    form.unpack(data, NAME, [again])
    held, compressor = learnt(spec, 0).layers, KVCacheCompressor(spec)
    for layer, (k, v) in enumerate(zip(*form.layout.split(x), strict=True)):
        (state,) = held[layer].k.values()
        one = compressor.compress_kv(k[None], v[None], (state, {}))
        assert all(torch.equal(one.k.codec.state()[name], state[name]) for name in state)
        for read, right in zip(
            form.layout.split(again), compressor.decompress_kv(one), strict=True
        ):
            assert same_bytes(read[layer].contiguous(), right[0].contiguous())


def test_another_calibration_is_refused_by_name_and_the_same_is_read_from_another_file(file, x):
    spec = SPECS[0]
    form, same, other = (
        ChunkFormat(spec, ChunkLayout(DIM, DIM), file(spec, seed)) for seed in (0, 0, 1)
    )
    data, again = form.pack([x], NAME), torch.full_like(x, 7)
    with pytest.raises(MismatchError, match="packed with another calibration"):
        other.unpack(data, NAME, [again])
    assert bool((again == 7).all())
    same.unpack(data, NAME, [again])
    form.unpack(data, NAME, [right := torch.zeros_like(x)])
    assert same_bytes(again, right)


def without(layer):
    return lambda held: Calibration({i: one for i, one in held.layers.items() if i != layer})


@pytest.mark.parametrize(("shape", "change", "reason"), [
    ((LAYERS, TOKENS, DIM * 2), None, r"has of layer 0 \(2, 64, 64\).*tensor or pipeline"),
    ((LAYERS - 1, TOKENS, HEADS * DIM * 2), None, "is of 3 layers, the model has 2"),
    ((LAYERS + 1, TOKENS, HEADS * DIM * 2), None, "has of layer 3 nothing"),
    ((LAYERS, TOKENS, HEADS * DIM * 2), without(1), "has of layer 1 nothing"),
])  # fmt: skip
def test_parts_of_a_model_and_other_models_are_refused(file, shape, change, reason):
    path = file(SPECS[0], change=change or (lambda held: held))
    form = ChunkFormat(SPECS[0], ChunkLayout(DIM, DIM), path)
    with pytest.raises(SpecError, match=reason):
        form.nbytes([(shape, torch.bfloat16)])
    with pytest.raises(SpecError, match=reason):
        form.pack([torch.zeros(shape, dtype=torch.bfloat16)], NAME)


@pytest.mark.parametrize(("spec", "reason"), [
    ("turboquant:bits=4", "K of 'turboquant:bits=4' learns nothing: omit it"),
    ("pca:bits=4", "method of K learns from its tokens"),
    ("trellis:bits=4/vq", "method of V learns from its tokens"),
])  # fmt: skip
def test_methods_that_a_calibration_does_not_help_are_refused(file, spec, reason):
    with pytest.raises(SpecError, match=reason):
        ChunkFormat(spec, ChunkLayout(DIM, DIM), file(SPECS[0]))


def test_a_serde_reads_the_file_that_its_options_name(file, tmp_path, x):
    options = {"spec": SPECS[0], "head_dim": DIM}
    with pytest.raises(SpecError, match="or 'trellis' with a calibration"):
        Served().make(options)
    with pytest.raises(SpecError, match="calibration=4 should be the path of a file"):
        Served().make({**options, "calibration": 4})
    with pytest.raises(SpecError, match=r"can't be read .*kvpact calibrate MODEL --out FILE"):
        Served().make({**options, "calibration": str(tmp_path / "none")})
    serde = Served().make({**options, "calibration": file(SPECS[0])})
    about = SimpleNamespace(shapes=[x.shape], dtypes=[x.dtype])
    assert serde.estimate_serialized_size(about) == len(serde.chunks.pack([x], NAME))


def test_a_compressor_takes_states_of_its_codecs_alone():
    k = torch.randn(2, 1, 64, DIM, generator=torch.Generator().manual_seed(3))
    (state,) = learnt(SPECS[0], 0).layers[0].k.values()
    one = {name: x[:1] for name, x in state.items()}
    with pytest.raises(FormatError, match="learns nothing that could be given"):
        KVCacheCompressor("int:bits=8").compress_kv(k, k, (state, {}))
    for wrong in (one, {**state, "weight": -state["weight"]}, {"first": state["first"]}):
        with pytest.raises(FormatError):
            KVCacheCompressor(SPECS[0]).compress_kv(k, k, (wrong, {}))
