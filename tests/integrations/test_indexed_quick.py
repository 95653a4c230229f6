"""Steps of layers that choose: packed keys of the index are scanned, chosen slots read alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_configs import INDEXED, run
from tiny_models import tiny_model
from transformers import DynamicCache

from kvpact import Snapshot
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.layers.index_scan import KeysHandle, PackedKeys
from kvpact.integrations.transformers.versions import named
from kvpact.kernels import plan
from kvpact.quantizers.channels import to_integers

SHAPE_AND_SEED = (3, 420), 2
SPEC = "turboquant:bits=4,window=8"
FOLLOWED = [name for name in INDEXED if name not in ("qwen4", "glm5")]
"""Models whose products of the index are known; the others read dequantised keys."""
ALONE = [name for name in INDEXED if name != "qwen4"]
"""Models whose chosen slots can be copied: latents, and here blocks of 64 tokens."""


def made(name):
    """Return a model that chooses."""
    block = {"index_block_size": 64, "index_head_dim": 32} if name == "minimax_m3" else {}
    model = tiny_model(name, **block)
    if name == "hunyuan_v4":  # its code asks for eager; attention is a name like others
        model.config._attn_implementation = "kvpact"
    return model


def steps(ids):
    return ids.split([380, 1, 1, 3, 1, ids.shape[1] - 386], dim=1)


def close(one, other, bound=1e-5):
    return (one - other).abs().max() < bound * other.abs().max()


def chosen_alone(cache):
    counts = cache.stats()["compute"]["attend"]
    return sum(n for name, n in counts.items() if "chosen" in name)


def watch(monkeypatch):
    """Count the calls of what computes scores (with weights, without) and dequantises."""
    counts = {"scores": 0, "whole": 0}
    for name in counts:
        original = getattr(PackedKeys, name)

        def watched(*given, name=name, original=original):
            counts[name] += 1
            return original(*given)

        monkeypatch.setattr(PackedKeys, name, watched)
    return counts


@pytest.mark.parametrize("name", INDEXED)
def test_steps_are_those_of_dequantised_keys_and_masks(name, ids, monkeypatch):
    model = made(name)
    with monkeypatch.context() as patch:
        patch.setattr(KeysHandle, "of", classmethod(lambda cls, keys: keys.whole()))
        patch.setattr(plan, "chosen_calls", lambda call, copy: None)
        cache = CompressedCache(model.config, SPEC)
        wanted = run(model, cache, steps(ids))
        assert not chosen_alone(cache)
    cache = CompressedCache(model.config, SPEC)
    run(model, cache, steps(ids)[:1])
    counts = watch(monkeypatch)
    got = torch.cat([wanted[:, :380], run(model, cache, steps(ids)[1:])], 1)
    assert close(got, wanted, 2e-4 if name == "minimax_m3" else 1e-5)
    # The prompt's last call is no step: it reads dequantised keys.
    layers = 1 if name in ("qwen4", "glm5", "minimax_m3") else 2
    scored, whole = (4, 1) if name in FOLLOWED else (0, 5)
    assert counts == {"scores": scored * layers, "whole": whole * layers}
    assert bool(chosen_alone(cache)) == (name in ALONE)


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3", "mistral_large4"])
def test_exact_slots_that_are_chosen_are_the_models_own(name, ids):
    model = made(name)
    wanted = run(model, DynamicCache(config=model.config), steps(ids)[:5])
    cache = CompressedCache(model.config, "none")
    assert close(run(model, cache, steps(ids)[:5]), wanted, 1e-6)
    assert chosen_alone(cache)


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3"])
def test_steps_after_all_that_happens_to_a_cache(name, ids):
    """A rollback into the packed index, a fork, a snapshot, other rows."""
    model = made(name)
    cache = CompressedCache(model.config, SPEC)
    run(model, cache, [ids])
    cache.crop(-30)
    again = CompressedCache(model.config, SPEC)
    again.restore(Snapshot.from_bytes(cache.snapshot().to_bytes()))
    fork, rows = copy.deepcopy(cache), torch.tensor([2, 0])
    wanted = run(model, cache, ids[:, 390:].split(1, 1)[:4])
    assert chosen_alone(cache)
    for other in (again, fork):
        assert torch.equal(run(model, other, ids[:, 390:].split(1, 1)[:4]), wanted)
    cache.crop(-4)
    cache.batch_select_indices(rows)
    assert close(run(model, cache, ids[rows, 390:].split(1, 1)[:4]), wanted[rows], 1e-3)


def test_left_padding_and_rows_that_choose_unlike_tokens(ids, greedy):
    model = made("deepseek_v32")
    mask = torch.ones_like(ids)
    mask[0, :200], mask[1, :7] = 0, 0
    given = {"attention_mask": mask, **greedy}
    wanted = model.generate(ids, **given, **named(DynamicCache(config=model.config)))
    cache = CompressedCache(model.config, "none")
    assert torch.equal(model.generate(ids, **given, **named(cache)), wanted)
    assert chosen_alone(cache)


@pytest.fixture
def handle():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 198, 32, generator=generator)
    packed = PackedKeys(*to_integers(keys[:, :128], 1, 0), keys[:, 128:])
    return KeysHandle.of(packed), packed.whole(), torch.randn(2, 1, 16, 32, generator=generator)


def test_products_that_are_known_are_followed(handle, monkeypatch):
    keys, whole, q = handle
    weight = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(1))
    counts = watch(monkeypatch)
    for scale in (None, 0.25):

        def scores(k, scale=scale):
            x = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
            x = F.relu(x if scale is None else x * scale)
            return torch.matmul(weight.unsqueeze(-2), x).squeeze(-2)

        assert close(scores(keys), scores(whole), 1e-4)
    by_head = torch.matmul(q.transpose(1, 2), keys.unsqueeze(1).float().transpose(-1, -2))
    hidden = torch.zeros(2, 1, 1, 198, dtype=torch.bool)
    hidden[..., 190:] = True
    wanted = (q.transpose(1, 2) @ whole.unsqueeze(1).mT).masked_fill(hidden, 0.0)
    assert close(by_head.masked_fill(hidden, 0.0), wanted, 1e-4)
    assert counts == {"scores": 3, "whole": 0}


def test_for_anything_else_they_are_the_keys(handle):
    keys, whole, q = handle
    assert keys.shape == whole.shape and keys.dtype == whole.dtype and "198" in repr(keys)
    for use in (
        lambda k: k[1, 3:9], lambda k: torch.cat([k, k[:, :2]], 1),
        lambda k: torch.split(k, [16, 16], -1)[1],
        lambda k: (k.unsqueeze(1).transpose(-1, -2) * 2).sum(1), lambda k: k.transpose(0, 1),
        lambda k: torch.matmul(q, k.transpose(-2, -1).unsqueeze(1)).abs().amax(2),
        lambda k: (q @ k.mT.unsqueeze(1)).relu(),
    ):  # fmt: skip
        assert torch.allclose(use(keys), use(whole), atol=2e-3)
    keys = KeysHandle.of(keys.keys)
    keys[:, 3] = 0  # what is written into it is read of it
    assert not keys[:, 3].any() and not keys.float()[:, 3].any()


def test_scores_of_queries_with_a_gradient_are_torchs(handle):
    keys, _, q = handle
    q.requires_grad_()
    torch.matmul(q, keys.transpose(-1, -2).unsqueeze(1)).sum().backward()
    assert q.grad is not None
