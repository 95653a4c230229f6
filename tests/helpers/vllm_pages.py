"""Layers over pages of vLLM's form, and batches for them: no vLLM is needed."""

import torch

from kvpact.integrations.vllm.layer import PagedLayer
from kvpact.integrations.vllm.page import PageForm
from kvpact.integrations.vllm.setting import codecs, native_plan
from kvpact.integrations.vllm.window import Row, WindowPool
from kvpact.spec import parse_spec

TOKENS = 32


def make_layer(text, heads, dim, dtype, pages=80):
    spec = parse_spec(text)
    k, v = codecs(spec, dim, dim, dtype)
    form = PageForm(k, v, TOKENS)
    memory = torch.zeros(pages, heads, TOKENS, form.content, dtype=torch.uint8)
    windows = WindowPool(spec.key.window, 8, TOKENS, ((heads, dim), (heads, dim)), dtype)
    return PagedLayer(form, native_plan(k, v, dtype), memory, windows)


def random_qkv(count, q_heads, heads, dim, seed, dtype):
    """Q, K and V as vLLM gives them: parts of one tensor."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(count, q_heads + 2 * heads, dim, generator=generator).to(dtype)
    return whole.split([q_heads, heads, heads], 1)


def batch_of(counts, held, tables):
    """Rows of a batch, `(which sequence, how many tokens)` each; `held` counts them."""
    rows, start = [], 0
    for which, count in counts:
        pages = tables[which][: -(-(held[which] + count) // TOKENS)]
        rows.append(Row(start, start + count, held[which], tuple(pages)))
        start, held[which] = start + count, held[which] + count
    return rows


def both_ways(text, scratch, shape, dtype, config, batches):
    """Return, batch by batch, what a layer gives by a kernel of prompts and by the slots alone.

    `shape` is (query heads, KV heads, width); the bytes of the pages have to be equal.
    """
    tables = [list(range(0, 80, 2)), list(range(1, 40, 2)), [79, 41, 77]]
    fast, defining = (make_layer(text, *shape[1:], dtype) for _ in range(2))
    held, results = [0, 0, 0], []
    for seed, counts in enumerate(batches):
        rows = batch_of(counts, held, tables)
        qkv = random_qkv(rows[-1].end, *shape, seed, dtype)
        out, right = (torch.full(qkv[0].shape, torch.nan, dtype=dtype) for _ in range(2))
        fast.step(rows, *qkv, out, config, scratch.plan(rows))
        defining.step(rows, *qkv, right, config)
        assert torch.equal(fast.pages, defining.pages)
        results.append((out, right))
    return results


class SequenceBeside:
    """A sequence of a batch, and beside it the contiguous cache that says what is right.

    `qkv` are all of its tokens, `[count, heads, D]` each.
    """

    def __init__(self, qkv, cache, config, pages):
        self.qkv, self.cache, self.config, self.pages, self.held = qkv, cache, config, pages, 0

    def take(self, count):
        self.new = [x[self.held : self.held + count] for x in self.qkv]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in self.new)
        self.right = self.cache.attend(0, k, v, q, self.config)[0].transpose(0, 1)

    def row(self, start):
        end, held = start + len(self.new[0]), self.held
        self.held += len(self.new[0])
        return Row(start, end, held, tuple(self.pages[: -(-self.held // TOKENS)]))
