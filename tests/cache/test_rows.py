"""Sequences have rows of their own, which are truncated, chosen and repeated (defect A2)."""

import pytest
import torch
from one_layer import METHODS, fill, kvq, normal, shown

from kvpact.errors import CacheFull


@pytest.mark.parametrize("spec", METHODS)
def test_sequences_do_not_share_rows(spec):
    k, v, _ = kvq(300, batch=3)
    cache = fill(spec, k[:, :, :200], v[:, :, :200])
    other = cache.fork()
    other.prefill(0, k[:, :, 200:], v[:, :, 200:])
    cache.prefill(0, v[:, :, 200:], k[:, :, 200:])
    wanted = fill(spec, k[:, :, :200], v[:, :, :200])
    wanted.prefill(0, k[:, :, 200:], v[:, :, 200:])
    for got, expected in zip(shown(other, k, v), shown(wanted, k, v), strict=True):
        assert torch.equal(got, expected)
    # Rows of a batch are sequences of their own.
    other.select(torch.tensor([2, 0]))
    alone = fill(spec, k[2:, :, :200], v[2:, :, :200])
    alone.prefill(0, k[2:, :, 200:], v[2:, :, 200:])
    rows = shown(other, k[[2, 0]], v[[2, 0]])
    for got, expected in zip(rows, shown(alone, k[2:], v[2:]), strict=True):
        assert torch.equal(got[:1], expected)


@pytest.mark.parametrize("spec", METHODS)
def test_truncate_within_the_window_is_as_if_the_tokens_had_never_come(spec):
    k, v, _ = kvq(160)
    cache, short = fill(spec, k, v), fill(spec, k[:, :, :130], v[:, :, :130])
    cache.truncate(130)
    assert cache.seq_len(0) == short.seq_len(0) == 130
    more = normal(1, 2, 70, 64, seed=9)
    for each in (cache, short):
        each.prefill(0, more, more)
    for got, expected in zip(shown(cache, k, v), shown(short, k, v), strict=True):
        assert torch.equal(got[:, :, 130:], expected[:, :, 130:])
    cache.truncate(500)
    assert cache.seq_len(0) == 200


def test_reset_capacity_reorder_and_repeat():
    k, v, q = kvq(64, batch=2)
    cache = fill("int:bits=4", k, v, max_tokens=64)
    with pytest.raises(CacheFull, match="64 allowed, 0 free"):
        cache.attend(0, k[:, :, :1], v[:, :, :1], q[:, :, :1])
    assert cache.seq_len(0) == 64
    cache.repeat(2)
    cache.reorder(torch.tensor([3, 2, 1, 0]))
    cache.truncate(60)
    rows = [1, 1, 0, 0]
    assert torch.equal(shown(cache, k[rows], v[rows])[0][:, :, -1], k[rows][:, :, 59])
    cache.reset()
    assert cache.seq_len(0) == 0 and cache.memory_usage() == 0
    cache.attend(0, k[:1], v[:1], q[:1])  # another batch size may come
    assert cache.batch_size == 1
