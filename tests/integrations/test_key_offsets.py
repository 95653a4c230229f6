"""Models whose key projection has a large bias: `CompressedCache(model, …)` stores it apart."""

import pytest
import torch
import transformers
from families import rope, rotary_share

from kvpact import CacheGeometry, KeyOffset, PagedKVCache
from kvpact.errors import DtypeError, GeometryError, LayerIndexError, SpecError
from kvpact.integrations.transformers import PagedBatch, key_offsets, register_attention
from kvpact.integrations.transformers.cache import CompressedCache
from kvpact.integrations.transformers.versions import named
from kvpact.kernels import RowOffset

SPEC = "turboquant:bits=4,sinks=0,window=0"
DIM = 64
WIDE = {"hidden_size": 256}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 128}
MODELS = {
    "qwen2": lambda s: transformers.Qwen2Config(**s | WIDE),
    "qwen2_yarn": lambda s: transformers.Qwen2Config(**s | WIDE, **rope(**YARN)),
    "phi": lambda s: transformers.PhiConfig(**s | WIDE),
    "starcoder2": lambda s: transformers.Starcoder2Config(**s | WIDE),
    "gpt_neox": lambda s: transformers.GPTNeoXConfig(
        **{k: v for k, v in (s | WIDE).items() if k != "num_key_value_heads"},
    ),
    "gpt_oss": lambda s: transformers.GptOssConfig(
        **s, head_dim=DIM, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention"] * 2,
    ),
}  # fmt: skip


def large_bias(heads, rotary=DIM, norm=605.0, seed=5):
    """`[heads, DIM]` in up to 8 random RoPE pairs, of the norm that Qwen2's first layer has."""
    generator, bias = torch.Generator().manual_seed(seed), torch.zeros(heads, DIM)
    for row in bias:
        for pair in torch.randperm(rotary // 2, generator=generator)[:8].tolist():
            row[[pair, pair + rotary // 2]] = torch.randn(2, generator=generator)
    return norm * bias / bias.norm(dim=1, keepdim=True)


def give_bias(model, rotary=DIM, norm=605.0):
    """Let the keys of every layer have a bias that queries, as in trained models, hardly see."""
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            bias = large_bias(parameter.numel() // DIM, rotary)
            parameter.data = (norm / 605 * bias).flatten()
            linear = model.get_submodule(name.replace("k_proj.bias", "q_proj"))
            queries = [linear.weight.data.view(-1, DIM, model.config.hidden_size)]
            queries.append(linear.bias.data.view(-1, DIM))
        elif name.endswith("query_key_value.bias"):
            parts = parameter.data.view(-1, 3, DIM)
            bias = large_bias(len(parts), rotary)
            parts[:, 1] = norm / 605 * bias
            weight = model.get_submodule(name.removesuffix(".bias")).weight.data
            queries = [weight.view(-1, 3, DIM, weight.shape[1])[:, 0], parts[:, 0]]
        else:
            continue
        for rows in queries:
            rows[:, (bias != 0).any(0)] *= 0.01
    return model


@pytest.fixture
def qwen2(make_model, sizes):
    return give_bias(make_model(MODELS["qwen2"](sizes)))


def logits(model, cache, ids, mask, positions=None):
    """Logits of the last 20 tokens, after what a cache holds of those before."""
    with torch.no_grad():
        for part in (slice(0, 40), slice(40, 60)):
            more = {} if positions is None else {"position_ids": positions[:, part]}
            end = part.stop
            output = model(ids[:, part], attention_mask=mask[:, :end], **named(cache), **more)
    return output.logits


def error(model, make_cache, prompt, positions=None):
    ids = torch.randint(3, 128, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    if positions == "of the mask":
        positions = (mask.cumsum(1) - 1).clamp(min=0)
    exact = logits(model, transformers.DynamicCache(), ids, mask, positions)
    found = logits(model, make_cache(), ids, mask, positions)
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("name", "positions"), [("qwen2", None), *((name, "of the mask") for name in MODELS)]
)
def test_a_large_bias_costs_no_precision(name, positions, make_model, sizes, prompt):
    model = make_model(MODELS[name](sizes), "eager" if name == "gpt_oss" else "sdpa")
    if name == "gpt_oss":
        register_attention()
        model.set_attn_implementation("kvpact")
    rotary = int(DIM * rotary_share(model.config))
    give_bias(model, rotary, 0.0)
    without = error(model, lambda: CompressedCache(model, SPEC), prompt, positions)
    give_bias(model, rotary)
    assert key_offsets(model).keys() == {0, 1}
    found = error(model, lambda: CompressedCache(model, SPEC), prompt, positions)
    left = error(model, lambda: CompressedCache(model, SPEC, key_offsets=None), prompt, positions)
    exact = error(model, lambda: CompressedCache(model, "none"), prompt, positions)
    assert exact < 1e-5
    assert found < 1.1 * without
    assert left > 5 * found


def test_bf16_models_round_cosine_and_sine(make_model, sizes):
    model = give_bias(make_model(MODELS["qwen2"](sizes))).bfloat16()
    offsets = key_offsets(model)
    assert offsets[0].dtype is torch.bfloat16
    exact = transformers.DynamicCache()
    with torch.no_grad():
        model(torch.arange(3, 43)[None], **named(exact))
    keys = exact.layers[0].keys.float()
    one = offsets[0]
    exact = KeyOffset(one.frequencies, one.channels, one.bias, dtype=torch.float32)
    rests = [float(RowOffset(offset).without(keys, 0).norm()) for offset in (one, exact)]
    assert rests[0] < rests[1] < 0.02 * keys.norm()


def test_pages_take_the_offsets_of_a_model(qwen2):
    ids = torch.randint(3, 128, (2, 60), generator=torch.Generator().manual_seed(3))
    geometry = CacheGeometry(2, 2, DIM, dtype=torch.float32)
    pages = PagedKVCache(SPEC, geometry, 20, key_offsets=key_offsets(qwen2))
    seqs = pages.allocate_rows(2)
    flat = CompressedCache(qwen2, SPEC)
    for part in (slice(0, 40), slice(40, 60)):
        positions = torch.arange(part.start, part.stop).expand(2, -1)
        with torch.no_grad():
            batch = PagedBatch(qwen2.config, pages, seqs)
            found = qwen2(ids[:, part], position_ids=positions, **named(batch)).logits
            wanted = qwen2(ids[:, part], **named(flat)).logits
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_attention_that_reads_tensors_gets_whole_keys(qwen2, prompt):
    fused = error(qwen2, lambda: CompressedCache(qwen2, SPEC), prompt)
    whole = error(qwen2, lambda: CompressedCache(qwen2, SPEC, attention="keep"), prompt)
    assert whole == pytest.approx(fused, rel=0.3)


def test_a_config_alone_brings_a_warning(qwen2, fallbacks):
    ids = torch.arange(3, 13)[None]

    def said(*args, **options):
        def call():
            with torch.no_grad():
                qwen2(ids, **named(CompressedCache(*args, **options)))

        return fallbacks(call)[1]

    (message,) = said(qwen2.config, SPEC)
    assert "norm 605" in message and "CompressedCache(model, spec)" in message
    assert not said(qwen2.config, "none") and not said(qwen2.config, SPEC, key_offsets=None)
    assert not said(qwen2.config, SPEC, key_offsets=key_offsets(qwen2))
    assert not said(qwen2, SPEC)

    def paged():
        pages = PagedKVCache(SPEC, CacheGeometry(2, 2, DIM, dtype=torch.float32), 4)
        with torch.no_grad():
            qwen2(ids, **named(PagedBatch(qwen2.config, pages)))

    assert "key_offsets(model)" in fallbacks(paged)[1][0]


def test_models_without_such_a_bias_have_no_offsets(make_model, sizes, fallbacks):
    long = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for config in (
        transformers.LlamaConfig(**sizes),
        transformers.Qwen3Config(**sizes, head_dim=DIM),
    ):
        assert key_offsets(make_model(config)) == {}
    assert key_offsets(make_model(transformers.Qwen2Config(**sizes | WIDE))) == {}
    by_length = give_bias(make_model(transformers.Qwen2Config(**sizes | WIDE, **rope(**long))))
    assert key_offsets(by_length) == {}
    normed = give_bias(make_model(transformers.PhiConfig(**sizes | WIDE, qk_layernorm=True)), 32)
    assert key_offsets(normed) == {}


def test_wrong_offsets_are_refused_by_name(qwen2):
    offset = key_offsets(qwen2)[0]
    with pytest.raises(SpecError, match="'auto'"):
        CompressedCache(qwen2, SPEC, key_offsets="yes")
    with pytest.raises(LayerIndexError):
        CompressedCache(qwen2, SPEC, key_offsets={2: offset})
    with pytest.raises(DtypeError, match="KeyOffset"):
        CompressedCache(qwen2, SPEC, key_offsets={0: 605})
    one_head = KeyOffset((1.0,), ((0, 1),), (((1.0, 0.0),),))
    cache = CompressedCache(qwen2, SPEC, key_offsets={0: one_head})
    with pytest.raises(GeometryError, match="KV heads"):
        qwen2(torch.arange(3, 13)[None], **named(cache))
