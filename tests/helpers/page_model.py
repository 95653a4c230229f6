"""A sequence on pages as plain tensors, and tokens that follow from all ids before them."""

from functools import cache

import torch

import kvpact
from kvpact import CacheGeometry, PagedKVCache
from kvpact.testing import random_tokens

LAYERS, HEADS, DIM, V_DIM, LONGEST = 2, 2, 16, 8, 256
GEOMETRY = CacheGeometry(LAYERS, HEADS, DIM, V_DIM)


def _ids(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (LONGEST,), generator=generator).tolist()


# The second leaves the first after 100 tokens; the third has its later tokens, not its first ones.
PROMPTS = [_ids(1), _ids(1)[:100] + _ids(2)[100:], _ids(3)[:32] + _ids(1)[32:]]
# [layers, ids or places, H, D]
K_OF_ID, K_OF_PLACE = random_tokens(LAYERS, 50, HEADS, DIM), random_tokens(LAYERS, 256, 1, DIM)
V_OF_ID, V_OF_PLACE = random_tokens(LAYERS, 50, HEADS, V_DIM), random_tokens(LAYERS, 256, 1, V_DIM)


def kv(layer, ids, start):
    """K and V `[H, new, D]` of the tokens from `start` on; all ids before them matter."""
    places = slice(start, len(ids))
    known = torch.tensor(ids).cumsum(0)[places] % 50
    k = K_OF_ID[layer, known] + K_OF_PLACE[layer, places]
    v = V_OF_ID[layer, known] + V_OF_PLACE[layer, places]
    return k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()


@cache
def calibration(spec):
    """What methods that learn have learnt, the same for the pool and for every twin."""
    if "vq" not in spec:
        return None
    widths = [(DIM, 90), (V_DIM, 95)]
    given = {
        layer: tuple(random_tokens(1, HEADS, 200, dim, seed=seed + layer) for dim, seed in widths)
        for layer in range(LAYERS)
    }
    pool = PagedKVCache(spec, GEOMETRY, 1, calibration=given).pool
    return {layer: tuple(c.state() for c in pair) for layer, pair in enumerate(pool.codecs)}


class Model:
    """One sequence: its token ids, its tensors by layer, and its contiguous twin."""

    def __init__(self, spec):
        self.ids, self.prompt, self.published, self.whole_groups = [], 0, 0, True
        self.k = [torch.zeros(HEADS, 0, DIM) for _ in range(LAYERS)]
        self.v = [torch.zeros(HEADS, 0, V_DIM) for _ in range(LAYERS)]
        self.twin = kvpact.create_cache(spec, GEOMETRY, calibration=calibration(spec))

    def lengths(self):
        return [x.shape[1] for x in self.k]

    def append(self, layer, k, v):
        self.k[layer] = torch.cat([self.k[layer], k], 1)
        self.v[layer] = torch.cat([self.v[layer], v], 1)
        self.twin.prefill(layer, k[None], v[None])

    def truncate(self, length):
        self.k = [x[:, :length] for x in self.k]
        self.v = [x[:, :length] for x in self.v]
        self.ids = self.ids[: max(self.lengths())]
        self.twin.truncate(length)

    def fork(self):
        other = object.__new__(Model)
        other.__dict__.update(self.__dict__)
        other.k, other.v, other.ids = list(self.k), list(self.v), list(self.ids)
        other.twin, other.published = self.twin.fork(), 0
        return other
