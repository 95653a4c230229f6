"""What 3,000 tokens of SmolLM2-135M take on disk at 4 bits, all-in (`make test-slow`)."""

import pytest
import torch

from kvpact import CacheGeometry, create_cache
from kvpact.data import book_path
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import CompressedCache, prefix_cache
from kvpact.integrations.transformers.versions import named
from kvpact.stores import DirectoryStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FP16 = 23_040  # bytes of a token's K and V
TOKENS, SPEC = 3000, "turboquant:bits=4"
EXACT = 4 + 64 + (TOKENS - 64) % 32  # sinks, window, and what waits: 32 are packed together


def test_a_prefix_takes_less_than_three_tenths_of_fp16(tmp_path):
    model, tokenizer = load_model()
    text = book_path().read_text("utf-8")[: 8 * TOKENS]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :TOKENS]
    cache = CompressedCache(model.config, SPEC)
    with torch.no_grad():
        for start in range(0, TOKENS, 500):
            part = ids[:, start : start + 500]
            model(part, **named(cache), logits_to_keep=1)
    with DirectoryStore(tmp_path / "store") as store:
        chunks = prefix_cache(store, model, cache).save(ids)
        assert chunks == TOKENS // 64
    on_disk = sum(p.stat().st_size for p in (tmp_path / "store").rglob("*") if p.is_file())
    assert 0.26 < on_disk / (FP16 * 64 * chunks) < 0.29
    snapshot = cache.snapshot(token_ids=ids)
    begin = snapshot.slice(0, 64 * chunks)
    begin.save(tmp_path / "prefix")
    assert 0.26 < (tmp_path / "prefix").stat().st_size / (FP16 * 64 * chunks) < 0.29
    # A whole snapshot has the exact tokens beside, here in fp32.
    assert sum(snapshot.sizes()[x] for x in ("sinks", "window")) == (exact := 2 * FP16 * EXACT)
    assert (snapshot.nbytes - exact) / (FP16 * TOKENS) < 0.272
    again = CompressedCache(model.config, SPEC)
    with DirectoryStore(tmp_path / "store") as store:
        assert prefix_cache(store, model, again).load(ids) == 64 * chunks
    assert again.snapshot().digest == begin.select([0]).digest


def test_a_whole_snapshot_of_a_16_bit_model_does_too():
    cache = create_cache(SPEC, CacheGeometry(30, 3, 64, dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    for layer in range(30):
        k, v = torch.randn(2, 1, 3, TOKENS, 64, generator=generator).to(torch.bfloat16)
        cache.prefill(layer, k, v)
    snapshot = cache.snapshot(token_ids=torch.arange(TOKENS))
    assert 0.26 < (snapshot.nbytes - FP16 * EXACT) / (FP16 * TOKENS) < 0.262
