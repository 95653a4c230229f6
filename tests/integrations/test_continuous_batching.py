"""Continuous batching over packed pages: transformers' own manager, scheduler and pool."""

import gc
import threading
from math import lcm
from pathlib import Path

import pytest
import torch
import transformers
from by_path import module_at
from packaging.version import Version
from tiny_configs import SIZES, gemma3
from transformers import GenerationConfig, LlamaConfig

from kvpact.errors import EnableError, SpecError
from kvpact.integrations.transformers import CompressedCache, disable, enable
from kvpact.integrations.transformers.attention.calibrate import calibrate
from kvpact.integrations.transformers.versions import VersionError, rebound
from kvpact.spec import DEFAULT_SPEC, parse_spec

NEW = 12
FIRST = Version("5.19")
OLD = Version(transformers.__version__) < FIRST
packed = pytest.mark.skipif(OLD, reason="its pools are not of bytes")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
INT8 = "int:bits=8,sinks=0"


def random_ids(count, seed):
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [random_ids(10 + 23 * i, i) for i in range(6)]
PROMPTS += [PROMPTS[5][:96] + random_ids(20, 77), PROMPTS[5][:64] + random_ids(3, 78)]


def config(**options):
    from transformers.generation import ContinuousBatchingConfig

    given = {"num_blocks": 64, "max_batch_tokens": 512, "page_size": 32, **options}
    return ContinuousBatchingConfig(**given)


def generation(**options):
    given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(**given | options)


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """transformers collects garbage whenever a manager stops, which takes most of its time."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def batch(model, prompts=PROMPTS, gen=None, **options):
    made = model.generate_batch(
        prompts, generation_config=gen or generation(), continuous_batching_config=config(**options)
    )
    assert not [x.error for x in made.values() if x.error]
    return [x.generated_tokens for x in made.values()]


def manager(model, **options):
    return model.init_continuous_batching(
        generation_config=generation(), continuous_batching_config=config(**options)
    )


def pool(model, **options):
    """The cache of a manager that serves nothing, and its processor's inputs."""
    made = manager(model, **options)
    processor = made._create_batch_processor()
    return processor.cache, processor.inputs_and_outputs


def test_a_manager_is_made_or_refused_by_the_version_that_has_it(llama):
    if not hasattr(llama, "init_continuous_batching"):
        pytest.skip("this transformers batches nothing")
    enable(llama, "none")
    if OLD:
        with pytest.raises(VersionError, match=r"packs the pages .* from transformers 5\.19 on"):
            llama.init_continuous_batching()
    else:
        assert len(batch(llama, PROMPTS[:2])) == 2
    assert llama.config._attn_implementation == "sdpa"


@packed
@pytest.mark.parametrize("options", [
    {}, {"num_blocks": 9, "max_batch_tokens": 64}, {"allow_block_sharing": False},
    {"num_blocks": 12, "max_batch_tokens": 33, "page_size": 64},
], ids=["roomy", "evicted, in chunks", "nothing shared", "other pages"])  # fmt: skip
def test_exact_pages_give_the_tokens_of_plain_batching(llama, make_model, options):
    wanted = batch(llama, **options)
    with enable(llama, "none"):
        assert batch(llama, **options) == wanted
    with enable(llama, INT8):  # a window of another request would show
        assert batch(llama, **options) == wanted
    eager = make_model(LlamaConfig(**SIZES), "eager")  # which reads what is decompressed
    with enable(eager, "none"):
        assert batch(eager, **options) == wanted


@packed
def test_forks_share_pages_and_copy_the_last(llama):
    gen = generation(num_return_sequences=3, do_sample=True, top_k=1)
    wanted = batch(llama, PROMPTS[:4], gen, num_blocks=32)
    with enable(llama, "none"):
        assert batch(llama, PROMPTS[:4], gen, num_blocks=32) == wanted
    with enable(llama, "int:bits=2,sinks=0"):  # coarse: a child has a copy of its parent's window
        made = batch(llama, PROMPTS[:4], gen, allow_block_sharing=False)
        assert all(made[i] == made[i + 1] == made[i + 2] for i in range(0, len(made), 3))


@packed
def test_cancelled_requests_leave_their_pages_to_others(llama):
    wanted = batch(llama)
    with enable(llama, "none"):
        made = manager(llama, num_blocks=9, max_batch_tokens=64)
        for i, prompt in enumerate([*PROMPTS, *PROMPTS]):
            made.add_request(prompt, request_id=str(i), max_new_tokens=NEW)
        for i in range(8, 16, 2):
            made.cancel_request(str(i))
        made.start()
        found = {}
        while len(found) < 12:
            one = made.get_result(timeout=20)
            found[int(one.request_id)] = one.generated_tokens
        made.stop(block=True)
    assert found == {i: wanted[i % 8] for i in found}


@packed
def test_stats_count_requests_and_what_their_pages_hold(llama):
    with enable(llama, "int:bits=8,sinks=0,window=0") as enabled:
        batch(llama, PROMPTS[:2])
        told = enabled.stats()
        allocator = pool(llama)[0].layer_to_allocator[0]
    assert (told["calls"], told["tokens"]) == (2, 10 + 33 + 2 * (NEW - 1))
    assert told["most_bytes"] == 3 * allocator.bytes_per_block  # blocks of 32 tokens: 1 and 2
    shape = allocator.num_key_value_heads * allocator.head_dim
    assert told["exact_bytes"] == 3 * 32 * 2 * 2 * shape * 4  # tokens, layers, sides, numbers
    assert told["backends"] == ["cpu"] and told["fallbacks"] == {}


@packed
def test_the_example_compares_equal_memory(llama):
    example = module_at(Path(__file__).parents[2] / "examples" / "generate_batch.py")
    rows = example.compare(llama, PROMPTS, "int:bits=8,sinks=0,window=0", NEW, 8, 32)
    assert rows["tokens with 'none'"] == "equal" and rows["room, plain"] == 8 * 32
    assert rows["room, compressed"] == -(-8 * 64 // 18) * 32  # bytes of a head's K: fp32, packed
    assert rows["most bytes held"] < rows["of the same, exact"]
    assert not hasattr(llama, "_cached_continuous_batching_manager")


@packed
def test_packed_slots_are_attended_as_they_are_decompressed(llama, make_model, fallbacks):
    ids = torch.tensor([PROMPTS[5]])
    with torch.no_grad():
        wanted = llama(ids).logits[0, -1]
    logits = {}
    for name in ("sdpa", "eager"):
        model = make_model(LlamaConfig(**SIZES), name)
        with enable(model, INT8):
            made = manager(model, max_batch_tokens=40)
            made._create_batch_processor = keep_logits(made, logits.setdefault(name, []))
            (made,), said = fallbacks(lambda made=made: (serve(made, PROMPTS[5]),))
        assert said == [] if name == "sdpa" else "decompressed" in said[0]
    for one, other in zip(*logits.values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    first = logits["sdpa"][-NEW]
    assert 0 < (first - wanted).abs().max() < 0.05


def keep_logits(made, into):
    create = made._create_batch_processor

    def created():
        processor = create()
        runner = processor.model_runner
        sample = runner._sample

        def keep(scores, output):
            into.append(scores[0, -1].clone())
            sample(scores, output)

        runner._sample = keep
        return processor

    return created


def serve(made, prompt):
    made.add_request(prompt, request_id="one", max_new_tokens=NEW)
    made.start()
    result = made.get_result(timeout=20)
    made.stop(block=True)
    return result.generated_tokens


@packed
def test_the_pool_counts_packed_bytes_and_no_mask(make_model, monkeypatch):
    from transformers.generation.continuous_batching.cache import (
        PagedAttentionMemoryHandler as Memory,
    )

    sizes = {**SIZES, "hidden_size": 256, "num_attention_heads": 4, "dtype": torch.bfloat16}
    llama = make_model(LlamaConfig(**sizes)).to(torch.bfloat16)
    monkeypatch.setattr(Memory, "get_available_memory", lambda self: 64 << 20)
    plain, inputs = pool(llama, num_blocks=40)
    found, _ = pool(llama, num_blocks=None)
    assert plain.max_tokens_read == 40 * 32 and inputs.attention_mask is not None
    with enable(llama, "turboquant:bits=4,sinks=0,window=0"):
        cache, inputs = pool(llama, num_blocks=40)
        assert inputs.attention_mask is None
        exact = 40 * 32 * 2 * 2 * 2 * 64 * 2  # tokens, layers, sides, heads, numbers, bytes
        assert cache.num_sectors * cache.bytes_per_sector == pytest.approx(exact, rel=0.02)
        assert cache.max_tokens_read >= 3.5 * plain.max_tokens_read
        cache, _ = pool(llama, num_blocks=None)
        assert cache.max_tokens_read >= 3.5 * found.max_tokens_read
        assert cache.cache_tensor.nbytes < 64 << 20
    gemma = make_model(gemma3(dict(SIZES), *["sliding"] * 5, "full"))
    found, _ = pool(gemma, num_blocks=None, max_batch_tokens=8)
    with enable(gemma, "turboquant:bits=4,sinks=0,window=0"):  # reads of packed pages cost nothing
        cache, _ = pool(gemma, num_blocks=None, max_batch_tokens=8)
        assert cache.max_tokens_read >= 3.5 * found.max_tokens_read


@packed
def test_a_recipe_has_pages_of_unlike_sizes_and_windows_stay_exact(llama, make_model):
    wanted = batch(llama)
    with enable(llama, {"default": "none", "layers": {1: "int:bits=8,sinks=0,window=0"}}):
        cache, _ = pool(llama)
        (allocator,) = cache.cache_allocators.values()
        sizes = [x.pages[0].numel() for x in allocator.layers.values()]
        assert sizes[0] > 2 * sizes[1] and 0 <= allocator.bytes_per_block - sum(sizes) < 64
        found = batch(llama)
    assert [x[0] for x in found] == [x[0] for x in wanted]
    gemma = make_model(gemma3(dict(SIZES), "sliding", "full"))
    wanted = batch(gemma)
    with enable(gemma, "none"):
        assert batch(gemma) == wanted
        assert pool(gemma)[1].attention_mask is not None
    with enable(gemma, INT8):
        assert batch(gemma, num_blocks=12, max_batch_tokens=64) == wanted


@packed
@pytest.mark.parametrize(("packed", "others", "block"), [
    (101_370, 0, 101_376), (101_370, 15 << 18, 102_400), (101_370, 15 << 17, 102_400),
    (101_370, 15 << 20, 30 << 12), (7000, 2048, 7168),
], ids=["alone", "gemma3, fp32", "gemma3, bf16", "large ones", "few others"])  # fmt: skip
def test_blocks_of_unlike_layers_divide_sectors_that_are_not_large(packed, others, block):
    from kvpact.integrations.transformers.enabled.batching import _block_bytes

    assert _block_bytes(packed, others) == block
    assert not others or lcm(block, others) <= max(32 << 20, others)


@packed
@pytest.mark.parametrize(("spec", "options", "reason"), [
    ("turboquant:bits=4", {}, "write 'turboquant:bits=4,sinks=0'"),
    ("trellis:bits=3", {}, "write 'trellis:bits=3,center=0,sinks=0'"),
    ("kivi", {}, "packs 32 tokens together, which the pages of continuous batching can't hold"),
    ("vq:sinks=0,window=0", {}, "learns from its tokens"),
    (INT8, {"page_size": 48}, "ContinuousBatchingConfig page_size=256"),
])  # fmt: skip
def test_what_pages_can_not_hold_is_refused_before_anything_is_served(llama, spec, options, reason):
    enable(llama, spec)
    with pytest.raises((SpecError, ValueError), match=reason):
        manager(llama, **options)
    assert llama.config._attn_implementation == "sdpa"


@packed
def test_the_default_spec_takes_a_calibration_and_no_sinks(llama):
    spec = "trellis:bits=4,center=0,sinks=0"
    rows = [torch.tensor(random_ids(300, 9))]
    with enable(
        llama, calibration=calibrate(llama, rows, list(map(parse_spec, [DEFAULT_SPEC, spec])))
    ):
        made = manager(llama)
        assert set(map(str, made.packed)) == {spec}
        assert len(serve(made, PROMPTS[3])) == NEW


@packed
def test_attention_is_lent_while_a_manager_serves(llama, prompt, greedy):
    wanted, tokens = batch(llama), llama.generate(**prompt, **greedy)
    with enable(llama, "none"):
        cache = CompressedCache(llama, "none")  # a loan from before
        made = manager(llama)
        made.start()
        served = threading.Thread(target=lambda: llama.generate(**prompt, **greedy))
        served.start()
        for i, one in enumerate(PROMPTS):
            made.add_request(one, request_id=str(i), max_new_tokens=NEW)
        assert torch.equal(llama.generate(**prompt, **greedy), tokens)
        found = {}
        while len(found) < len(PROMPTS):
            one = made.get_result(timeout=20)
            found[int(one.request_id)] = one.generated_tokens
        served.join()
        assert [found[i] for i in range(len(PROMPTS))] == wanted
        made.stop(block=True)
        del cache, made
    assert llama.config._attn_implementation == "sdpa"


@packed
def test_a_manager_that_is_kept_is_of_its_time(llama):
    def kept():
        return llama.generate_batch(
            PROMPTS[:2], generation_config=generation(), persistent_manager=True,
            continuous_batching_config=config(),
        )  # fmt: skip

    wanted = [x.generated_tokens for x in kept().values()]
    with enable(llama, "none"):
        with pytest.raises(EnableError, match="destroy_cached_continuous_batching_manager"):
            kept()
        llama.destroy_cached_continuous_batching_manager()
        assert [x.generated_tokens for x in kept().values()] == wanted
        assert [x.generated_tokens for x in kept().values()] == wanted
        assert llama._cached_continuous_batching_manager.packed
    assert not hasattr(llama, "_cached_continuous_batching_manager")
    assert llama.config._attn_implementation == "sdpa"


def test_a_hook_that_is_missing_is_named():
    with pytest.raises(EnableError, match=r"random_function of transformers .* has no Nowhere"):
        rebound(random_function, Nowhere=1)
    assert rebound(random_function, PROMPTS=[3])() == [3] and random_function() is PROMPTS


def random_function():
    return PROMPTS


def test_models_that_a_server_loads_are_enabled(llama):
    from kvpact.integrations.transformers.serve import enable_loaded

    class Manager:
        def _load_model(self, name):
            assert name == "some/model@main"
            return llama

    enable_loaded("none", Manager)
    assert Manager()._load_model("some/model@main") is llama
    assert not enable(llama, "none").changed
    disable(llama)
