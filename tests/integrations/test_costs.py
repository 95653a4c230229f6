"""What a step and a cache may cost: calls are counted, and nothing is timed."""

import copy
import gc
import sys
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo import reset
from torch._dynamo.utils import counters
from transformers import LlamaConfig, Qwen2Config

from kvpact.integrations import transformers as ours
from kvpact.integrations.transformers import CompressedCache, enable, key_offsets
from kvpact.integrations.transformers.model import offsets
from kvpact.integrations.transformers.versions import named

SPEC = "turboquant:bits=4"
FOLDER = str(Path(ours.__file__).parent)


def calls(run):
    """Count the calls of functions in the integration, by name."""
    found = Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            found[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


@torch.no_grad()
def test_a_layer_of_a_step_takes_few_calls(make_model, sizes):
    steps = {}
    token = torch.ones(1, 1, dtype=torch.long)
    for layers in (2, 6):
        model = make_model(LlamaConfig(**sizes | {"num_hidden_layers": layers}))
        cache = CompressedCache(model, SPEC)
        for tokens in (100, 1, 1):
            model(torch.ones(1, tokens, dtype=torch.long), **named(cache))
        steps[layers] = calls(partial(model, token, **named(cache)))
    assert (steps[6].total() - steps[2].total()) / 4 <= 11


@pytest.mark.parametrize("crosses", [False, True])
def test_an_update_keeps_nothing_of_its_callers_alive(llama, crosses):
    class Caller(torch.nn.Module):
        def forward(self, cache, states):
            own = torch.zeros(4)
            kept = weakref.ref(own)
            cache.update(states, states, 0)
            del own
            return kept()

    config = copy.deepcopy(llama.config)
    config.add_cross_attention = crosses
    states = torch.zeros(1, config.num_key_value_heads, 3, config.head_dim)
    assert Caller()(CompressedCache(config, SPEC), states) is None


@torch.no_grad()
def test_compilers_stay_outside(llama):
    """The model is compiled and kvpact is not: nothing is compiled again with every token."""
    reset()
    counters.clear()
    compiled, (first, second) = torch.compile(llama, backend="eager"), torch.ones(2, 1, 1).long()
    caches = [CompressedCache(llama, SPEC) for _ in range(2)]
    for count in range(20):
        token = (first if count % 2 else second) * (count + 3)
        wanted = llama(token, **named(caches[0])).logits
        assert torch.equal(compiled(token, **named(caches[1])).logits, wanted)
        if count == 9:
            frames = counters["frames"]["total"]
    assert counters["frames"]["total"] == frames
    assert all("disable()" in reason for reason in counters["graph_break"])
    reset()


def qwen2(make_model, sizes):
    model = make_model(Qwen2Config(**sizes))
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.fill_(50.0)
    return model


CHANGES = {
    "in place": lambda linear: linear.bias.requires_grad_(False).mul_(2),
    "through data": lambda linear: linear.bias.data.mul_(2),
    "another tensor": lambda linear: setattr(linear, "bias", torch.nn.Parameter(2 * linear.bias)),
    "another weight": lambda linear: linear.weight.requires_grad_(False).mul_(1e4),
    "loaded": lambda linear: linear.load_state_dict(
        {"weight": linear.weight, "bias": 2 * linear.bias}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_offsets_are_read_once_for_a_model_and_again_when_its_weights_change(
    make_model, sizes, monkeypatch, change
):
    model, reads = qwen2(make_model, sizes), []
    real = offsets._found
    monkeypatch.setattr(offsets, "_found", lambda places: reads.append(1) or real(places))
    before = CompressedCache(model, SPEC)._shared.key_offsets
    with enable(model, SPEC):
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3, pad_token_id=0)
    assert len(reads) == 1 and before.keys() == {0, 1}
    CHANGES[change](model.model.layers[1].self_attn.k_proj)
    after = CompressedCache(model, SPEC)._shared.key_offsets
    assert len(reads) == 2 and after[0] is not before[0]
    if change == "another weight":
        assert after.keys() == {0}
    else:
        assert torch.equal(torch.tensor(after[1].bias), 2 * torch.tensor(before[1].bias))
    assert key_offsets(copy.deepcopy(model)).keys() == after.keys() and len(reads) == 3


def test_what_was_read_of_a_model_keeps_nothing_alive(make_model, sizes):
    model = qwen2(make_model, sizes)
    CompressedCache(model, SPEC)
    gone = weakref.ref(model.model.layers[0].self_attn)
    del model
    gc.collect()
    assert gone() is None
