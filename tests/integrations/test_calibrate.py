"""Calibration of transformers' models: RoPE, projections, and caches that use what was learnt."""

import pytest
import torch
from families import rope
from tiny_configs import gemma3
from transformers import CohereConfig, DynamicCache, LlamaConfig, Qwen2Config

from kvpact import Snapshot, parse_spec, recode
from kvpact.errors import GeometryError, SpecError
from kvpact.integrations.transformers import CompressedCache, calibrate, key_offsets, prefix_cache
from kvpact.integrations.transformers.attention.calibrate import key_rotations, output_energies
from kvpact.integrations.transformers.attention.seen import seen_attention
from kvpact.integrations.transformers.versions import named
from kvpact.kernels import RowRotation
from kvpact.stores import MemoryStore

SPECS = [parse_spec("pca:bits=2"), parse_spec("trellis:bits=4")]


def texts(count=2, length=160, vocabulary=125):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, vocabulary, (length,), generator=generator) for _ in range(count)]


@pytest.mark.parametrize(("kind", "more"), [
    (LlamaConfig, {}), (CohereConfig, {"logit_scale": 1.0}), (Qwen2Config, {}),
], ids=["half", "interleaved", "bias"])  # fmt: skip
def test_keys_before_rope_are_what_the_projection_gives(make_model, sizes, kind, more):
    """The projection's own output is the oracle, at every position."""
    model = make_model(kind(**sizes, **more))
    given = {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.register_forward_hook(
            lambda module, inputs, output, index=index: given.__setitem__(index, output)
        )
    (ids,) = texts(1, 60)
    rotations = key_rotations(model)
    with seen_attention(model) as seen, torch.no_grad():
        model(ids[None], use_cache=False)
    assert sorted(rotations) == [0, 1]
    for index, rotation in rotations.items():
        found = RowRotation(rotation).without(seen.layers[index].k, 0)
        wanted = given[index].view(1, 60, 2, 16).transpose(1, 2)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_rope_of_a_models_full_attention_layers(make_model, sizes):
    """Gemma 3's sliding layers turn faster; only the others are compressed."""
    model = make_model(gemma3(sizes, "sliding", "full", "sliding", sliding_window=32))
    rotations = key_rotations(model)
    rotary = model.model.rotary_emb
    full = getattr(rotary, "full_attention_inv_freq", getattr(rotary, "inv_freq", None))
    assert torch.equal(rotations[1].frequencies, full.float())
    assert not torch.equal(rotations[0].frequencies, full.float())
    calibration = calibrate(model, texts(1), SPECS)
    assert sorted(calibration.layers) == [1]
    ids = texts(1, 100)[0][None]
    with torch.no_grad():
        exact = model(ids).logits
        cache = CompressedCache(model, "pca:bits=6,window=8", calibration=calibration)
        found = model(ids[:, :90], **named(cache)).logits
        found = torch.cat([found, model(ids[:, 90:], **named(cache)).logits], 1)
    torch.testing.assert_close(found, exact, atol=0.3, rtol=0.1)
    assert cache._shared.held[0].entry(0).codecs[0].rotation is not None


def test_no_rotation_where_it_is_not_known(make_model, sizes):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make_model(LlamaConfig(**sizes, **rope(**scaling)))
    assert key_rotations(model) == {}
    calibration = calibrate(model, texts(1), SPECS[:1])
    assert "frequencies" not in calibration.layers[0].k["pca/1"]


def test_energies_of_the_output_projection(llama):
    found = output_energies(llama)
    weight = llama.model.layers[1].self_attn.o_proj.weight.double()
    columns = weight.square().sum(0).view(4, 16)  # of the query heads
    wanted = torch.stack([columns[0] + columns[1], columns[2] + columns[3]])
    torch.testing.assert_close(found[1], wanted)


def test_keys_with_a_large_bias(make_model, sizes):
    """`pca` learns the bias with the mean, before RoPE; other methods have it taken off."""
    model = make_model(Qwen2Config(**sizes))  # the bias is in one slow pair of channels
    for layer in model.model.layers:
        bias = torch.tensor([60.0, -20.0, 30.0, 50.0])
        layer.self_attn.k_proj.bias.data[torch.tensor([7, 15, 23, 31])] = bias
        layer.self_attn.q_proj.weight.data[7::8] *= 0.02
        layer.self_attn.q_proj.bias.data[7::8] = 0
    offsets = key_offsets(model)
    assert sorted(offsets) == [0, 1]
    calibration = calibrate(model, texts(), SPECS)
    ids = texts(3, 150)[2][None]
    caches = {}
    for spec in ("none", "pca:bits=4,window=0,sinks=0", "trellis:bits=4"):
        caches[spec] = CompressedCache(model, spec, calibration=calibration)
        with torch.no_grad():
            model(ids, **named(caches[spec]))
    exact, small, _ = (cache.held().dequantize(0, "k") for cache in caches.values())
    assert float((small - exact).norm(dim=-1).mean()) < 0.05 * offsets[0].norm
    # Prefixes and snapshots go from one to the other.
    options = {"storage": "pca:bits=4", "calibration": calibration}
    with MemoryStore() as store, torch.no_grad():
        assert prefix_cache(store, model, caches["trellis:bits=4"], **options).save(ids) == 2
        loaded = CompressedCache(model, "trellis:bits=4", calibration=calibration)
        assert prefix_cache(store, model, loaded, **options).load(ids[:, :-1]) == 128
        assert prefix_cache(store, model, caches["pca:bits=4,window=0,sinks=0"]).save(ids) == 2
        again = CompressedCache(model, "pca:bits=4,window=0,sinks=0", calibration=calibration)
        assert prefix_cache(store, model, again).load(ids[:, :-1]) == 128
    held = recode(caches["trellis:bits=4"].snapshot(), "pca:bits=4", calibration=calibration)
    own = CompressedCache(model, "turboquant:bits=4")
    own.restore(recode(held, "turboquant:bits=4", key_offsets=offsets))
    assert own.get_seq_length() == 150


def test_a_calibrated_cache_follows_the_model(llama, tmp_path):
    steps = []
    calibration = calibrate(llama, texts(), SPECS, progress=lambda *step: steps.append(step))
    assert steps[-1][:2] == (4, 4) and calibration.tokens == 320
    path = tmp_path / "a.safetensors"
    calibration.save(path)
    ids = texts(3, 150)[2][None]
    with torch.no_grad():
        exact = llama(ids, **named(DynamicCache(config=llama.config))).logits[0, 100:]
        error = {}
        for bits in (1, 2, 6):
            cache = CompressedCache(llama, f"pca:bits={bits},window=8", calibration=path)
            llama(ids[:, :100], **named(cache))
            logits = llama(ids[:, 100:], **named(cache)).logits[0]
            kl = exact.softmax(-1) * (exact.log_softmax(-1) - logits.log_softmax(-1))
            error[bits] = float(kl.sum(-1).mean())
    assert error[6] < 0.02 * error[1] and error[6] < error[2] < error[1]


def test_prefixes_are_shared_by_a_calibration(llama):
    """With it `trellis` has one state for all prompts; `pca` stores prefixes of caches without."""
    calibration = calibrate(llama, texts(), SPECS)
    ids = texts(3, 200)[2][None]
    for options, given in (({}, calibration), ({"storage": "pca:bits=4"}, None)):
        if options:
            options["calibration"] = calibration
        with MemoryStore() as store, torch.no_grad():
            first = CompressedCache(llama, calibration=given)
            wanted = llama(ids, **named(first)).logits[:, -1]
            assert prefix_cache(store, llama, first, **options).save(ids) == 3
            second = CompressedCache(llama, calibration=given)
            assert prefix_cache(store, llama, second, **options).load(ids[:, :-1]) == 192
            found = llama(ids[:, 192:], **named(second)).logits[:, -1]
        cosine = torch.nn.functional.cosine_similarity(wanted, found)
        assert float(cosine) > (0.9 if options else 0.99)
    with MemoryStore() as store, pytest.raises(SpecError):
        prefix_cache(store, llama, CompressedCache(llama))


def test_a_small_snapshot_is_restored_by_the_caches_own_spec(llama, tmp_path):
    calibration = calibrate(llama, texts(), SPECS)
    ids = texts(3, 200)[2][None]
    cache = CompressedCache(llama)
    with torch.no_grad():
        llama(ids[:, :-1], **named(cache))
    held = cache.snapshot(token_ids=ids[:, :-1])
    recode(held, "pca:bits=2", calibration=calibration).save(tmp_path / "a.kv")
    again = CompressedCache(llama)
    again.restore(recode(Snapshot.load(tmp_path / "a.kv"), "trellis:bits=4"))
    assert again.get_seq_length() == 199
    with torch.no_grad():
        logits = llama(ids[:, -1:], **named(again)).logits
    assert logits.isfinite().all()


def test_wrong_input_is_refused(llama):
    with pytest.raises(GeometryError, match="128"):
        calibrate(llama, texts(1, 100), SPECS)
    with pytest.raises(GeometryError, match="0 tokens"):
        calibrate(llama, [], SPECS)
    with pytest.raises(SpecError, match="none of these"):
        calibrate(llama, texts(1), [parse_spec("int:bits=8")])
    with pytest.raises(FileNotFoundError):
        CompressedCache(llama, calibration="/no/such/file")
