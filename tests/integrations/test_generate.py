"""Every way of generating gives with an exact cache what transformers' own cache gives."""

import copy

import pytest
import torch
from families import skip_without_chunks

from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named
from kvpact.testing.cache import Mode


def both(model, options, **inputs):
    """Generate with transformers' cache and with ours; return both token tensors."""
    model.set_attn_implementation("sdpa")
    torch.manual_seed(5)
    try:
        wanted = model.generate(**inputs, **options)
    except ValueError as error:
        skip_without_chunks(error)
        raise
    torch.manual_seed(5)
    cache = CompressedCache(model.config, "none")
    assert model.config._attn_implementation == "kvpact"
    got = model.generate(**inputs, **options, **named(cache))
    return wanted, got


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"do_sample": True, "temperature": 1.5},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_return_sequences": 3, "do_sample": True},
        {"prefill_chunk_size": 6},
    ],
    ids=["greedy", "sampling", "beams", "beams-returned", "samples-returned", "chunked-prefill"],
)
def test_left_padded_batch(llama, prompt, greedy, extra):
    wanted, got = both(llama, {**greedy, **extra}, **prompt)
    assert torch.equal(wanted, got)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_default_dtype(llama, prompt, greedy, dtype):
    """Models are often loaded under one, which then stays set."""
    with Mode(dtype).set():
        wanted, got = both(llama, greedy, **prompt)
    assert torch.equal(wanted, got)


def one_row(prompt):
    return {"input_ids": prompt["input_ids"][1:], "attention_mask": prompt["attention_mask"][1:]}


def test_deepcopy_reuses_a_prefix(llama, prompt, greedy):
    ids = one_row(prompt)["input_ids"]
    wanted = llama.generate(ids, **greedy)
    prefix = CompressedCache(llama.config, "none")
    llama(ids[:, :30], **named(prefix))
    for _ in range(2):
        cache = copy.deepcopy(prefix)
        assert torch.equal(llama.generate(ids, **greedy, **named(cache)), wanted)
        assert prefix.get_seq_length() == 30


def test_several_turns(llama, prompt, greedy):
    cache = CompressedCache(llama.config, "none")
    first = llama.generate(**one_row(prompt), **greedy, **named(cache))
    second = torch.cat([first, first[:, 5:12]], dim=1)
    got = llama.generate(second, **greedy, **named(cache))
    assert torch.equal(got, llama.generate(second, **greedy))


def test_continues_from_embeddings(llama, prompt, greedy):
    embeddings = llama.get_input_embeddings()(prompt["input_ids"])
    options = {"inputs_embeds": embeddings, "attention_mask": prompt["attention_mask"], **greedy}
    wanted = llama.generate(**options)
    got = llama.generate(**options, **named(CompressedCache(llama.config, "none")))
    assert torch.equal(wanted, got)
