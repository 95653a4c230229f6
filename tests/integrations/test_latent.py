"""Models with latent attention run on compressed latents, with no change in the model."""

import copy
import pickle
import weakref

import pytest
import torch
from tiny_configs import deepseek
from transformers import DeepseekV2Config, DeepseekV3Config, DynamicCache

from kvpact import CacheGeometry, PagedKVCache
from kvpact.errors import KVPactError
from kvpact.integrations.transformers import CompressedCache, PagedBatch
from kvpact.integrations.transformers.model import fallback
from kvpact.integrations.transformers.versions import KEEPS_LATENTS, named

if not KEEPS_LATENTS:
    pytest.skip("models of this transformers cache no latents", allow_module_level=True)


@pytest.fixture
def config():
    return DeepseekV3Config


@pytest.fixture
def model(config, make_model, sizes, monkeypatch):
    monkeypatch.setattr(fallback, "_said", set())
    made = make_model(deepseek(sizes, config))
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(3)  # away from the ties of a new model
    return made


def expanded_tokens(model, monkeypatch):
    """Count the tokens of every latent that goes through `kv_b_proj`."""
    counts = []
    for layer in model.model.layers:
        # On the class of the projection: hooks and other classes would not be absorbed.
        weight = layer.self_attn.kv_b_proj.weight
        forward = torch.nn.Linear.forward

        def counting(self, x, weight=weight, forward=forward):
            if self.weight is weight:
                counts.append(x.shape[2])
            return forward(self, x)

        monkeypatch.setattr(torch.nn.Linear, "forward", counting)
    return counts


@pytest.mark.parametrize("config", [DeepseekV2Config, DeepseekV3Config])
def test_uncompressed_latents_give_the_same_tokens(model, prompt, greedy, fallbacks, monkeypatch):
    wanted = model.generate(**prompt, **greedy, **named(DynamicCache(config=model.config)))
    counts = expanded_tokens(model, monkeypatch)
    layers = model.config.num_hidden_layers
    for attempt in range(2):
        counts.clear()
        cache = CompressedCache(model.config, "none")
        options = {**prompt, **greedy, **named(cache)}
        got, said = fallbacks(lambda options=options: model.generate(**options))
        assert torch.equal(got, wanted) and said == []
        # The prompt is expanded once, and after that nothing; a new module is looked at, too.
        probes = [3] * layers if attempt == 0 else []
        assert sorted(counts) == sorted([40] * layers + probes)
    assert all(layer.cache.geometry.latent for layer in cache.layers)


def test_the_other_ways_to_generate(model, prompt, greedy):
    def both(**options):
        made = {**prompt, **greedy, **options}
        wanted = model.generate(**made, **named(DynamicCache(config=model.config)))
        got = model.generate(**made, **named(CompressedCache(model.config, "none")))
        return torch.equal(got, wanted)

    assert both(num_beams=3) and both(prefill_chunk_size=16)
    twin = copy.deepcopy(model)
    cache = CompressedCache(twin.config, "none")
    wanted = model.generate(**prompt, **greedy)
    assert torch.equal(twin.generate(**prompt, **greedy, **named(cache)), wanted)
    # A copied module absorbs its own weights, not those of the one that it was copied from.
    with torch.no_grad():
        for layer in twin.model.layers:
            layer.self_attn.kv_b_proj.weight.neg_()
    wanted = twin.generate(**prompt, **greedy, **named(DynamicCache(config=twin.config)))
    cache = CompressedCache(twin.config, "none")
    assert torch.equal(twin.generate(**prompt, **greedy, **named(cache)), wanted)


def test_chunks_and_padding(model, prompt):
    def run(cache):
        parts = []
        with torch.no_grad():
            for start in range(0, 40, 8):
                mask = prompt["attention_mask"][:, : start + 8]
                ids = prompt["input_ids"][:, start : start + 8]
                parts.append(model(ids, attention_mask=mask, **named(cache)).logits)
        return torch.cat(parts, 1)

    cache = CompressedCache(model.config, "int:bits=8,sinks=2,window=0/none")
    real = prompt["attention_mask"] == 1
    wanted = run(DynamicCache(config=model.config))[real]
    got = run(cache)[real]
    assert 0 < (got - wanted).norm() < 0.05 * wanted.norm()
    # Sinks are the first tokens that are no padding, for the first chunk too.
    padding = 40 - prompt["attention_mask"].sum(1)
    exact = CompressedCache(model.config, "none")
    run(exact)
    for row, first in enumerate(padding.tolist()):
        entry = cache.layers[0].cache.entry(0)
        wanted = exact.layers[0].keys[row, 0, first : first + 2]
        assert torch.allclose(entry.k.sinks[row, 0], wanted, atol=1e-5)


def test_paged_latents(model, prompt, greedy):
    wanted = model.generate(**prompt, **greedy)
    pool = PagedKVCache("none", CacheGeometry.mla(model.config.num_hidden_layers, 32, 16), 64)
    batch = PagedBatch(model.config, pool)
    assert torch.equal(model.generate(**prompt, **greedy, **named(batch)), wanted)
    batch.reset()
    assert pool.num_free_pages == pool.num_pages


class Adapted(torch.nn.Module):
    """A projection that is no plain linear layer, as an adapter makes it."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) * 1.5


def hook(projection):
    projection.register_forward_hook(lambda module, given, output: output * 1.5)
    return projection


class Opaque(torch.nn.Parameter):
    """Numbers that a layer can compute with, and nobody else can read (quantised weights)."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.view, torch.Tensor.detach):
            raise NotImplementedError
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


def hide(projection):
    projection.weight = Opaque(0.5 * projection.weight.data, requires_grad=False)
    return projection


@pytest.mark.parametrize(
    ("change", "after_a_run"),
    [(Adapted, True), (hook, False), (hook, True), (hide, False), (hide, True)],
)
def test_a_projection_that_can_not_be_absorbed_is_run_as_it_is(
    model, prompt, greedy, fallbacks, change, after_a_run
):
    def run():
        cache = CompressedCache(model.config, "none")
        return model.generate(**prompt, **greedy, **named(cache))

    if after_a_run:
        run()
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = change(layer.self_attn.kv_b_proj)
    wanted = model.generate(**prompt, **greedy)
    got, said = fallbacks(run)
    assert torch.equal(got, wanted)
    assert len(said) == 1 and "decompressed" in said[0]


def test_the_model_stays_what_it_was(model, prompt, greedy):
    names, before = set(model.state_dict()), model.generate(**prompt, **greedy)
    model.generate(**prompt, **greedy, **named(CompressedCache(model.config, "none")))
    attention = model.model.layers[0].self_attn
    assert "expand_kv" not in vars(attention)
    assert set(model.state_dict()) == names
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again.generate(**prompt, **greedy), before)
    alive = weakref.ref(attention)
    del model, attention
    # Only this test's fixture still holds the model.
    assert alive() is not None


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_refused(training, model, prompt):
    cache = CompressedCache(model.config, "none")
    logits = model.train(training)(**prompt, **named(cache)).logits
    with pytest.raises(KVPactError, match="no gradients through a compressed cache"):
        logits.sum().backward()
    # Without a compressed cache they are as ever.
    model(**prompt).logits.sum().backward()
    assert model.model.layers[0].self_attn.kv_b_proj.weight.grad.abs().sum() > 0


def test_two_models_do_not_take_each_others_tokens(model, prompt, make_model, sizes):
    eager = make_model(deepseek(sizes), "eager", seed=1)
    held = CompressedCache(eager.config, "none", attention="keep")
    exact = CompressedCache(model.config, "none")
    with torch.no_grad():
        eager(prompt["input_ids"][:1], **named(held))
        model(**prompt, **named(DynamicCache(config=model.config)))
        model(**prompt, **named(exact))
    assert [layer.get_seq_length() for layer in held.layers] == [40, 40]
    assert all(layer.keys.shape[0] == 1 for layer in held.layers)
    assert all(layer.cache.entry(0).padding.tolist() == [7, 0] for layer in exact.layers)


def test_rows_of_unlike_length_on_a_model_that_ran_nothing_yet(model, make_model):
    pool = PagedKVCache("none", CacheGeometry.mla(model.config.num_hidden_layers, 32, 16), 64)
    ids = torch.arange(3, 63).unsqueeze(0)
    seqs = []
    for count in (20, 33):
        batch = PagedBatch(model.config, pool)
        with torch.no_grad():
            model(ids[:, :count], **named(batch))
        seqs += batch.seqs
    twin = copy.deepcopy(model)
    new, positions = torch.tensor([[5], [6]]), torch.tensor([[20], [33]])
    with torch.no_grad():
        got = twin(new, position_ids=positions, **named(PagedBatch(twin.config, pool, seqs))).logits
        for row, count in enumerate((20, 33)):
            whole = torch.cat([ids[:, :count], new[row : row + 1]], 1)
            wanted = model(whole).logits[:, -1:]
            assert torch.allclose(got[row : row + 1], wanted, atol=1e-3, rtol=1e-3)


def test_other_attention_reads_expanded_latents(model, prompt, greedy):
    wanted = model.generate(**prompt, **greedy)
    cache = CompressedCache(model.config, "none", attention="keep")
    assert torch.equal(model.generate(**prompt, **greedy, **named(cache)), wanted)
    cache = CompressedCache(model.config, "none")
    model.generate(**prompt, **greedy, **named(cache))  # the modules hand handles on now
    model.set_attn_implementation("eager")
    cache = CompressedCache(model.config, "none", attention="keep")
    assert torch.equal(model.generate(**prompt, **greedy, **named(cache)), wanted)


def test_packed_only_stores_first(model, prompt, greedy):
    cache = CompressedCache(model.config, "int:bits=8,sinks=0,window=0", exact_new=False)
    model.generate(**prompt, **greedy, **named(cache))
    assert cache.get_seq_length() == 40 + greedy["max_new_tokens"] - 1


def test_the_default_spec_learns_from_a_short_prompt_and_what_follows(make_model, sizes):
    """Energies of queries had the rotated part, too, and the call that learns raised."""
    model = make_model(deepseek(sizes))
    ids = torch.randint(3, 128, (2, 150), generator=torch.Generator().manual_seed(2))
    cache, exact = CompressedCache(model), DynamicCache(config=model.config)
    with torch.no_grad():
        for part in ids.split([6, 1, 90, 1, 52], dim=1):
            got, wanted = (model(part, **named(x)).logits for x in (cache, exact))
    assert cache.layers[0].cache.entry(0).k.codec.ready
    p, q = wanted.log_softmax(-1), got.log_softmax(-1)
    assert (p.exp() * (p - q)).sum(-1).mean() < 0.01
