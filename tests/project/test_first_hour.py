"""What a newcomer types without reading: each line works, or its error names the line to write."""

import copy
import inspect
import json
import math

import pytest
import torch
from tiny_configs import SIZES, gemma3
from tiny_llama import tiny_llama
from transformers import (  # noqa: F401
    BertConfig,
    BertModel,
    DynamicCache,
    Gemma3ForCausalLM,
    GenerationMixin,
    LlamaForCausalLM,
    QuantizedCache,
)

import kvpact
from kvpact.errors import KVPactError
from kvpact.integrations.transformers.model.guesses import CACHE_MEANT
from kvpact.integrations.transformers.versions import cache_of, named

BERT = BertConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9
)
IDS = torch.arange(4)[None]
# Whether this transformers marks encoders, and tells a cache that a caller has passed it.
MARKED = any("is_causal" in vars(x) for x in BertModel(BERT).modules())
TOLD = "_is_user_defined" in inspect.getsource(GenerationMixin._prepare_cache_for_generation)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(1024)


# A line, and the spec of the cache that it makes.
@pytest.mark.parametrize(("line", "spec"), {
    "kvpact.CompressedCache(model)": "trellis:bits=4",
    "kvpact.CompressedCache(model.config)": "trellis:bits=4",
    "kvpact.CompressedCache(model, bits=3)": "trellis:bits=3",
    "kvpact.CompressedCache(model, nbits=4)": "trellis:bits=4",
    "kvpact.CompressedCache(model, '4bit')": "trellis:bits=4",
    "kvpact.CompressedCache(model, '4-bit')": "trellis:bits=4",
    "kvpact.CompressedCache(model, '4')": "trellis:bits=4",
    "kvpact.CompressedCache(model, 'int4')": "int:bits=4",
    "kvpact.CompressedCache(model, 'INT8')": "int:bits=8",
    "kvpact.CompressedCache(model, 'trellis:4')": "trellis:bits=4",
    "kvpact.CompressedCache(model, 'trellis4')": "trellis:bits=4",
    "kvpact.CompressedCache(model, 'turboquant:3,window=128')": "turboquant:bits=3,window=128",
    "kvpact.CompressedCache(model, 'kivi-2bit')": "kivi:bits=2",
    "kvpact.CompressedCache(model, 'int8/trellis:4')": "int:bits=8/trellis:bits=4",
    "kvpact.CompressedCache(model, spec='q8_0')": "int:bits=8,sinks=0,window=0",
    "kvpact.CompressedCache(model=model, bits=4)": "trellis:bits=4",
    "kvpact.CompressedCache(model, bits='4')": "trellis:bits=4",
    "kvpact.CompressedCache(model, spec='q4_0')": "int:bits=4,sinks=0,window=0",
    "kvpact.CompressedCache(model, 'q8_0')": "int:bits=8,sinks=0,window=0",
    "kvpact.CompressedCache(model, 'fp8')": "fp8",
    "kvpact.CompressedCache(model, 'int8')": "int:bits=8",
    "kvpact.CompressedCache(model, ' int8 ')": "int:bits=8",
    "kvpact.CompressedCache(model, 'none')": "none",
    "kvpact.CompressedCache(model, 'turboquant')": "turboquant:bits=4",
    "kvpact.CompressedCache(model, kvpact.parse_spec('kivi:2'))": "kivi:bits=2",
    "kvpact.CompressedCache(config=model.config)": "trellis:bits=4",
    "kvpact.CompressedCache(model, 4)": "trellis:bits=4",
    "kvpact.CompressedCache(model, 'fp8_e4m3')": "fp8:scale=none,sinks=0,window=0",
    "kvpact.CompressedCache(model, 'int', bits=2)": "int:bits=2",
    "kvpact.CompressedCache(model, window=128)": "trellis:bits=4,window=128",
    "kvpact.CompressedCache(model, 'int4', sinks=0, window='8')": "int:bits=4,sinks=0,window=8",
    "kvpact.CompressedCache(model, 'int8/trellis', sinks=0)":
        "int:bits=8,sinks=0/trellis:bits=4,sinks=0",
}.items())  # fmt: skip
def test_the_meaning_is_plain(line, spec, model):
    cache = eval(line)
    assert {str(spec) for spec in cache._shared.specs} == {spec}


# A line, and what its error says.
@pytest.mark.parametrize(("line", "message"), {
    "kvpact.CompressedCache('smollm2')":
        "model, tokenizer = kvpact.load_model('smollm2'); CompressedCache(model)",
    "kvpact.CompressedCache('int4', model)": "write: CompressedCache(model, 'int4')",
    "kvpact.CompressedCache((model, None))":
        "model, tokenizer = kvpact.load_model(...); CompressedCache(model)",
    "kvpact.CompressedCache(LlamaForCausalLM)": "(model), of a model of transformers",
    "kvpact.CompressedCache(type('Pipe', (), {'model': model})())": "CompressedCache(pipe.model)",
    "kvpact.CompressedCache(model, 4.5)": "such as 'trellis:bits=4'",
    "kvpact.CompressedCache(model, 'int8', bits=4)": "(model, 'int:bits=4')",
    "kvpact.CompressedCache(model, exact_new='no')": "exact_new should be True or False",
    "kvpact.CompressedCache(model, bits=9)": "bits=9 should be one of 1, 2, 3, 4, 5, 6",
    "kvpact.CompressedCache(model, 'q8_0', bits=4)": "(model, 'int:bits=4,sinks=0,window=0')",
    "kvpact.CompressedCache(model, nbits=3, bits=4)": "(model, 'trellis:bits=4')",
    "kvpact.CompressedCache(model, kvpact.parse_spec('int'), bits=4)": "(model, 'int:bits=4')",
    "kvpact.CompressedCache(model, k_bits=8, v_bits=4)": "(model, 'int:bits=8/int:bits=4')",
    "kvpact.CompressedCache(model, {'k': 'int8', 'v': 3})": "(model, 'int8/int:bits=3')",
    "kvpact.CompressedCache(model, backed='cpu')": "did you mean backend='cpu'?",
    "kvpact.CompressedCache(model, group=64)": "it has spec, bits, attention, exact_new, backend",
    "kvpact.CompressedCache(model, 'fp16')": "the exact cache is 'none', in any dtype",
    "kvpact.CompressedCache(model, 'trelis:bits=4')": "did you mean 'trellis'?",
    "kvpact.CompressedCache(model, 'trellis:nbits=4')": "it has bits, states",
    "kvpact.create_cache(kvpact.CacheGeometry(1, 1, 32), 'int4')": "create_cache('int4', geometry)",
    "kvpact.create_cache('int4', model)": "CacheGeometry.from_config(model.config) makes one",
    "kvpact.CompressedCache(model, 'FP8')": "did you mean 'fp8'?",
    **{
        f"kvpact.CompressedCache(model, '{name}')": "For 4 bits write: 'trellis:bits=4'"
        for name in ("nf4", "fp4", "mxfp4", "q4_k_m", "hqq", "quanto", "awq", "auto", "best")
    },
    "kvpact.CompressedCache('HuggingFaceTB/SmolLM2-135M')":
        "model, tokenizer = kvpact.load_model('HuggingFaceTB/SmolLM2-135M'); "
        "CompressedCache(model)",
    "kvpact.CompressedCache(model, nbits=4, q_group_size=64)": "(model, 'int:bits=4,group=64')",
    "kvpact.CompressedCache(model, nbits=4, residual_length=128)":
        "(model, 'trellis:bits=4,window=128')",
    "kvpact.CompressedCache(model, cache_dtype='fp8')": "(model, 'fp8')",
    "kvpact.CompressedCache(model, kv_cache_dtype='fp8')": "(model, 'fp8')",
    "kvpact.CompressedCache(model, method='turboquant')": "(model, 'turboquant:bits=4')",
    "kvpact.CompressedCache(model, device='cuda')": "model.to('cuda'); CompressedCache(model)",
    "kvpact.CompressedCache()": "CompressedCache(model",
    "kvpact.load_model('smollm')": "smollm2",
    "kvpact.load_model(model)": "load_model('smollm2')",
    "kvpact.size('qwen3-8b', 'nf4')": "trellis:bits=4",
    "kvpact.size('trellis:bits=4', 'qwen3-8b')": "give a model first",
    "kvpact.size(4096)": "kvpact.size(",
    "kvpact.size('qwen3-8b', tokens='lots')": "such as 4096 or 32k",
    "kvpact.recommend(model)": "tokenizer=",
    "kvpact.evaluate(model, 'trellis:bits=4')": "tokenizer=",
    "kvpact.recommend('smollm2', budget='a lot')": "such as 25%",
    "kvpact.recommend('smollm2', tokens=100)": "at least 258 tokens",
    "kvpact.CompressedCache(model, backend='quanto')": "(model, 'int:bits=4,group=64')",
    **{
        f"kvpact.CompressedCache(model, {option})": hint for option, hint in {
            "max_cache_len=9": "budget='200MB'", "n_threads=4": "torch.set_num_threads(4)",
            "paged=True": "PagedKVCache(spec, geometry, num_pages)", "dtype='x'": "leave it out",
            "enable_prefix_caching=True": "prefix_cache(store, model, cache)",
            "DynamicCache()": "cache = CompressedCache(model), and run the prompt",
            "k_bits=8": "'int:bits=8/trellis:bits=4'", "'int:bits=2', v_bits=4": "=2/int:bits=4'",
        }.items()
    },
    "kvpact.evaluate(model, type('T', (), {'convert_tokens_to_ids': 0}), 'text')":
        "'trellis:bits=4', text, tokenizer=",
    "kvpact.evaluate('int4', model='smollm2')": "write: kvpact.evaluate(model, specs, text, token",
    "kvpact.evaluate('int4', 'smollm2')": "write: kvpact.evaluate('smollm2', 'int4')",
    "kvpact.evaluate('recipe:smollm2-3bit', 'smollm2')": "('smollm2', 'recipe:smollm2-3bit')",
    "kvpact.evaluate(['int4'], 'smollm2')": "write: kvpact.evaluate('smollm2', specs)",
    "kvpact.evaluate((model, None), 'int4', max_tokens=9)":
        "no option 'max_tokens'; write: kvpact.evaluate(model, specs, text, tokenizer=..., tokens=",
    "kvpact.evaluate((model, None), 'int4', 'a/book.txt', tokens=300)":
        "write: Path('a/book.txt').read_text('utf-8')",
    "kvpact.recommend((model, None), '@book', tokens=300)": "kvpact.data.book_path().read_text(",
    "kvpact.evaluate('smollm2')": "write: kvpact.evaluate(model, specs, text, tokenizer=..., ",
    "kvpact.recommend((model, None), print, tokens=600)": "_method; write tokenizer=",
    "kvpact.PrefixCache('kv', None, model='m')": "write: kvpact.stores.open_store('kv')",
    "kvpact.calibration_of(model, 'pca:bits=2', store='kv')": "kvpact.stores.open_store('kv')",
    "kvpact.Calibration(model)": "kvpact.calibration_of(model, spec, tokenizer=tokenizer)",
    "kvpact.PagedKVCache(model, block_size=16)": "write: PagedKVCache(spec, CacheGeometry",
    "kvpact.create_cache('int4', num_layers=1)": "write: create_cache(spec, CacheGeometry(num_",
    "kvpact.CacheGeometry(num_hidden_layers=1)": "write: CacheGeometry(num_layers, num_kv_heads, ",
    "kvpact.CompressedCache(model, num_sink_tokens=8)": "(model, 'trellis:bits=4,sinks=8')",
    "kvpact.CompressedCache(model, window_length=9)": "(model, 'trellis:bits=4,window=9')",
    "kvpact.CompressedCache(model, skip_layers=[0])": "(model, {'default': 'trellis:bits=4', 'la",
    "kvpact.PrefixCache(model)": "transformers.prefix_cache(store, model, cache)",
    "kvpact.CompressedCache('int4', model.config)": "write: CompressedCache(model, 'int4')",
    "kvpact.CompressedCache(model, 'trellis:bits=4 group=8')": "options stand apart by commas",
    "kvpact.CompressedCache(model, 'int4', axis_key=0)": "(model, 'int:bits=4,group=64')",
    "kvpact.CompressedCache(model, compression_ratio=0.5)": "CompressedCache(model, bits=3)",
    "kvpact.CompressedCache(model, batch_size=4)": "the cache grows as needed",
    "kvpact.CompressedCache(model, offloading=True)": "leave it out",
    "kvpact.load_model('smollm2', torch_dtype=1)": "write: dtype=...",
    "kvpact.load_model('smollm2', device='cuda')": "write: model.to(...)",
    "kvpact.load_model('smollm2', load_in_4bit=True)": "from_pretrained(name, load_in_4bit=...)",
    "kvpact.size('model.gguf')": "a hub's ids (a GGUF's too) are owner/name",
    **{
        f"kvpact.CompressedCache{given}": hint for given, hint in {
            "('int8')": "write: CompressedCache(model, 'int8')",
            "(model, 'int8', 4)": "write: CompressedCache(model, spec, ",
            "(torch.nn.DataParallel(model))": "write: CompressedCache(model.module)",
            "(model, 'int:bits=8,fp8')": "around a slash: 'int:bits=8/fp8'",
            ".load(model, 'chat.kv')": "a path such as 'chat.kv' should stand here, not LlamaFor",
            ".load('chat.kv', 'smollm2')": "kvpact.load_model('smollm2'); CompressedCache(model)",
            "(model).save()": "write: cache.save(path, ", "(model).save(b'')": "here, not bytes",
        }.items()
    },
    "kvpact.load_model('smollm2', dtype='fp16')": "take one of float32, bfloat16, float16",
    "kvpact.load_model('model.gguf')": "see `kvpact llama-cpp`",
    "kvpact.size('qwen3-8b', 'gpt-oss-20b')": "write: kvpact.size('gpt-oss-20b')",
    "kvpact.size('qwen3-8b', context=1)": "write: kvpact.size(model, specs, tokens, batch=..., dt",
    "kvpact.evaluate((model, None), 'int4', 'int8', tokens='1k')": "a list of all specs",
    "kvpact.evaluate((model, None), 'int4', tokens='lots')": "such as 4096 or 32k",
    "kvpact.recommend((model, None), '25%', tokens='1k')": "budget='25%'",
    "kvpact.parse_spec('trellis', bits=4)": "write: kvpact.parse_spec(text)",
    "kvpact.Snapshot.load(b'')": "a path such as 'chat.kv' should stand here, not bytes",
    "kvpact.CacheGeometry.from_config('m')": "write: CacheGeometry.from_config(model.config)",
    "kvpact.CacheGeometry(1, 1, 8, dtype='fp16')": "take one of float32, bfloat16, float16",
    "kvpact.stores.open_store('dir://kv')": "write: open_store('kv')",
    "kvpact.disable()": "write: kvpact.disable(model)",
    "kvpact.recode(kvpact.create_cache('int4', kvpact.CacheGeometry(1, 1, 8)), 'int8')":
        "write: cache.snapshot()",
    "kvpact.load_model('smollm2', 'bfloat16')": "write: kvpact.load_model(name_or_path, dtype=...)",
    "kvpact.calibration_of(model, specs='pca')": "write: kvpact.calibration_of(model, ",
    "kvpact.Snapshot(kvpact.CompressedCache(model))": "write: cache.snapshot()",
    "kvpact.CompressedCache(model).save('a.kv', overwrite=True)": "cache.save has force=True",
    "kvpact.CompressedCache(model, {'a': 'int4'})": "stand in a list, ['trellis:bits=4', ",
    "kvpact.load_model('smollm2', dtype=torch.int8)": "take one of float32, bfloat16, float16",
    "kvpact.stores.open_store('kv', max_size=1)": "write: DirectoryStore(path, max_bytes=..., ",
    **({"kvpact.CompressedCache(BertModel(BERT))": "BertModel reads all tokens at once"}
        if MARKED else {}),
    **({"model.generate(IDS, use_cache=False, **named(kvpact.CompressedCache(model)))":
        "write: generate(..., use_cache=True, cache=cache), or without a cache"} if TOLD else {}),
    "kvpact.CompressedCache(model).save('~/a.kv')": "write: Path(path).expanduser()",
    "kvpact.CompressedCache(model, 'int:bits=4:group=8')": "options stand apart by commas",
    "kvpact.CompressedCache(model, exact_layers=[0])": "a recipe has specs by layer; write: ",
    "kvpact.enable('smollm2')": "kvpact.load_model('smollm2'); enable(model)",
    "kvpact.enable(model, 'int8', bits=4)": "enable(model, 'int:bits=4')",
    "model(IDS, **named(c := kvpact.CompressedCache(model))), c.batch_select_indices([0])":
        "indices should be a 1-D tensor of integers",
    "kvpact.disable(kvpact.CompressedCache(model))": "where the model should; write: disable(",
    "kvpact.load_model(name='smollm2')": "load_model has name_or_path and dtype, no 'name'",
    "kvpact.evaluate.evaluate(model, list(range(300)), ['int4'], seed='x')": "seed should be a who",
    "kvpact.Spec('trellis', 'trellis')": "write: kvpact.parse_spec('trellis:bits=4')",
    "kvpact.parse_spec('int4/')": "between the method for K and the one for V",
    "kvpact.CompressedCache(model, 'int4,sinks=8')": "write 'int4:sinks=8'",
    "kvpact.CompressedCache(model, ['int4'] * 30)": "; by layer: {'default': 'int4', ",
    "kvpact.CompressedCache(model, calibration=True)": "a file of `kvpact calibrate`, not True",
    "kvpact.Calibration('a.kvcal')": "write: Calibration.load(path)",
    **{f"kvpact.{line}": hint for line, hint in {
        "stores.RedisStore(host='localhost')": "write: RedisStore(url, username=...",
        "stores.open_store(None)": "a path such as 'chat.kv' should stand here, not NoneType",
        "stores.MemoryStore().put('k')": "missing a required argument: 'blob'; write: store.put(",
        "CompressedCache(model).stats(layer=0)": "write: cache.stats()",
        "CacheGeometry.mla(2, 512)": "write: CacheGeometry.mla(num_layers, latent_dim, rope_dim",
        "CompressedCache(model).evict(9)": "argument: 'end'; write: cache.evict(begin, end",
        "create_cache('int4', kvpact.CacheGeometry(1, 1, 8), calibration=1)": "`kvpact calibrate`",
        "Snapshot.load()": "write: Snapshot.load(path)", "recode()": "kvpact.recode(snapshot, spec",
        "MLACache('int4', 2)": "write: MLACache(spec, num_layers, latent_dim, rope_dim, ",
        "PagedKVCache('int4', kvpact.CacheGeometry(1, 1, 64), 8).free()": "write: cache.free(seq)",
        "integrations.transformers.pressed(1)": "write: kvpact.integrations.transformers.pressed(",
    }.items()},
}.items())  # fmt: skip
def test_the_error_names_the_line_to_write(line, message, model):
    with pytest.raises(KVPactError) as error:
        eval(line)
    assert message in str(error.value)


TYPES = {"q8_0": "q8_0", "q4_0": "q4_0", "q4_1": "q4_0", "q5_1": "int:bits=5", "f16": "none"}


@pytest.mark.parametrize("k", [*TYPES, None])
@pytest.mark.parametrize("v", [*TYPES, None])
def test_types_of_k_and_v_are_both_written(k, v, model):
    given = {f"cache_type_{side}": text for side, text in (("k", k), ("v", v)) if text}
    if not given:
        return
    with pytest.raises(KVPactError) as error:
        kvpact.CompressedCache(model, **given)
    assert f"'{TYPES.get(k, 'none')}/{TYPES.get(v, 'none')}'" in str(error.value)
    unknown = [x for x in given.values() if x[-1] == "1"]
    assert all(f"unknown method {x!r}" in str(error.value) for x in unknown)


# A name that is not there, and what its error says.
@pytest.mark.parametrize(("line", "hint"), {
    "kvpact.compress": "; write: kvpact.enable(model)",
    "kvpact.from_pretrained": "; write: model, tokenizer = kvpact.load_model(name)",
    "kvpact.KVCache": "; write: kvpact.CompressedCache(model); the cache without compression is",
    "kvpact.SnapKVPress": "; write: kvpact.integrations.transformers.pressed(model, cache, press)",
    "kvpact.calibrate": "; write: kvpact.calibration_of(model",
    "kvpact.list_calibrations": "the folder that KVPACT_CACHE names",
    "kvpact.PagedCache": "kvpact.PagedKVCache(spec, geometry, num_pages)",
    "kvpact.set_num_threads": "torch.set_num_threads(4)",
    "kvpact.PagedView": "; write: from kvpact.cache import PagedView",
    **{f"kvpact.{name}": hint for name, hint in {
        "QuantizedCacheConfig": "all options stand in the spec", "AutoModel": "load_model(name)",
        "perplexity": "kvpact.evaluate(model, spec, text", "generate": "model.generate(**inputs",
        "load": "CompressedCache.load(path, model)", "LLM": "LLM(model, kv_cache_dtype='kvpact'",
        "list_models": "kvpact.data.model_table()", "load_dataset": "kvpact.data.book_path()",
    }.items()},
    "kvpact.cache.CompressedCache": "'kvpact.cache' has no attribute 'CompressedCache'; write: "
        "from kvpact import CompressedCache",
    "kvpact.evaluate.open_store": "; write: from kvpact.stores import open_store",
    "kvpact.integrations.transformers.KVPactCache": "; write: kvpact.CompressedCache(model)",
    "kvpact.stores.Zzz": "; it has Background",
    "kvpact.stores.open_store('memory://').__setitem__": "; write: store.put(key, blob)",
    "kvpact.CompresedCache": "; did you mean 'CompressedCache'?",
    "kvpact.CompressedCache.from_pretrained": "; write: CompressedCache.load(path, model)",
    "kvpact.create_cache('int4', kvpact.CacheGeometry(1, 1, 8)).append": "cache.attend(layer, q=q",
    "kvpact.size('qwen3-8b', 'none').total": "; it has batch, dtype, layers, model",
    "kvpact.integrations.transformers.Enabled(model, False).generate": "go on with the model",
    "kvpact.KVCacheCompressor('int4').compress": "; it has compress_kv, ",
    "kvpact.parse_spec('int4').bits": "; write: spec.key.bits, or spec.value.bits",
    "kvpact.PagedKVCache('int4', kvpact.CacheGeometry(1, 1, 8), 8).alloc": "seq = cache.allocate()",
    "kvpact.CompressedCache(model).stats().tokens": "figures are items: ",
    "kvpact.CompressedCache(model).layers[0].nbytes": "; write: cache.stats(), of all layers",
    **{f"kvpact.CompressedCache(model).{name}": hint for name, hint in {
        "memory": "cache.nbytes", "compression_ratio": "cache.saved", "summary": "cache.stats()",
        "truncate": "cache.crop(-count)", "fork": "copy.deepcopy(cache)",
        "__enter__": "cache = CompressedCache(model), without `with`",
        "key_cache": "cache.layers[0].keys", "to": "model.to(...)", "bits": "['bits_per_value']",
        "size": "cache.nbytes", "to_legacy_cache": "cache.save(path)",
        "from_cache": "run the prompt with it", "save_pretrained": "cache.save(path)",
        "seen_tokens": "cache.get_seq_length()",
        "from_snapshot": "CompressedCache.load(path, model)",
        "max_cache_len": "run prefix tuning without a cache", "nothing": "attribute 'nothing'",
    }.items()},
}.items())  # fmt: skip
def test_the_error_of_a_name_tells_the_one_that_is_meant(line, hint, model):
    with pytest.raises(AttributeError) as error:
        eval(line)
    assert hint in str(error.value)
    owner, name = line.rsplit(".", 1)
    assert not CACHE_MEANT.keys() & {*dir(kvpact.CompressedCache.__base__)}
    assert name not in dir(eval(owner)) or name in ("from_pretrained", "max_cache_len")


def test_a_model_is_enabled_with_bits(model):
    ids = torch.arange(12)[None]
    with kvpact.enable(model, bits=3) as enabled:
        assert "trellis:bits=3" in repr(enabled)
        out = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True, pad_token_id=0)
    assert cache_of(out).stats()["spec"] == "trellis:bits=3"


def test_a_cache_tells_what_it_holds(model):
    cache = kvpact.CompressedCache(model)
    assert repr(cache) == "<CompressedCache trellis:bits=4 | empty>"
    with pytest.raises(KVPactError, match=r"^copy\.deepcopy makes a copy of a CompressedCache"):
        copy.copy(cache)
    assert repr(kvpact.KVCacheCompressor("int4")) == "<KVCacheCompressor int:bits=4>"
    assert cache.spec == "trellis:bits=4" and cache.nbytes == 0 and math.isnan(cache.saved)
    empty = cache.stats()
    with pytest.raises(KeyError, match=r"no 'compression'; there are .*bits_per_value, "):
        empty["compression"]
    with pytest.raises(KeyError, match="no 'packed'; there are codes, side"):
        empty["bytes"]["packed"]
    assert empty["spec"] == "trellis:bits=4" and empty["tokens"] == empty["bytes"]["total"] == 0
    with torch.inference_mode():
        model(torch.arange(50)[None], **named(cache))
        # 2 layers, K and V of 2 heads of 32 numbers of 4 bytes: all tokens wait as they are.
        assert repr(cache).endswith("50 tokens | 51.20 kB | 100 % of an exact cache>")
        assert cache.nbytes == 50 * 2 * 2 * 2 * 32 * 4 and cache.saved == 0
        assert json.loads(json.dumps(cache.stats(), allow_nan=False))["slot_bits_per_value"] is None
        model(torch.arange(500)[None] % 64, **named(cache))
    exact = 550 * 2 * 2 * 2 * 32 * 4
    assert cache.nbytes == cache.memory_usage() == cache.stats()["bytes"]["total"]
    assert cache.saved == 1 - cache.nbytes / exact and 0.4 < cache.saved < 0.8
    assert repr(cache).startswith("<CompressedCache trellis:bits=4 | 550 tokens | ")
    assert repr(cache).endswith(f" | {100 * cache.nbytes / exact:.0f} % of an exact cache>")


def test_names_of_dtypes_and_rows_are_taken():
    assert kvpact.CacheGeometry(1, 1, 8, dtype="bfloat16").dtype is torch.bfloat16
    found = kvpact.size("qwen3-8b", "none", "4k")
    assert found["rows"] is found.rows and copy.deepcopy(found) == found


def test_layers_that_stay_as_they_are_count_in_a_models_cache():
    config = gemma3(SIZES, "sliding", "full")  # a window of 16, 2 heads of 16 numbers
    torch.manual_seed(0)
    cache = kvpact.CompressedCache(config)
    with torch.inference_mode():
        Gemma3ForCausalLM(config).eval()(torch.arange(600)[None] % 64, **named(cache))
    own = cache.stats()["own_bytes"]
    assert own == 2 * 15 * 32 * 4 and cache.nbytes == cache.memory_usage()
    assert cache.saved == 1 - cache.nbytes / (own + 600 * 2 * 32 * 4)


def test_every_layout_tells_what_it_holds():
    k, v = (torch.randn(2, 1, 300, 64, generator=torch.manual_seed(seed)) for seed in (0, 1))
    geometry = kvpact.CacheGeometry(1, 1, 64, dtype=torch.float32)
    flat = kvpact.create_cache("int:bits=8", geometry)
    assert repr(flat) == "<ContiguousCache int:bits=8 | empty>"
    flat.store(0, k=k, v=v)
    share = f"{100 * flat.nbytes / (2 * 2 * 300 * 64 * 4):.0f} % of an exact cache"
    assert repr(flat).startswith("<ContiguousCache int:bits=8 | 2 x 300 tokens | ")
    assert repr(flat).endswith(f" kB | {share}>")
    pages = kvpact.PagedKVCache("int:bits=8", geometry, num_pages=40)
    assert repr(pages) == "<PagedKVCache int:bits=8 | empty>" and pages.nbytes > 0
    view = pages.view()
    view.prefill(0, k=k, v=v)
    assert repr(view).startswith("<PagedView int:bits=8 | 2 x 300 tokens | ")
    assert view.saved == pages.saved == 1 - pages.memory_usage() / (2 * 2 * 300 * 64 * 4)
    plain = kvpact.cache.KVCache(1, 100, 64)
    plain.store_kv(0, k[0, 0, :1], v[0, 0, :1])
    plain.advance()
    assert repr(plain).startswith("<KVCache none | 1 token | ")
    recipe = {"default": "int4", "layers": {"0": "int8"}}
    mixed = kvpact.create_cache(recipe, kvpact.CacheGeometry(2, 1, 64))
    assert mixed.spec == "mixed"


def test_transformers_takes_no_cache_by_name(model):
    # What docs/faq.md says. Where this fails, transformers has opened its lists: register there.
    with pytest.raises(ValueError, match="Invalid `cache_implementation`"):
        model.generate(torch.arange(4)[None], cache_implementation="kvpact", max_new_tokens=1)
    with pytest.raises(ValueError, match="Unknown quantization backend `kvpact`"):
        QuantizedCache("kvpact", model.config, nbits=4)
