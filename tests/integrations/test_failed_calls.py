"""A call that fails between two layers leaves tokens in some: the next call takes them back."""

import copy
import warnings

import pytest
import torch
from tiny_configs import KINDS, gemma3, interrupted, run
from tiny_models import tiny_model
from transformers import LlamaConfig

from kvpact import CacheGeometry, PagedKVCache
from kvpact.errors import KVPactError
from kvpact.integrations.transformers import CompressedCache, PagedBatch
from kvpact.integrations.transformers.model import fallback
from kvpact.integrations.transformers.versions import named

LOSSY = "int:bits=8,sinks=0,window=0"


@pytest.fixture
def deep(make_model, sizes):
    """Return a Llama of four layers."""
    return make_model(LlamaConfig(**{**sizes, "num_hidden_layers": 4}))


def held(cache):
    return [layer.get_seq_length() for layer in cache.layers]


def two(model, spec, ids, **options):
    """Return two caches that hold the same tokens."""
    caches = [CompressedCache(model, spec, **options) for _ in range(2)]
    if ids.shape[1]:
        for cache in caches:
            run(model, cache, [ids])
    return caches


@pytest.mark.parametrize("spec", ["none", LOSSY, "trellis:bits=4"])
@pytest.mark.parametrize("reached", [1, 3])
@pytest.mark.parametrize("tokens", [0, 30])
def test_the_next_call_runs_as_if_the_failed_one_had_not_been(tokens, reached, spec, deep, ids):
    """Whichever layer the call got to; with `trellis` first tokens wait, and are not stored."""
    cache, never = two(deep, spec, ids[:, :tokens])
    with interrupted(deep.model.layers[reached]):
        run(deep, cache, [ids[:, tokens : tokens + 9]])
    assert held(cache) == [tokens + 9] * reached + [tokens] * (4 - reached)
    assert cache.get_seq_length() == tokens
    parts = ids[:, tokens:].split([10, 1, 19 + 30 - tokens], 1)
    got, wanted = (run(deep, x, parts) for x in (cache, never))
    assert torch.allclose(got, wanted, atol=1e-4)
    assert held(cache) == [60] * 4


def test_a_model_or_a_hook_that_raises_is_no_other(deep, ids):
    """Twice in a row, at unlike layers, and in the model's own code between two layers."""
    cache, never = two(deep, LOSSY, ids[:, :30])
    for layer, count in ((2, 5), (3, 2)):
        hook = deep.model.layers[layer].mlp.register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(deep, cache, [ids[:, 30 : 30 + count]])
        hook.remove()
        if layer == 3:  # all layers had taken them
            assert held(cache) == [32] * 4
    never = run(deep, never, [ids[:, 30:32], ids[:, 32:]])
    assert torch.allclose(run(deep, cache, [ids[:, 32:]]), never[:, 2:], atol=1e-4)


@pytest.mark.parametrize("tokens", [0, 30])
def test_a_warning_that_is_an_error_is_no_other(tokens, deep, ids):
    deep.set_attn_implementation("eager")
    cache, never = two(deep, LOSSY, ids[:, :tokens], attention="keep")
    fallback._said.clear()
    with warnings.catch_warnings(action="error"), pytest.raises(fallback.FallbackWarning):
        run(deep, cache, [ids[:, tokens : tokens + 30]])
    got, wanted = (run(deep, x, [ids[:, tokens:]]) for x in (cache, never))
    assert torch.allclose(got, wanted, atol=1e-4)


def test_positions_and_masks_of_the_caller(deep, ids):
    """Nobody asks for the sizes of a mask then; the length was asked."""
    cache, never = two(deep, "none", ids[:, :30])
    with interrupted(deep.model.layers[2]):
        run(deep, cache, [ids[:, 30:33]])
    mask = torch.ones(3, 1, 30, 60, dtype=torch.bool).tril(30)
    with torch.no_grad():
        got = deep(ids[:, 30:], attention_mask=mask, **named(cache)).logits
    assert torch.allclose(got, run(deep, never, [ids[:, 30:]]), atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3"])
def test_an_index_is_taken_back_too(name, ids):
    model = tiny_model(name)
    cache, never = two(model, "none", ids[:, :40])
    with interrupted(model.model.layers[1]):
        run(model, cache, [ids[:, 40:45]])
    got, wanted = (run(model, x, [ids[:, 40:]]) for x in (cache, never))
    assert torch.allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma3", "falcon_h1", "inkling"])
def test_what_can_not_be_taken_back_is_said(kind, filled, ids):
    """Windows that let go of tokens, and states: the cache is as it was left, and says so again."""
    model, cache = filled(kind, 40)
    with interrupted(model.model.layers[-1]):
        run(model, cache, [ids[:, 40:42]])
    for _ in range(2):
        with pytest.raises(KVPactError, match=r"failed when some .* reset the cache"):
            run(model, cache, [ids[:, 40:]])
    cache.reset()
    never = CompressedCache(model, "none")
    assert torch.equal(*(run(model, x, [ids]) for x in (cache, never)))


@pytest.mark.parametrize("kind", ["deepseek_v4", "dots3", "falcon_h1", "gemma3", "inkling"])
def test_a_first_call_can_always_be_taken_back(kind, make_model, sizes, ids):
    model = make_model(KINDS[kind](sizes))
    cache, never = (CompressedCache(model, "none") for _ in range(2))
    with interrupted(model.model.layers[-1]):
        run(model, cache, [ids[:, :40]])
    assert torch.equal(*(run(model, x, [ids[:, :40], ids[:, 40:]]) for x in (cache, never)))


def test_windows_that_hold_all_tokens_are_taken_back(make_model, sizes, ids):
    model = make_model(gemma3(sizes, "sliding", "full", "sliding"))
    cache, never = two(model, "none", ids[:, :9])
    with interrupted(model.model.layers[2]):
        run(model, cache, [ids[:, 9:12]])
    assert torch.equal(*(run(model, x, [ids[:, 9:]]) for x in (cache, never)))


def test_rows_of_a_paged_batch_are_taken_back_each(deep, ids):
    """Rows of unlike lengths, one of which the call that failed did not have."""
    paged = PagedKVCache("none", CacheGeometry(4, 2, 16), num_pages=64)
    seqs = [paged.allocate() for _ in range(3)]
    lengths = 20, 31, 25

    def step(rows, tokens):
        batch = PagedBatch(deep.config, paged, [seqs[row] for row in rows])
        begin = torch.tensor([[paged.seq_len(seqs[row], 3)] for row in rows])
        places = begin + torch.arange(tokens.shape[1])
        with torch.no_grad():
            return deep(tokens, position_ids=places, **named(batch)).logits

    for row, length in enumerate(lengths):
        step([row], ids[row : row + 1, :length])
    wanted = [step([row], ids[row : row + 1, 40:41]) for row in range(3)]
    for seq, length in zip(seqs, lengths, strict=True):
        paged.truncate(seq, length)
    with interrupted(deep.model.layers[2]):
        step([0, 1], ids[:2, 50:54])
    got = step([0, 1, 2], ids[:, 40:41])
    assert torch.allclose(got, torch.cat(wanted), atol=1e-4)
    found = [[paged.seq_len(seq, i) for i in range(4)] for seq in seqs]
    assert found == [[length + 1] * 4 for length in lengths]


def test_layers_that_are_left_out_are_no_failure(deep, ids):
    """Scripts cut a model's layers off, and its config, of which caches are made, stays."""
    deep.model.layers = deep.model.layers[:2]
    with torch.no_grad():
        wanted = deep(ids).logits
    cache = CompressedCache(deep, "none")
    assert torch.allclose(run(deep, cache, ids.split([50, 9, 1], 1)), wanted, atol=1e-4)
    assert held(cache) == [60, 60, 0, 0]


def test_reading_the_length_changes_nothing_of_a_call_that_runs(deep, ids):
    """A hook looks at the cache; and layers are filled one by one, in parts."""
    cache, never = two(deep, "none", ids[:, :30])
    layer, seen = deep.model.layers[2], []
    hook = layer.register_forward_hook(lambda *args: seen.append(cache.get_seq_length()))
    got = run(deep, cache, ids[:, 30:].split([20, 9, 1], 1))
    hook.remove()
    assert torch.equal(got, run(deep, never, ids[:, 30:].split([20, 9, 1], 1)))
    assert len(seen) == 3
    by_hand, x = CompressedCache(deep, "none"), torch.ones(1, 2, 7, 16)
    for index in range(4):
        for count in (7, 14):
            by_hand.update(x, x, index)
            assert by_hand.get_seq_length(index) == count


def test_a_copy_takes_back_its_own(deep, ids):
    cache, never = two(deep, "none", ids[:, :30])
    with interrupted(deep.model.layers[2]):
        run(deep, cache, [ids[:, 30:33]])
    twin = copy.deepcopy(cache)
    wanted = run(deep, never, [ids[:, 30:]])
    for each in (twin, cache):
        assert torch.allclose(run(deep, each, [ids[:, 30:]]), wanted, atol=1e-4)
