"""Sequences of a paged cache as the batch of a model, and the example that serves with them."""

from pathlib import Path

import pytest
import torch
from by_path import module_at
from transformers import DynamicCache, LlamaConfig, MistralConfig

from kvpact.errors import CacheFull, GeometryError, KVPactError, SequenceError, SpecError
from kvpact.integrations.transformers import CompressedCache, PagedBatch, versions
from kvpact.integrations.transformers.versions import named

EXAMPLE = Path(__file__).parents[2] / "examples" / "continuous_batching.py"
LENGTHS = (5, 70, 33, 100)


@pytest.fixture(scope="module")
def example():
    """Return the example as a module."""
    return module_at(EXAMPLE)


def make_prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


def alone(model, prompt, new, make_cache=DynamicCache):
    """Return the greedy continuation of one prompt."""
    cache, tokens, ids = make_cache(config=model.config), [], torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(new):
            ids = model(ids, **named(cache)).logits[:, -1:].argmax(-1)
            tokens.append(ids.item())
    return tokens


def start(example, model, cache, prompts):
    """Prefill each prompt; return its sequences and first tokens."""
    seqs = [cache.allocate() for _ in prompts]
    both = zip(seqs, prompts, strict=True)
    first = [example.forward(model, cache, [seq], [prompt]) for seq, prompt in both]
    return seqs, first


@pytest.mark.parametrize("spec", ["none", "turboquant:bits=4", "kivi:bits=2,sinks=0,window=0"])
def test_batched_decode_of_unlike_lengths_is_each_row_alone(example, llama, spec):
    prompts, new = make_prompts(), 30
    expected = [alone(llama, p, new, lambda config: CompressedCache(config, spec)) for p in prompts]
    cache = example.paged_cache(llama, spec, 32)
    seqs, generated = start(example, llama, cache, prompts)
    for _ in range(new - 1):
        last = [tokens[-1:] for tokens in generated]
        for tokens, token in zip(generated, example.forward(llama, cache, seqs, last), strict=True):
            tokens.append(token)
    assert generated == expected
    if spec == "none":
        assert generated == [alone(llama, p, new) for p in prompts]
    assert [cache.seq_len(seq) for seq in seqs] == [len(p) + new - 1 for p in prompts]


def test_several_tokens_at_once_in_rows_of_unlike_length(example, llama):
    prompts = make_prompts()
    more = make_prompts([6] * len(prompts))
    cache = example.paged_cache(llama, "none", 32)
    seqs, _ = start(example, llama, cache, prompts)
    found = example.forward(llama, cache, seqs, more)
    assert found == [alone(llama, p + m, 1)[0] for p, m in zip(prompts, more, strict=True)]


def test_left_padded_prompts_in_one_call(llama, example, prompt, greedy):
    expected = llama.generate(**prompt, **greedy)
    cache = example.paged_cache(llama, "none", 16)
    batch = PagedBatch(llama.config, cache)
    assert llama.generate(**prompt, **greedy, **named(batch)).equal(expected)
    assert [cache.seq_len(seq) for seq in batch.seqs] == [51, 51]
    batch.reset()
    assert cache.num_free_pages == 16 and batch.seqs == []


def test_a_mask_over_rows_of_unlike_length_is_no_padding_of_theirs(example, llama):
    """A mask hides what stands left of a shorter row; its own first tokens are sinks."""
    outputs, sinks = [], []
    for masked in (False, True):
        cache = example.paged_cache(llama, "int:bits=8,sinks=4,window=0", 32)
        seqs = [cache.allocate(), cache.allocate()]
        example.forward(llama, cache, seqs[:1], make_prompts([20]))
        mask = torch.ones(2, 30, dtype=torch.long)
        mask[1, :20] = 0
        for ids, end in (make_prompts([10, 10]), 30), ([[5], [6]], 31):
            lengths = [[cache.seq_len(seq)] for seq in seqs]
            mask = torch.nn.functional.pad(mask, (0, end - mask.shape[1]), value=1)
            with torch.no_grad():
                places = torch.tensor(lengths) + torch.arange(len(ids[0]))
                more = {"position_ids": places, "attention_mask": mask if masked else None}
                batch = PagedBatch(llama.config, cache, seqs)
                output = llama(torch.tensor(ids), **more, **named(batch))
        outputs.append(output.logits)
        sinks.append(cache.stats()["bytes"]["sinks"])
    torch.testing.assert_close(*outputs)
    assert sinks[0] == sinks[1]


def test_beams_share_pages_and_give_the_same_tokens(example, llama, prompt, greedy):
    options = {**greedy, "num_beams": 4, "max_new_tokens": 8}
    expected = llama.generate(**prompt, **options)
    cache = example.paged_cache(llama, "none", 32)
    batch = PagedBatch(llama.config, cache)
    assert llama.generate(**prompt, **options, **named(batch)).equal(expected)
    assert len(batch.seqs) == 8
    assert cache.num_pages - cache.num_free_pages < 8 * 2
    batch.reset()
    assert cache.num_free_pages == cache.num_pages


def test_crop_takes_tokens_from_every_row(example, llama):
    cache = example.paged_cache(llama, "none", 32)
    seqs, _ = start(example, llama, cache, make_prompts())
    batch = PagedBatch(llama.config, cache, seqs)
    assert batch.get_seq_length() == max(LENGTHS)
    batch.crop(-3)
    assert [cache.seq_len(seq) for seq in seqs] == [n - 3 for n in LENGTHS]
    batch.batch_select_indices(torch.tensor([1, 3]))
    assert batch.seqs == [seqs[1], seqs[3]]
    if not versions.crops_to_length():
        with pytest.raises(ValueError, match="negative"):
            batch.crop(1)


@pytest.mark.filterwarnings("ignore::kvpact.integrations.transformers.FallbackWarning")
def test_other_attention_reads_decompressed_rows_of_one_length(example, make_model, sizes):
    eager = make_model(LlamaConfig(**sizes), attention="eager")
    prompts, cache = make_prompts([20, 20]), example.paged_cache(eager, "none", 8)
    expected = [alone(eager, prompt, 5) for prompt in prompts]
    seqs, generated = start(example, eager, cache, prompts)
    for _ in range(4):
        last = [tokens[-1:] for tokens in generated]
        for tokens, token in zip(generated, example.forward(eager, cache, seqs, last), strict=True):
            tokens.append(token)
    assert generated == expected
    # Zeros in front of a shorter row would be attended to: refused, and nothing is stored.
    cache.truncate(seqs[0], 10)
    with pytest.raises(KVPactError, match="set_attn_implementation"):
        example.forward(eager, cache, seqs, [[3], [4]])
    assert [cache.seq_len(seq) for seq in seqs] == [10, 24]


def test_wrong_arguments_are_told(example, llama, make_model, sizes):
    cache = example.paged_cache(llama, "none", 4)
    sliding = make_model(MistralConfig(**sizes, sliding_window=16))
    with pytest.raises(KVPactError, match="sliding_attention"):
        PagedBatch(sliding.config, cache)
    with pytest.raises(GeometryError, match="3 layers"):
        PagedBatch(LlamaConfig(**{**sizes, "num_hidden_layers": 3}), cache)
    with pytest.raises(SequenceError):
        PagedBatch(llama.config, cache, [7])
    with pytest.raises(SpecError, match="attention"):
        PagedBatch(llama.config, cache, attention="flash")
    seq = cache.allocate()
    with pytest.raises(CacheFull):
        example.forward(llama, cache, [seq], make_prompts([200]))
    assert cache.seq_len(seq) == 0 and cache.num_free_pages == 4


def test_a_batch_can_be_used_again_after_the_pool_was_full(example, llama):
    prompt = make_prompts([40])
    cache = example.paged_cache(llama, "none", 3)
    hog, seq = cache.allocate(), cache.allocate()
    cache.reserve([hog], 64)
    batch = PagedBatch(llama.config, cache, [seq])
    with pytest.raises(CacheFull):
        llama(torch.tensor(prompt), **named(batch))
    assert batch.get_seq_length() == 0
    cache.free(hog)
    found = llama(torch.tensor(prompt), **named(batch)).logits[0, -1].argmax().item()
    assert cache.seq_len(seq) == 40 and found == alone(llama, prompt[0], 1)[0]


@pytest.mark.parametrize("spec", ["none", "turboquant:bits=4"])
def test_the_example_preempts_and_gives_every_page_back(example, llama, spec):
    prompts, new = make_prompts([5, 40, 31, 64, 20, 90, 33, 12]), 40
    small, large = (example.paged_cache(llama, spec, pages) for pages in (7, 64))
    tight, roomy = (example.serve(llama, cache, prompts, new) for cache in (small, large))
    assert tight.preemptions > 0 and roomy.preemptions == 0
    assert tight.peak_pages <= 7 and roomy.largest_batch == len(prompts)
    assert [len(tokens) for tokens in tight.outputs] == [new] * len(prompts)
    assert small.num_free_pages == 7 and large.num_free_pages == 64
    if spec == "none":
        assert tight.outputs == roomy.outputs
        assert tight.outputs == [alone(llama, prompt, new) for prompt in prompts]


def test_the_example_says_when_a_prompt_alone_is_too_long(example, llama):
    with pytest.raises(CacheFull):
        example.serve(llama, example.paged_cache(llama, "none", 2), make_prompts([100]), 4)
    cache = example.paged_cache(llama, "none", 2)
    assert example.serve(llama, cache, make_prompts([60]), 1).steps == 0
    assert cache.num_free_pages == 2
