"""``kvpact size``: the bytes that it tells are those that caches hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from commands import bad, good
from tiny_configs import SIZES, gemma3

import kvpact
from kvpact.data import model_table
from kvpact.errors import GeometryError
from kvpact.integrations.sizes import PARTS, SPECS, layers_of, not_planned, planned
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.layers.shapes import layer_shapes
from kvpact.integrations.transformers.versions import named

# --- a geometry ------------------------------------------------------------------------------


def of(layers, heads, k_dim, v_dim=None, dtype="float16"):
    return layers_of(kvpact.CacheGeometry(layers, heads, k_dim, v_dim), dtype)


@pytest.mark.parametrize("spec", ["none", "int:bits=4", "turboquant:bits=3,center=64/fp8"])
@pytest.mark.parametrize("tokens", [3, 200])
def test_size_is_what_a_cache_holds(spec, tokens):
    geometry = kvpact.CacheGeometry(2, 3, 64, 32, torch.float16)
    cache = kvpact.create_cache(spec, geometry)
    for layer in range(2):
        k, v = (torch.zeros(2, 3, tokens, dim, dtype=torch.float16) for dim in (64, 32))
        cache.prefill(layer, k, v, None)
    held = planned(spec, of(2, 3, 64, 32), tokens, 2)
    assert held["total"] == held["compressed"] == cache.memory_usage()
    assert sum(held[part] for part in PARTS) == held["total"] and held["own"] == 0
    assert held["exact"] == 2 * 2 * 2 * 3 * tokens * (64 + 32)


@pytest.mark.parametrize("spec", ["lowrank:rank=8", "lowrank:rank=8,per_head=false", "lowrank",
                                  "vq:codebook_size=16,stages=2", "hybrid:rank=8",
                                  "hybrid"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_size_counts_what_codecs_learn(spec, dtype):
    geometry = kvpact.CacheGeometry(2, 3, 16, 32, dtype)
    plan = planned(spec, of(2, 3, 16, 32, str(dtype)[6:]), 200, 2)
    cache = kvpact.create_cache(spec, geometry)
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        k = torch.randn(2, 3, 200, 16, generator=generator).to(dtype)
        v = torch.randn(2, 3, 200, 32, generator=generator).to(dtype)
        cache.prefill(layer, k, v)
    codecs = [stream.codec for layer in cache._layers for stream in (layer.k, layer.v)]
    held = sum(tensor.nbytes for codec in codecs for tensor in codec.state().values())
    assert plan["factors"] == held > 0
    if not spec.startswith("hybrid"):
        assert plan["total"] == cache.memory_usage()


def test_size_of_a_geometry_tells_the_parts():
    shape = ("--layers", 30, "--kv-heads", 3, "--head-dim", 64)
    out = good("size", "none", "q8_0", *shape, "--tokens", "8k")
    assert "188.74 MB" in out and "100.0 %" in out and "8.500" in out and "53.1 %" in out
    assert "30 x full attention: 3 KV heads, widths 64 and 64" in out
    assert good("size", "none", "q8_0", *shape, "--tokens", 8192) == out


def test_size_of_a_recipe(tmp_path):
    recipe = tmp_path / "plan.toml"
    recipe.write_text('default = "q4_0"\n[layers]\n0 = "none"\n', encoding="utf-8")
    mixed = planned(str(recipe), of(2, 1, 32), 128, 1)["slots"]
    assert mixed == 128 * 2 * (32 * 2 + 32 * 4.5 / 8)
    args = ("--layers", 2, "--kv-heads", 1, "--head-dim", 32, "--tokens", 128)
    assert "plan.toml" in good("size", recipe, *args)


def test_size_says_what_it_cannot_know():
    args = ("--layers", 1, "--kv-heads", 1, "--head-dim", 32, "--tokens", 128)
    out = good("size", "lowrank:energy=0.9", *args)
    assert "Not known beforehand: lowrank: the tokens decide" in out
    assert "Not known beforehand: hybrid: exact" in good("size", "hybrid", *args)
    assert "Not known" not in good("size", "lowrank", "vq", "kivi", *args)


# --- a model ---------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, head_dim=24),
    "sliding": lambda: transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=16, layer_types=SLIDING
    ),
    "shared": lambda: transformers.Gemma3nTextConfig(
        **{**SMALL, "num_hidden_layers": 4}, head_dim=16, sliding_window=16, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, laurel_rank=4,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "latent": lambda: transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, kv_lora_rank=32, q_lora_rank=16, v_head_dim=16,
        qk_rope_head_dim=16, qk_nope_head_dim=16, first_k_dense_replace=3,
    ),
    "convolutions": lambda: transformers.Lfm2Config(
        **SMALL, layer_types=["conv", "full_attention", "conv"]
    ),
    "linear": lambda: transformers.Qwen3NextConfig(
        **SMALL, head_dim=16, linear_num_value_heads=2, linear_num_key_heads=2, num_experts=2,
        linear_key_head_dim=16, linear_value_head_dim=16, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "hybrid": lambda: transformers.FalconH1Config(
        **SMALL, head_dim=16, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
        mamba_chunk_size=8,
    ),
}  # fmt: skip


def held_by(layer):
    """Bytes of the tensors that a cache layer of transformers holds."""
    native = not hasattr(layer, "moment")
    kept = [getattr(layer, name, None) for name in ("keys", "values") if native]
    for name in ("conv_states", "recurrent_states"):
        kept += getattr(layer, name, {}).values()
    return sum(x.numel() * x.element_size() for x in kept if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("name", MODELS)
def test_size_of_a_model_is_what_its_cache_holds(name, tmp_path):
    torch.manual_seed(0)
    config = MODELS[name]()
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    specs, rows, tokens = ("int:bits=4", "turboquant:bits=3"), 2, 70
    args = ("--tokens", tokens, "--batch", rows, "--dtype", "float32", "--json")
    document = json.loads(good("size", tmp_path, *specs, *args))
    assert [row["spec"] for row in document["rows"]] == list(specs)
    for row in document["rows"]:
        cache = CompressedCache(model, row["spec"])
        with torch.no_grad():
            model(torch.zeros(rows, tokens, dtype=torch.long), **named(cache))
        assert row["compressed"] == cache.stats()["bytes"]["total"] > 0
        assert row["own"] == sum(held_by(layer) for layer in cache.layers)
        assert row["total"] == row["compressed"] + row["own"] == cache.memory_usage()
    assert sum(layer["count"] for layer in document["layers"]) == config.num_hidden_layers


@pytest.mark.parametrize("sliding", ["int:bits=8", "kivi:bits=4,group=64", "trellis:bits=4"])
@pytest.mark.parametrize("tokens", [60, 200, 1000])
def test_size_of_packed_windows_is_what_they_hold(sliding, tokens, tmp_path):
    torch.manual_seed(0)
    kinds = "sliding", "full", "sliding"
    config = gemma3({**SIZES, "max_position_embeddings": 2048}, *kinds, sliding_window=130)
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache = CompressedCache(model, "int:bits=8", sliding=sliding)
    with torch.no_grad():
        model(torch.arange(2 * tokens).view(2, -1) % 128, **named(cache))
    args = ("--tokens", tokens, "--batch", 2, "--dtype", "float32", "--sliding", sliding)
    (row,) = json.loads(good("size", tmp_path, "int:bits=8", *args, "--json"))["rows"]
    assert row["total"] == cache.memory_usage()


def test_a_config_file_is_a_model(tmp_path):
    MODELS["sliding"]().save_pretrained(tmp_path)
    whole = good("size", tmp_path, "--json")
    by_file = json.loads(good("size", tmp_path / "config.json", "--json"))
    assert {**by_file, "model": str(tmp_path)} == json.loads(whole)
    assert [row["spec"] for row in by_file["rows"][::3]] == list(SPECS)
    assert [row["tokens"] for row in by_file["rows"][:3]] == [4096, 32768, 131072]
    out = good("size", tmp_path)
    for words in ("128k", "trellis:bits=4", "2 x sliding attention: 2 KV heads, widths 16 and 16",
                  "15 tokens at most; not compressed", "made for 512 tokens"):  # fmt: skip
        assert words in out


def test_bars_are_as_long_as_caches_are_large():
    shape = ("--layers", 2, "--kv-heads", 3, "--head-dim", 32)
    out = good("size", "none", "q8_0", "q4_0", *shape, "--tokens", "4k")
    bars = [line.count("█") for line in out.splitlines() if "█" in line]
    assert bars == [48, 48 * 8.5 // 16 + 1, 48 * 4.5 // 16 + 1]  # 25.5 and 13.5, rounded
    args = ("size", "int:bits=4,sinks=0,window=1024", *shape, "--tokens", 2048)
    (row,) = json.loads(good(*args, "--json"))["rows"]
    out = good(*args)
    (bar,) = (line for line in out.splitlines() if "█" in line and "exact" not in line)
    # Of the cache with K and V in 16 bits, which is not among the specs.
    assert bar.count("█") + bar.count("▓") == round(48 * row["total"] / row["exact"]) < 48
    assert bar.count("▓") > bar.count("█")
    assert "█ packed, ▓ exact tokens" in out


def test_a_shape_leaves_the_config_alone():
    config = MODELS["latent"]()
    before = config.to_dict()
    first = layer_shapes(config, torch.float16)[0]
    assert config.to_dict() == before
    assert (first.latent, first.heads, first.key_dim, first.value_dim) == (True, 1, 32, 16)


def test_a_call_takes_what_is_at_hand():
    config = MODELS["sliding"]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    found = kvpact.size(config, "int:bits=4", 200, batch=2)
    assert kvpact.size(model, ["int4"], "200", batch=2).rows[0].total == found.rows[0].total
    (row,) = found.rows
    held = layers_of(config)
    assert row.total == planned("int:bits=4", held, 200, 2)["total"] < row.exact
    shape = kvpact.CacheGeometry(2, 3, 64, dtype=torch.bfloat16)
    (row,) = kvpact.size(shape, {"default": "none"}, 32).rows
    assert (row.spec, row.total) == ("recipe", 32 * 2 * 3 * 2 * 64 * 2)
    lines = repr(kvpact.size("qwen3-8b")).splitlines()
    assert lines[0].split() == ["spec", "4,096", "tokens", "32,768", "tokens", "131,072", "tokens",
                                "of", "16", "bits"]  # fmt: skip
    assert [line.split()[0] for line in lines[1:]] == list(SPECS)
    assert "4.83 GB" in lines[1] and lines[1].endswith("100.0 %")


@pytest.mark.parametrize("tokens", [0, 1.5, "many", ["4k", -1]])
def test_a_call_names_what_is_no_number_of_tokens(tokens):
    with pytest.raises(GeometryError, match="is no number of tokens; take one such as 4096 or 32k"):
        kvpact.size("qwen3-8b", tokens=tokens)


# --- models that are known -------------------------------------------------------------------

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import models as tool  # noqa: E402

WRITTEN = json.loads(tool.PATH.read_text("utf-8"))
OF_EACH_KIND = ("gemma3", "qwen3.5-27b", "mimo-v2-flash", "glm-4.7-flash", "glm-5.2")


def test_the_file_of_models_is_what_its_tool_writes():
    some = {**WRITTEN, "models": {name: WRITTEN["models"][name] for name in OF_EACH_KIND}}
    assert tool.filled(some)["models"] == some["models"]
    widths = tool.widths_of(WRITTEN["models"])
    for spec, slots in WRITTEN["slots"].items():
        assert slots == {f"{k},{v},{x:d}": tool.slots_of(spec, k, v, x) for k, v, x in widths}
    assert list(WRITTEN["slots"]) == list(SPECS)
    assert tool.text_of(WRITTEN) == tool.PATH.read_text("utf-8")


@pytest.mark.slow
def test_layers_of_all_models_are_those_of_their_configs():
    assert tool.filled(WRITTEN) == WRITTEN


def test_every_model_names_its_source():
    assert len(WRITTEN["models"]) >= 40
    for model in WRITTEN["models"].values():
        assert model["source"] in WRITTEN["sources"] and model["hub"].count("/") == 1
        assert len(model["order"]) == model["config"].get("num_hidden_layers", len(model["order"]))


@pytest.mark.parametrize("name", WRITTEN["models"])
@pytest.mark.parametrize("tokens", [100, 600, 32768])
def test_sizes_of_the_file_are_those_of_the_codecs(name, tokens, monkeypatch):
    held = layers_of(name)
    found = {spec: planned(spec, held, tokens, 2) for spec in SPECS}
    monkeypatch.setitem(model_table(), "slots", {})
    assert found == {spec: planned(spec, held, tokens, 2) for spec in SPECS}
    assert [not_planned(spec, held) for spec in SPECS] == [[]] * len(SPECS)


def test_a_known_model_needs_no_torch_and_no_network():
    code = (
        "import sys; from kvpact.cli.app import app\n"
        "try: app(['size', 'qwen3-8b'])\n"
        "finally: print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.endswith("[]\n") and "36 x full attention: 8 KV heads" in out.stdout


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen3-8b", "QWEN3-8B"])
def test_a_known_model_has_its_name_and_its_hub_id(name):
    (row,) = json.loads(good("size", name, "none", "--tokens", "32k", "--json"))["rows"]
    # 36 layers, 8 heads, K and V of 128 numbers in 16 bits.
    assert row["total"] == row["exact"] == 32768 * 36 * 8 * 2 * 128 * 2


def test_a_folder_goes_before_a_known_name(tmp_path, monkeypatch):
    MODELS["llama"]().save_pretrained(tmp_path / "qwen3-8b")
    monkeypatch.chdir(tmp_path)
    assert "3 x full attention: 2 KV heads, widths 24 and 24" in good("size", "qwen3-8b")


def test_a_known_model_in_four_bytes_is_asked_of_its_config():
    args = ("size", "qwen3.5-35b-a3b", "none", "--tokens", "4k", "--json")
    (two,), (four,) = (
        json.loads(good(*args, "--dtype", dtype))["rows"] for dtype in ("bfloat16", "float32")
    )
    # The recurrent states have four bytes in either, the 8,192 channels of three tokens have not.
    assert four["compressed"] == 2 * two["compressed"]
    assert four["own"] - two["own"] == 30 * 8192 * 4 * 2


SHAPE = ("--layers", 1, "--kv-heads", 1, "--head-dim", 8)


@pytest.mark.parametrize(("args", "words"), [
    ((), "no model is named"),
    (("none",), "'none' is a spec and no model; give a model first, such as 'qwen3-8b', or"),
    (("nope.json",), "there is no file 'nope.json'"),
    (("llama-3-8b",), "known without a network: llama-3.1-8b, "),
    (("none", "--layers", 2), "add --kv-heads N --head-dim N"),
    (("bogus", *SHAPE), "bogus"),
    (("none", *SHAPE, "--head-dim", 0), "head_dim"),
    (("none", *SHAPE, "--batch", 0), "--batch"),
    (("none", *SHAPE, "--tokens", "-4"), "-4 is no number of tokens"),
    (("none", *SHAPE, "--tokens", "4M"), "4M is no number of tokens"),
    (("{tmp}/none", "none"), "no model folder"),
    (("{tmp}/text.txt", "none"), "can't load the config"),
    (("{tmp}/t5", "none"), "can't be found without weights"),
])  # fmt: skip
def test_what_has_no_size_is_told(args, words, tmp_path):
    (tmp_path / "text.txt").write_text("some text", encoding="utf-8")
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    assert words in bad("size", *(str(arg).format(tmp=tmp_path) for arg in args))


def test_a_hub_that_is_away_is_told(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = []
    refuse = lambda name, **x: asked.append(x) or 1 / 0  # noqa: E731
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    assert "can't load the config of 'nobody/nothing'" in bad("size", "nobody/nothing")
    assert asked == [{"local_files_only": True}]  # which does not try for half a minute
