"""Assisted generation over two compressed caches: rejected tokens leave nothing behind."""

import copy

import pytest
import torch

from kvpact.errors import GeometryError
from kvpact.integrations.transformers import CachedDraft, CompressedCache
from kvpact.integrations.transformers.versions import named


@pytest.fixture
def ids(prompt):
    return prompt["input_ids"][1:]


class Counted(CachedDraft):
    """Counts the candidates that the draft makes."""

    candidates = 0

    def generate(self, *args, **kwargs):
        result = super().generate(*args, **kwargs)
        self.candidates += result.sequences.shape[1] - kwargs["input_ids"].shape[1]
        return result


@pytest.fixture
def drafts(llama, make_model):
    """Drafts by name: equal to the target, another one, and one that is wrong at every token."""
    wrong = copy.deepcopy(llama)
    wrong.lm_head.weight.data.neg_()  # its likeliest token is the target's unlikeliest
    other = make_model(copy.deepcopy(llama.config), seed=1)
    return {"equal": llama, "other": other, "wrong": wrong}


def same_as_computed_anew(model, cache, tokens):
    """The cache holds each of the tokens once, in order: one pass over them gives the same."""
    held = cache.get_seq_length()
    fresh = CompressedCache(model.config, "none")
    with torch.no_grad():
        model(tokens[:, :held], **named(fresh))
    for one, other in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("name", ["equal", "other", "wrong"])
def test_output_is_the_targets_and_no_token_stands_twice(llama, drafts, ids, greedy, name, count):
    wanted = llama.generate(ids, **greedy)
    draft = copy.deepcopy(drafts[name])
    draft.generation_config.num_assistant_tokens = count
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    try:
        llama.generate(ids, **greedy, assistant_model=draft)
    except RuntimeError:  # of transformers 5.15's own
        pytest.skip("this transformers loses count of a draft's tokens")
    one, two = CompressedCache(llama.config, "none"), CompressedCache(draft.config, "none")
    helper, seen = Counted(draft, two, target=one), []
    target = copy.deepcopy(llama)  # an equal draft is another module
    target.model.embed_tokens.register_forward_pre_hook(
        lambda module, given: seen.append((one.get_seq_length(), given[0][0, 0].item()))
    )
    got = target.generate(ids, **greedy, **named(one), assistant_model=helper)
    assert torch.equal(got, wanted)
    # A step begins behind what is held, with the next token.
    assert seen and all(token == got[0, start] for start, token in seen)
    assert one.get_seq_length() == got.shape[1] - 1 and two.get_seq_length() <= got.shape[1]
    same_as_computed_anew(llama, one, got)
    # The draft's own tokens may differ from the accepted ones only at its very end.
    if two.get_seq_length() > got.shape[1] - 1 - count:
        two.crop(got.shape[1] - 1 - count - two.get_seq_length())
    same_as_computed_anew(draft, two, got)
    rejected = helper.candidates - greedy["max_new_tokens"]
    if name == "wrong":
        assert rejected > 0 or count == 1, "nothing was rejected: the test shows nothing"
    assert helper.candidates > 0


def test_two_lossy_caches_end_with_the_tokens_that_they_say(llama, drafts, ids, greedy):
    draft = drafts["other"]
    one = CompressedCache(llama.config, "turboquant:bits=4,window=32")
    two = CompressedCache(draft.config, "int:bits=4,window=32")
    helper = CachedDraft(draft, two, target=one)
    got = llama.generate(ids, **greedy, **named(one), assistant_model=helper)
    assert got.shape[1] == 40 + greedy["max_new_tokens"]
    assert one.get_seq_length() == got.shape[1] - 1 and two.get_seq_length() <= got.shape[1]


@pytest.mark.parametrize("filled", ["draft", "target"])
def test_a_cache_that_holds_tokens_is_refused_before_it_is_changed(
    llama, drafts, ids, greedy, filled
):
    """transformers would pass the prompt again: each token would stand twice, the text be wrong."""
    draft = drafts["other"]
    one, two = CompressedCache(llama.config, "none"), CompressedCache(draft.config, "none")
    cache, model = (two, draft) if filled == "draft" else (one, llama)
    model(ids[:, :30], **named(cache))
    before = cache.snapshot().digest
    helper = CachedDraft(draft, two, target=one)
    with pytest.raises(GeometryError, match=f"the {filled}'s cache holds 30 tokens"):
        llama.generate(ids, **greedy, **named(one), assistant_model=helper)
    assert cache.snapshot().digest == before
    assert {one.get_seq_length(), two.get_seq_length()} == {0, 30}
    cache.reset()
    got = llama.generate(ids, **greedy, **named(one), assistant_model=helper)
    assert torch.equal(got, llama.generate(ids, **greedy))
    fresh = CompressedCache(llama.config, "none")
    helper = CachedDraft(draft, two, target=fresh)
    with pytest.raises(GeometryError, match="the draft's cache holds"):  # of the text before
        llama.generate(ids, **greedy, **named(fresh), assistant_model=helper)
