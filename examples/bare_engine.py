"""A decoder on a compressed KV cache: `create_cache`, and `attend` once per layer and step.

    python examples/bare_engine.py

A Llama-like model (RMSNorm, rotary positions, grouped-query attention, SwiGLU) in plain torch, with
random weights so that nothing has to be downloaded: the tokens mean nothing, the calls are those of
a real engine. The lines marked with * are all that an engine adds for kvpact.
"""

import torch
from torch.nn.functional import rms_norm, silu

from kvpact import CacheGeometry, create_cache

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN, VOCAB = 4, 9, 3, 64, 576, 1536, 256


class Decoder:
    """Holds the weights; all state of a generation is in the cache."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def weight(rows, columns):
            return torch.randn(rows, columns, generator=generator) / columns**0.5

        self.embedding, self.head = weight(VOCAB, WIDTH) * WIDTH**0.5, weight(VOCAB, WIDTH)
        self.layers = [
            {
                **{"q": weight(HEADS * HEAD_DIM, WIDTH), "o": weight(WIDTH, HEADS * HEAD_DIM)},
                **{name: weight(KV_HEADS * HEAD_DIM, WIDTH) for name in ("k", "v")},
                **{"gate": weight(HIDDEN, WIDTH), "up": weight(HIDDEN, WIDTH)},
                "down": weight(WIDTH, HIDDEN),
            }
            for _ in range(LAYERS)
        ]

    def forward(self, ids, cache):
        """Return the logits `[B, VOCAB]` after the new tokens `ids` `[B, new]`, and store them."""
        start = cache.seq_len(0)  # *
        x = self.embedding[ids]
        for index, w in enumerate(self.layers):
            y = rms_norm(x, (WIDTH,))
            q, k, v = ((y @ w[n].T).unflatten(-1, (-1, HEAD_DIM)).movedim(1, 2) for n in "qkv")
            q, k = rotated(q, start), rotated(k, start)
            heads = cache.attend(index, k=k, v=v, q=q)  # *
            x = x + heads.movedim(1, 2).flatten(2) @ w["o"].T
            y = rms_norm(x, (WIDTH,))
            x = x + (silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
        return rms_norm(x[:, -1], (WIDTH,)) @ self.head.T


def rotated(x, start):
    """Apply rotary positions from `start` on to `[B, H, T, D]`."""
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(start, start + x.shape[2])[:, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@torch.no_grad()
def generate(model, prompt, count, spec):
    """Return `count` greedy tokens `[B, count]` after a prompt `[B, T]`, and the cache."""
    geometry = CacheGeometry(LAYERS, KV_HEADS, HEAD_DIM, dtype=torch.float32)  # *
    cache = create_cache(spec, geometry)  # *
    ids, found = prompt, []
    for _ in range(count):
        ids = model.forward(ids, cache).argmax(-1, keepdim=True)
        found.append(ids)
    return torch.cat(found, 1), cache


if __name__ == "__main__":
    text = torch.tensor([list(b"It is a truth universally acknowledged" * 20)])
    for name in ("none", "int:bits=8", "turboquant:bits=4"):
        tokens, held = generate(Decoder(), text, 32, name)
        bits = held.stats()["bits_per_value"]
        print(f"{name:18} {held.memory_usage():9,} bytes, {bits:5.2f} bits a value", tokens[0, :8])
