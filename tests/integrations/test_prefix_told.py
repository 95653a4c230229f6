"""What K and V depend on, and a prefix's key does not: nothing of it gets into a store."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kvpact import Snapshot
from kvpact.errors import GeometryError, MismatchError
from kvpact.integrations.fingerprint import model_fingerprint
from kvpact.integrations.transformers import CompressedCache, prefix_cache
from kvpact.integrations.transformers.versions import named

SHAPE_AND_SEED = (1, 200), 4
pytestmark = pytest.mark.usefixtures("no_grad")


def opened(store, model, **options):
    cache = CompressedCache(model.config, "none")
    return cache, prefix_cache(store, model, cache, **options)


def hole(model, ids):
    mask = torch.ones_like(ids)
    mask[:, 20:60] = 0
    return [{"input_ids": ids, "attention_mask": mask}]


def hidden_later(model, ids):
    """The second call does not see the first tokens, as if they were padding."""
    mask = torch.ones_like(ids)
    mask[:, :30] = 0
    return [{"input_ids": ids[:, :90]}, {"input_ids": ids[:, 90:], "attention_mask": mask}]


def own_mask(model, ids):
    seen = torch.ones(1, 1, 200, 200, dtype=torch.bool).tril() & (torch.arange(200) != 5)
    return [{"input_ids": ids, "attention_mask": seen | torch.eye(200, dtype=torch.bool)}]


def skipped_positions(model, ids):
    places = torch.arange(90, 200)[None] + 7
    return [{"input_ids": ids[:, :90]}, {"input_ids": ids[:, 90:], "position_ids": places}]


def embeddings(model, ids):
    inside = model.get_input_embeddings()(ids[:, 90:])
    return [{"input_ids": ids[:, :90]}, {"inputs_embeds": inside + 1}]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("odd", "why"), [
    (hole, "attention_mask"), (hidden_later, "attention_mask"), (own_mask, "attention_mask"),
    (lambda model, ids: [{"input_ids": ids, "position_ids": torch.arange(100, 300)[None]}],
     "position_ids"),
    (skipped_positions, "position_ids"), (embeddings, "inputs_embeds"),
])  # fmt: skip
def test_what_no_id_tells_is_refused_until_a_reset(llama, store, ids, odd, why, attention):
    llama.set_attn_implementation(attention)
    cache, prefixes = opened(store, llama)
    for given in odd(llama, ids):
        llama(**given, **named(cache))
    twin, again = copy.deepcopy(cache), CompressedCache(llama.config, "none")
    again.restore(Snapshot.from_bytes(cache.snapshot().to_bytes()))
    for held, told in ((cache, why), (twin, why), (again, "before a snapshot")):
        prefixes = prefix_cache(store, llama, held)
        with pytest.raises(GeometryError, match=told):
            prefixes.save(ids)
    assert len(store) == 0
    cache.reset()
    llama(ids, **named(cache))
    assert prefix_cache(store, llama, cache).save(ids) == 3


def test_a_rollback_takes_what_is_odd_with_it(llama, store, ids):
    cache, prefixes = opened(store, llama)
    for given in embeddings(llama, ids):
        llama(**given, **named(cache))
    cache.crop(-110)
    assert prefixes.save(ids[:, :90]) == 1
    llama(input_ids=ids[:, 90:], **named(cache))
    assert prefixes.save(ids) == 2


def test_arguments_that_a_model_has_for_itself(store, ids):
    """GPT-2 adds the embedding of a token's type, of type 0, too."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 256}
    model = GPT2LMHeadModel(GPT2Config(**shape)).eval()
    cache, prefixes = opened(store, model)
    model(ids, token_type_ids=torch.zeros_like(ids), **named(cache))
    with pytest.raises(GeometryError, match="token_type_ids"):
        prefixes.save(ids)


def test_calls_of_another_module_are_not_taken_for_text(llama, store, ids):
    cache, prefixes = opened(store, llama)
    llama(ids[:, :90], **named(cache))
    llama.model(inputs_embeds=llama.get_input_embeddings()(ids[:, 90:]) * 2, **named(cache))
    with pytest.raises(GeometryError, match=r"token 90 .*did not go through the model"):
        prefixes.save(ids)


def test_a_row_of_a_padded_batch_and_what_generate_says_of_plain_text_are_saved(
    llama, store, ids, greedy
):
    both = ids.repeat(2, 1)
    mask = torch.ones_like(both)
    mask[1, :9] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache, prefixes = opened(store, llama)
    llama(both, attention_mask=mask, position_ids=places, **named(cache))
    cache.batch_select_indices(torch.tensor([0]))
    assert prefixes.save(ids) == 3
    wanted = llama.generate(ids, **greedy)
    cache, prefixes = opened(store, llama)
    assert prefixes.load(ids[:, :-1]) == 192
    with torch.inference_mode():
        tokens = llama.generate(ids, attention_mask=torch.ones_like(ids), **named(cache), **greedy)
    assert torch.equal(tokens, wanted)
    more = torch.cat([tokens, ids[:, :60]], 1)
    llama(more[:, cache.get_seq_length() :], **named(cache))
    assert prefixes.save(more) == 1


@pytest.mark.parametrize("how", ["prefilled", "generated", "copied"])
def test_other_ids_than_the_models_are_refused(llama, store, ids, greedy, how):
    cache, prefixes = opened(store, llama)
    if how == "prefilled":
        prefixes.prefill(ids)
    before = len(store)
    tokens = llama.generate(ids, **named(cache), **greedy)
    if how == "copied":
        cache = copy.deepcopy(cache)
        prefixes = prefix_cache(store, llama, cache)
    changed = tokens.clone()
    changed[0, 150] += 1
    for wrong, at in ((tokens[:, 1:], 0), (changed, 150)):
        with pytest.raises(GeometryError, match=f"token {at} is .* the model was given"):
            prefixes.save(wrong)
    assert len(store) == before
    prefixes.save(tokens)
    assert len(store) == 3


def step(model):
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with torch.enable_grad():
        model(torch.arange(3, 9)[None], labels=torch.arange(3, 9)[None]).loss.backward()
    optimizer.step()


def past_autograd(model):
    for weight in model.parameters():
        weight.data.copy_(weight.data * 1.01)


@pytest.mark.parametrize("change", [
    step, past_autograd,
    lambda model: model.load_state_dict({k: v * 1.01 for k, v in model.state_dict().items()}),
], ids=["a step", "past autograd", "loaded"])  # fmt: skip
def test_weights_that_change_have_prefixes_of_their_own(llama, store, ids, greedy, change):
    cache, prefixes = opened(store, llama)
    given, named_one = opened(store, llama, fingerprint=model_fingerprint(llama))
    assert prefixes.prefill(ids) == 192 and len(store) == 3
    change(llama)
    tokens = llama.generate(ids, **named(cache), **greedy)
    with pytest.raises(MismatchError, match="changed since the cache was empty"):
        prefixes.save(tokens)
    cache.reset()
    assert prefixes.load(ids[:, :-1]) == 0
    tokens = llama.generate(ids, **named(cache), **greedy)
    assert torch.equal(tokens, llama.generate(ids, **greedy))
    assert prefixes.save(tokens) == 3 and len(store) == 6
    assert opened(store, llama)[1].match(ids) == 192
    with pytest.raises(MismatchError, match="the present fingerprint and adapter"):
        named_one.load(ids)
    assert given.get_seq_length() == 0


class Adapted(torch.nn.Module):
    """As PEFT's layers: which adapters are active, off or merged, and how strongly."""

    def __init__(self, base):
        super().__init__()
        self.base, self._active_adapter, self.scaling = base, ["one"], {"one": 1.0, "two": 1.0}

    def forward(self, x):
        return self.base(x)


@pytest.mark.parametrize("change", [
    {"_active_adapter": ["two"]}, {"scaling": {"one": 2.0, "two": 1.0}},
    {"merged_adapters": ["one"]}, {"_disable_adapters": True},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_another_adapter_needs_another_name(llama, store, ids, change):
    layer = llama.model.layers[0]
    layer.mlp = Adapted(layer.mlp)
    cache, prefixes = opened(store, llama, adapter="one")
    assert prefixes.prefill(ids) == 192
    vars(layer.mlp).update(change)
    with pytest.raises(MismatchError, match="weights or adapters changed"):
        prefixes.save(ids[:, :192])
    cache.reset()
    with pytest.raises(MismatchError, match=r"make a new one, with .* adapter"):
        prefixes.prefill(ids)
    assert opened(store, llama, adapter="changed")[1].match(ids) == 0
