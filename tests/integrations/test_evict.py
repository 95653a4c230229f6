"""A model goes on as if its cache had been cut out of an exact one, at the same positions."""

import copy

import pytest
import torch
import transformers
from tests.helpers.faults import disturbed, length_of

from kvpact.errors import GeometryError, KVPactError, SnapshotError
from kvpact.integrations.transformers import CompressedCache, prefix_cache, pressed
from kvpact.integrations.transformers.versions import named
from kvpact.stores import MemoryStore

PAST, NEW = 250, 50
SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 100, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2)
    config.initializer_range = 0.3
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def ids():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 100, (2, PAST + NEW), generator=generator)


def continued(model, ids, places):
    """Logits of the new tokens over an exact cache of which each head has some places alone."""
    exact = transformers.DynamicCache()
    model(ids[:, :PAST], **named(exact))
    for index, layer in enumerate(exact.layers):
        place = places(index, layer)[..., None].expand(-1, -1, -1, layer.keys.shape[3])
        layer.keys, layer.values = layer.keys.gather(2, place), layer.values.gather(2, place)
    kept = exact.layers[0].keys.shape[2]
    mask = torch.ones(NEW, kept + NEW, dtype=torch.bool).tril(kept).expand(2, 1, -1, -1)
    positions = torch.arange(PAST, PAST + NEW)[None]
    more = {"position_ids": positions, "attention_mask": mask}
    return model(ids[:, PAST:], **named(exact), **more).logits


def without(*ranges):
    kept = [t for t in range(PAST) if not any(begin <= t < end for begin, end in ranges)]
    return lambda index, layer: torch.tensor(kept).expand(*layer.keys.shape[:2], len(kept))


def cached(model, ids, spec="none"):
    cache = CompressedCache(model, spec)
    model(ids[:, :PAST], **named(cache))
    return cache


def assert_near(found, wanted, bound=1e-5):
    assert (found - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize("call", ["evict", "compact"])
def test_an_interrupt_leaves_what_is_held_and_what_is_counted_alike(llama, ids, call):
    def let_go(cache):
        cache.evict(40, 100) if call == "evict" else cache.compact(torch.arange(60, PAST))

    whole, seen = cached(llama, ids), set()
    let_go(copy.deepcopy(whole))  # what is computed once is known
    twin = copy.deepcopy(whole)
    lines = length_of(lambda: let_go(twin), "interrupt")
    for n in range(lines - 40, lines + 1):
        cache = copy.deepcopy(whole)
        disturbed(lambda cache=cache: let_go(cache), "interrupt", n)
        seen.add((cache.held().seq_len(), cache._shared.gaps.gone, cache.get_seq_length()))
    assert seen == {(PAST, 0, PAST), (PAST - 60, 60, PAST)}


def test_logits_are_those_of_a_cache_without_the_tokens(llama, ids):
    cache = cached(llama, ids)
    bytes_held = cache.memory_usage()
    cache.evict(40, 100)
    cache.evict(90, 170)  # 90 to 100 are gone already
    cache.evict(200, 201)
    assert cache.get_seq_length() == PAST
    assert cache.memory_usage() < bytes_held
    wanted = continued(llama, ids, without((40, 170), (200, 201)))
    assert (wanted - llama(ids).logits[:, PAST:]).abs().max() > 0.01 * wanted.abs().max()
    fork = copy.deepcopy(cache)
    ones = torch.ones_like(ids)
    assert_near(llama(ids[:, PAST:], **named(cache), attention_mask=ones).logits, wanted)
    steps = [llama(ids[:, t : t + 1], **named(fork)).logits for t in range(PAST, PAST + NEW)]
    assert_near(torch.cat(steps, 1), wanted)


def test_rollbacks_go_behind_and_in_front_of_a_gap(llama, ids):
    cache = cached(llama, ids)
    cache.evict(40, 170)
    wanted = continued(llama, ids, without((40, 170)))
    llama(ids[:, PAST:], **named(cache))
    cache.crop(-NEW)
    assert_near(llama(ids[:, PAST:], **named(cache)).logits, wanted)
    cache.crop(-(PAST + NEW - 100))
    assert cache.get_seq_length() == 100 and cache.held().seq_len() == 40
    cache.crop(-70)
    assert cache.get_seq_length() == cache.held().seq_len() == 30
    found = llama(ids[:, 30:], **named(cache)).logits
    assert_near(found, llama(ids).logits[:, 30:])


@pytest.mark.parametrize("spec", ["none", "turboquant:bits=4", "trellis:bits=4"])
def test_snapshots_have_gaps(llama, ids, spec, tmp_path):
    cache = cached(llama, ids, spec)
    cache.evict(40, 170)
    snapshot = cache.snapshot()
    other = CompressedCache(llama, spec)
    other.restore(snapshot)
    assert other.get_seq_length() == PAST
    logits = [llama(ids[:, PAST:], **named(each)).logits for each in (cache, other)]
    assert torch.equal(*logits)
    other.crop(-(PAST + NEW - 100))
    assert other.held().seq_len() == 40
    with pytest.raises(KVPactError):  # a cache that knows of no positions
        other.held().fork().restore(snapshot)


class Norms:
    compression_ratio = 0.3

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert hidden_states.shape == (2, PAST, 64)
        return -keys.norm(dim=-1)


def test_heads_keep_what_a_press_scores_best(llama, ids):
    def best(index, layer):
        return (-layer.keys.norm(dim=-1)).topk(175).indices.sort(-1).values

    cache = CompressedCache(llama, "none")
    with pressed(llama, cache, Norms()):
        llama(ids[:, :PAST], **named(cache))
    assert cache.get_seq_length() == PAST
    assert cache.held().seq_len() == 175
    wanted = continued(llama, ids, best)
    assert_near(llama(ids[:, PAST:], **named(cache)).logits, wanted)
    with pytest.raises(GeometryError, match=f"compact.* left {PAST}"):
        cache.crop(-NEW - 1)
    with pytest.raises(GeometryError, match="compact"):
        cache.evict(10, 20)
    cache.crop(-NEW)
    assert_near(llama(ids[:, PAST:], **named(cache)).logits, wanted)
    whole = cached(llama, ids)
    whole.compact(torch.arange(PAST))  # nothing goes
    whole.crop(-10)
    assert whole.get_seq_length() == PAST - 10
    cache = CompressedCache(llama, "none")
    with pytest.raises(KVPactError, match="no call"), pressed(llama, cache, Norms()):
        pass
    with pytest.raises(KVPactError, match="object has no score"):
        pressed(llama, cache, object()).__enter__()


def test_windows_forget_only_what_they_do_not_see(ids):
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        **SIZES, num_hidden_layers=6, num_key_value_heads=1, head_dim=32, sliding_window=32
    )
    model = transformers.Gemma3ForCausalLM(config).eval().requires_grad_(False)
    cache = cached(model, ids, "int:bits=8")
    with pytest.raises(GeometryError, match="still sees tokens from 219"):
        cache.evict(150, 220)
    cache.evict(50, 219)
    assert cache.get_seq_length() == PAST
    other = CompressedCache(model, "int:bits=8")
    other.restore(cache.snapshot())
    logits = [model(ids[:, PAST:], **named(each)).logits for each in (cache, other)]
    assert torch.equal(*logits)


def test_what_would_be_wrong_is_refused(llama, ids):
    cache = cached(llama, ids)
    for begin, end in ((5, PAST + 1), (7, 6), (-1, 3)):
        with pytest.raises(GeometryError):
            cache.evict(begin, end)
    prefixes = prefix_cache(MemoryStore(), llama, cache=CompressedCache(llama, "none"))
    llama(ids[:1, :PAST], **named(prefixes.cache))
    prefixes.cache.evict(40, 170)
    with pytest.raises(SnapshotError, match="no prefix"):
        prefixes.save(ids[:1, :PAST])
    cache.evict(40, 170)
    mask = torch.ones_like(ids)
    mask[:, 200:210] = 0
    with pytest.raises(KVPactError, match="mask hides"):
        llama(ids[:, PAST:], **named(cache), attention_mask=mask)
    llama.set_attn_implementation("sdpa")
    try:
        with pytest.raises(KVPactError, match="'sdpa' does not know"):
            llama(ids[:, PAST:], **named(cache))
    finally:
        llama.set_attn_implementation("kvpact")
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_near(llama(ids, **named(cache)).logits, llama(ids).logits)
