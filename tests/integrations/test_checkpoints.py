"""Prefixes of models with windows and states: right at every border, or shorter with a warning."""

import numpy as np
import pytest
import torch
from tiny_configs import KINDS, WINDOW, gemma3, interrupted, run
from transformers import DynamicCache, JambaConfig

from kvpact.errors import FormatError, GeometryError, IntegrityError, SnapshotError, SpecError
from kvpact.integrations.transformers import CompressedCache, prefix_cache
from kvpact.integrations.transformers.versions import named
from kvpact.quantizers.channels import GROUP, from_integers, to_integers
from kvpact.stores import StoreWarning

SHAPE_AND_SEED = (1, 300), 4  # of `ids`
every_model = pytest.mark.parametrize("name", sorted(KINDS.keys() - {"deepseek_v4"}))
CHUNK = 32


@pytest.fixture
def wide(make_model, sizes):
    """Return a model whose window reaches over three chunks."""
    return make_model(gemma3(sizes, "sliding", "full", sliding_window=80))


def opened(store, model, spec="none", **options):
    """Return an empty cache and its prefixes."""
    cache = CompressedCache(model, spec)
    return cache, prefix_cache(store, model, cache, **{"chunk": CHUNK, **options})


def logits(model, cache, ids, first):
    """Return the logits of what follows a prefix of `first` tokens, in parts."""
    parts = ids[:, first:].split([1, 5, ids.shape[1] - first - 6], dim=1)
    return run(model, cache, parts)


@every_model
@pytest.mark.parametrize(
    "length", [CHUNK, CHUNK + 1, CHUNK + WINDOW - 1, CHUNK + WINDOW + 1, 2 * CHUNK + 1, 130]
)
def test_what_was_loaded_goes_on_bit_for_bit(name, length, store, make_model, sizes, ids):
    model = make_model(KINDS[name](sizes))
    cache, prefixes = opened(store, model)
    held = prefixes.prefill(ids[:, :length])
    assert held == cache.get_seq_length() == (length - 1) // CHUNK * CHUNK
    again, loaded = opened(store, model)
    assert loaded.match(ids) == loaded.load(ids[:, :-1]) == held == again.get_seq_length()
    wanted = logits(model, cache, ids[:, : held + 20], held)
    assert torch.equal(logits(model, again, ids[:, : held + 20], held), wanted)
    theirs = run(model, DynamicCache(config=model.config), [ids[:, : held + 20]])[:, held:]
    assert torch.allclose(wanted, theirs, atol=1e-3, rtol=1e-3)


@every_model
def test_the_tokens_are_those_without_a_store(name, store, make_model, sizes, ids, greedy):
    model = make_model(KINDS[name](sizes))
    wanted = model.generate(ids, **greedy, **named(DynamicCache(config=model.config)))
    for loaded in (0, 288):
        cache, prefixes = opened(store, model)
        assert prefixes.match(ids) == loaded
        assert prefixes.prefill(ids) == 288
        tokens = model.generate(ids, **greedy, **named(cache))
        assert torch.equal(tokens, wanted)
        prefixes.save(tokens)


def test_a_chat_writes_only_what_its_window_has_new(store, wide, ids):
    _, prefixes = opened(store, wide)
    sizes = {}
    for length in (129, 161, 193, 300):
        known = set(store.keys())
        prefixes.prefill(ids[:, :length])
        blobs = {key: len(store.get(key)) for key in set(store.keys()) - known}
        sizes[length] = max(blobs.values())
    token = 2 * 2 * 16 * 4
    assert sizes[129] > 79 * token > sizes[161] > CHUNK * token
    assert sizes[161] == pytest.approx(sizes[193], abs=64)
    assert sizes[300] > 79 * token, "what was before the window is left out"
    for length in (161, 193, 300):
        again, loaded = opened(store, wide)
        held = loaded.load(ids[:, : length - 1])
        assert held == (length - 1) // CHUNK * CHUNK
        went_on, _ = opened(store, wide)
        run(wide, went_on, [ids[:, :held]])
        wanted, got = (logits(wide, x, ids[:, : held + 30], held) for x in (went_on, again))
        assert torch.allclose(got, wanted, atol=1e-5)


def test_a_prefix_is_shorter_where_an_older_checkpoint_is_gone(store, wide, ids):
    _, prefixes = opened(store, wide)
    for length in (129, 161):
        prefixes.prefill(ids[:, :length])
    keys = prefixes.keys(ids)
    store.delete(prefixes._checkpoints.key(keys[3]))
    again, loaded = opened(store, wide)
    with pytest.warns(StoreWarning, match="after token 160 can't be used .*after token 128 is"):
        assert loaded.load(ids) == 0
    assert loaded.prefill(ids[:, :161]) == 160
    assert opened(store, wide)[1].load(ids) == 160
    wanted = run(wide, DynamicCache(config=wide.config), [ids[:, :170]])[:, 160:]
    assert torch.allclose(run(wide, again, [ids[:, 160:170]]), wanted, atol=1e-3, rtol=1e-3)


@every_model
def test_two_texts_share_the_state_where_they_part(name, store, make_model, sizes, ids):
    """The second text stops where the first one's known prefix ends; the third begins there."""
    model = make_model(KINDS[name](sizes))
    texts = [torch.cat([ids[:, :100], ids[:, 200 + n : 260 + n]], dim=1) for n in (0, 1, 2)]
    for text, before in zip(texts, (0, 0, 96), strict=True):
        _, prefixes = opened(store, model)
        assert prefixes.match(text) == before
        assert prefixes.prefill(text) == 128
    assert opened(store, model)[1].match(torch.cat([ids[:, :100], ids[:, 210:240]], dim=1)) == 96


def test_it_stops_as_often_as_one_says(store, make_model, sizes, ids):
    model = make_model(KINDS["qwen3_next"](sizes))
    _, prefixes = opened(store, model)
    with pytest.raises(GeometryError, match="every should be a multiple of 32, not 40"):
        prefixes.prefill(ids, every=40)
    prefixes.prefill(ids, every=64)
    parted = [torch.cat([ids[:, :n], ids[:, -9:]], dim=1) for n in (40, 70, 135, 270)]
    assert [prefixes.match(text) for text in parted] == [0, 64, 128, 256]


def test_what_is_saved_elsewhere_is_said_to_be_useless(store, wide, ids):
    cache, prefixes = opened(store, wide)
    run(wide, cache, [ids[:, :100]])
    with pytest.warns(StoreWarning, match="stand at 100 tokens, where no chunk"):
        assert prefixes.save(ids[:, :100]) == 3
    assert opened(store, wide)[1].load(ids) == 0
    prefixes = opened(store, wide)[1]
    assert prefixes.prefill(ids[:, :100]) == 96, "what is known of K and V is where it stops"
    assert opened(store, wide)[1].load(ids) == 96


def test_windows_are_integers_where_the_cache_rounds(store, wide, ids):
    """Other ways to store them have other keys; what was rounded differs by half a step at most."""
    with pytest.raises(SpecError, match="windows should be 'int8' or 'exact', not 'fp8'"):
        opened(store, wide, windows="fp8")
    held = {}
    for windows in ("exact", "int8"):
        before = len(store)
        cache, prefixes = opened(store, wide, "int:bits=8", windows=windows)
        assert prefixes.load(ids) == 0 and prefixes.prefill(ids[:, :129]) == 128
        assert len(store) - before == (5 if windows == "exact" else 1), "chunks are the same"
        again, loaded = opened(store, wide, "int:bits=8", windows=windows)
        assert loaded.load(ids) == 128
        held[windows] = [again.layers[0].keys, again.layers[0].values]
        wanted = [cache.layers[0].keys, cache.layers[0].values]
        if windows == "exact":
            assert all(map(torch.equal, held[windows], wanted))
    assert opened(store, wide, "int:bits=8")[1].match(ids) == 128
    for exact, rounded in zip(*held.values(), strict=True):
        tokens = torch.arange(128 - 79, 128)
        for group in (0, 1):
            part = tokens // GROUP == group
            step = exact[:, :, part].abs().amax(2, keepdim=True) / 127
            assert ((exact - rounded)[:, :, part].abs() <= 0.51 * step).all()
        assert not torch.equal(exact, rounded)


@pytest.mark.parametrize("first", [0, 1, 32, 63, 64, 100])
@pytest.mark.parametrize("count", [1, 31, 64, 65, 200])
def test_integers_of_a_window_are_those_of_numpy(first, count):
    x = torch.randn(2, count, 3, 5, generator=torch.Generator().manual_seed(count))
    x[0, :, 1] = 0
    codes, scale = to_integers(x, 1, first)
    got = from_integers(codes, scale, 1, first)
    groups = (first + np.arange(count)) // GROUP - first // GROUP
    assert scale.shape == (2, groups[-1] + 1, 3, 5) and codes.dtype == torch.int8
    for group in range(groups[-1] + 1):
        part = x.numpy()[:, groups == group]
        step = np.abs(part).max(1, keepdims=True) / np.float32(127)
        wanted = np.rint(part / np.where(step == 0, 1, step))
        assert np.array_equal(codes.numpy()[:, groups == group], wanted)
        assert np.allclose(got.numpy()[:, groups == group], wanted * step, rtol=1e-6)


def test_every_flipped_byte_of_a_checkpoint_is_found(store, make_model, sizes, ids):
    model = make_model(KINDS["qwen3_next"](sizes))
    _, prefixes = opened(store, model)
    prefixes.prefill(ids[:, :65])
    kind = prefixes._checkpoints
    key = kind.key(prefixes.keys(ids)[1])
    blob, text = store.get(key), ids[0, :64].tolist()
    assert kind.unpack(blob, text).begin == 0
    for place in range(0, len(blob), max(1, len(blob) // 97)):
        damaged = bytearray(blob)
        damaged[place] ^= 4
        with pytest.raises((FormatError, IntegrityError)):
            kind.unpack(bytes(damaged), text)
    with pytest.raises(FormatError, match="of other tokens"):
        kind.unpack(blob, text[::-1])
    store.put(key, bytes(damaged))
    with pytest.warns(StoreWarning, match="after token 64 can't be used"):
        assert opened(store, model)[1].load(ids) == 0
    assert not store.contains(key)


def test_after_an_interrupt_nothing_is_saved(store, wide, ids):
    cache, prefixes = opened(store, wide)
    run(wide, cache, [ids[:, :64]])
    with interrupted(wide.model.layers[-1]):
        run(wide, cache, [ids[:, 64:96]])
    with pytest.raises((GeometryError, SnapshotError)):
        prefixes.save(ids[:, :96])
    assert opened(store, wide)[1].load(ids) == 0


def test_tokens_stored_by_another_spec_have_windows_and_states(store, wide, ids):
    cache, prefixes = opened(store, wide, storage="int:bits=8")
    prefixes.prefill(ids[:, :129])
    again, loaded = opened(store, wide, storage="int:bits=8")
    assert loaded.load(ids) == 128
    wanted, got = (run(wide, x, [ids[:, 128:150]]) for x in (cache, again))
    assert not torch.equal(got, wanted)
    assert (got - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_models_that_forget_their_state_are_refused(store, make_model, sizes, ids):
    config = JambaConfig(**sizes, num_experts=2, attn_layer_period=2, attn_layer_offset=1)
    model = make_model(config)
    with pytest.raises(SnapshotError, match="jamba computes several tokens as if none were"):
        prefix_cache(store, model, CompressedCache(model, "none"))
    # They do forget it: the same tokens in two calls give something else.
    whole = run(model, DynamicCache(config=config), [ids[:, :60]])
    parts = run(model, DynamicCache(config=config), ids[:, :60].split(30, dim=1))
    assert (whole - parts).abs().max() > 1e-3 * whole.abs().max()


def test_a_cache_of_another_text_is_refused_and_stores_nothing(store, wide, ids):
    cache, prefixes = opened(store, wide)
    prefixes.prefill(ids[:, :70])
    before, other = set(store.keys()), ids.flip(1)
    for wrong in (other, ids[:, :60]):
        with pytest.raises(GeometryError, match="not loaded or saved here as the first of"):
            prefixes.prefill(wrong)
    run(wide, cache, [ids[:, 64:70]])
    with pytest.raises(GeometryError, match="save\\(\\) the whole text before"):
        prefixes.prefill(ids)
    assert set(store.keys()) == before
    prefixes.save(ids[:, :70])
    assert prefixes.prefill(ids) == 288


@pytest.mark.parametrize("kind", ["sliding", "state"])
def test_after_an_interrupt_it_does_not_go_on(kind, store, make_model, sizes, ids):
    made = {"sliding": lambda s: gemma3(s, "full", "sliding"), "state": KINDS["qwen3_next"]}
    model = make_model(made[kind](sizes))
    cache, prefixes = opened(store, model)
    with interrupted(model.model.layers[-1]):
        prefixes.prefill(ids[:, :129])
    if cache.get_seq_length():
        with pytest.raises((GeometryError, SnapshotError)):
            prefixes.prefill(ids[:, :129])
    cache.reset()
    assert prefixes.prefill(ids[:, :129]) == 128 and len(store) == 5


def test_a_checkpoint_that_can_not_be_read_now_stays(store, wide, ids, monkeypatch):
    """Another secret, a server that is down: the entry may be good."""
    _, prefixes = opened(store, wide)
    prefixes.prefill(ids[:, :129])
    held = set(store.keys())
    _, again = opened(store, wide)
    key = again._checkpoints.key(again.keys(ids)[3])
    get = store.get
    with monkeypatch.context() as patch:
        patch.setattr(store, "get_unverified", lambda x: [None if k == key else get(k) for k in x])
        with pytest.warns(StoreWarning, match="after token 128 is gone"):
            assert again.load(ids) == 0
    assert set(store.keys()) == held
    assert opened(store, wide)[1].load(ids) == 128
