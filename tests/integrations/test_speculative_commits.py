"""Every position is committed once, whatever the draft said (defect C5)."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvpact.integrations.transformers import CachedDraft, CompressedCache


def tokens(count, seed=0):
    return torch.randint(3, 96, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    net = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in net.parameters():
        parameter.data.mul_(1.5)
    return net


def test_no_token_goes_through_the_target_twice(model):
    """Every position is committed once, and a rejected one is computed again from its own token."""
    draft = copy.deepcopy(model)
    draft.lm_head.weight.data.neg_()
    ids, options = tokens(30), {"max_new_tokens": 20, "do_sample": False}
    wanted = model.generate(ids, **options)
    one, two = CompressedCache(model.config, "none"), CompressedCache(draft.config, "none")
    seen = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, given, output: seen.append((one.get_seq_length(), given[0][0].tolist()))
    )
    helper = CachedDraft(draft, two, target=one)
    got = model.generate(ids, **options, past_key_values=one, assistant_model=helper)
    hook.remove()
    assert torch.equal(got, wanted)
    text = got[0].tolist()
    for start, part in seen:  # what stands before a step is the text so far, each token once
        assert part[0] == text[start], "a step begins behind what is held, with the next token"
    fresh = CompressedCache(model.config, "none")
    with torch.no_grad():
        model(got[:, :-1], past_key_values=fresh)
    for a, b in zip(one.layers, fresh.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.values, b.values, rtol=1e-4, atol=1e-4)
