"""Layers over pages of vLLM's form, and batches for them: no vLLM is needed."""

from dataclasses import replace

import torch

from kvpact import create_cache
from kvpact.cache.layer.held import Held
from kvpact.cache.stream.codecs import latent_spec
from kvpact.integrations.calibrated import NOTHING
from kvpact.integrations.pages.layer import PagedLayer
from kvpact.integrations.pages.page import PageForm, codecs
from kvpact.integrations.pages.window import Row, WindowPool
from kvpact.integrations.vllm.setting import native_plan
from kvpact.kernels import TokenMemory
from kvpact.spec import parse_spec

TOKENS = 32


def make_layer(
    text,
    heads,
    dim,
    dtype=torch.float32,
    pages=80,
    sequences=8,
    fill=0,
    rope=None,
    learnt=NOTHING,
    tokens=TOKENS,
):
    """A layer over pages that are full of some byte; with `rope`, of latents and keys so wide."""
    latent = rope is not None
    spec = latent_spec(parse_spec(text)) if latent else parse_spec(text)
    shapes = ((heads, dim), (heads, rope if latent else dim))
    pair = codecs(spec, shapes[0][1], shapes[1][1], dtype, learnt)
    form = PageForm(*pair, tokens)
    memory = torch.full((pages, heads, tokens, form.content), fill, dtype=torch.uint8)
    windows = WindowPool(spec.key.window, sequences, tokens, shapes, dtype)
    plan = native_plan(*pair, dtype, latent=latent)
    return PagedLayer(form, plan, memory, windows, latent=latent)


def step(layer, rows, qkv, config):
    """What comes out of one batch, and what was cut."""
    out = torch.full_like(qkv[0], 7.0)
    return out, layer.step(rows, *qkv, out, config)


def run(layer, sequences, counts, config):
    """One batch of `SequenceBeside`; return what came out and what is right."""
    rows, start = [], 0
    for sequence, count in zip(sequences, counts, strict=True):
        sequence.take(count)
        rows.append(sequence.row(start))
        start += count
    qkv = [torch.cat([sequence.new[i] for sequence in sequences]) for i in range(3)]
    right = torch.cat([sequence.right for sequence in sequences])
    out = torch.full_like(right, torch.nan)
    assert layer.step(rows, *qkv, out, config) == {}
    return out, right


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
    """Return, batch by batch, what a kernel of prompts gives and the slots alone do."""
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


class WindowBeside:
    """A contiguous cache with slots of all tokens, as vLLM's pages have, and the last exactly."""

    def __init__(self, text, geometry, backend="cpu"):
        spec = parse_spec(text)
        self.width = spec.key.window
        assert (spec.value.window, spec.key.sinks, spec.value.sinks) == (self.width, 0, 0)
        key, value = (replace(method, window=0) for method in (spec.key, spec.value))
        self.stored = create_cache(replace(spec, key=key, value=value), geometry, backend=backend)
        self.exact = None

    def attend(self, layer, k, v, q, config):
        read = self.stored.fork()
        if self.width and self.exact is not None:
            held, entry = self.stored.seq_len(0), read.entry(0)
            start = max(held - self.width, 0)
            both = zip(entry.streams(), self.exact, strict=True)
            held = [(stream, TokenMemory(x[:, :, start:], start)) for stream, x in both]
            streams = [x._replace(memory=memory, tail_start=start) for x, memory in held]
            entry.restore(Held(*streams))
        self.stored.store(0, k=k, v=v)
        old = self.exact or (k[:, :, :0], v[:, :, :0])
        self.exact = [torch.cat(both, 2) for both in zip(old, (k, v), strict=True)]
        return read.attend(0, k=k, v=v, q=q, config=config)


class SequenceBeside:
    """A sequence of a batch, and beside it the contiguous cache that says what is right."""

    def __init__(self, qkv, cache, config, pages):
        self.qkv, self.cache, self.config, self.pages, self.held = qkv, cache, config, pages, 0

    def take(self, count):
        self.new = [x[self.held : self.held + count] for x in self.qkv]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in self.new)
        self.right = self.cache.attend(0, k=k, v=v, q=q, config=self.config)[0].transpose(0, 1)

    def row(self, start):
        end, held = start + len(self.new[0]), self.held
        self.held += len(self.new[0])
        return Row(start, end, held, tuple(self.pages[: -(-self.held // TOKENS)]))
