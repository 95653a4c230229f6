"""A cache of its own: exact tensors, joined at each call; and three that are broken."""

import copy

import torch

from kvpact import AttendConfig, Dequantized, DequantResult, KVTile, errors
from kvpact.cache import check_layer, check_query, check_tokens


class ListCache:
    """Keeps K and V as they are; `decode` leaves the attention to the caller."""

    def __init__(self, geometry, max_tokens=None):
        self.geometry, self.max_tokens = geometry, max_tokens
        self.layers = [None] * self.geometry.num_layers

    def reset(self, layer=None):
        if layer is not None:
            check_layer(layer, len(self.layers))
        for index in range(len(self.layers)) if layer is None else [layer]:
            self.layers[index] = None

    def check(self, layer, k, v, q, config):
        check_layer(layer, len(self.layers))
        held = self.layers[layer]
        check_tokens(self.geometry, k, v, q, held and held[0])
        if q is not None:
            check_query(self.geometry, q, config or AttendConfig())
        if self.batch_size not in (None, k.shape[0]):
            raise errors.GeometryError(f"the cache holds {self.batch_size} rows")
        if self.max_tokens is not None and self.seq_len(layer) + k.shape[2] > self.max_tokens:
            raise errors.CacheFull(f"no more than {self.max_tokens} tokens fit")

    def prefill(self, layer, k, v, q=None, config=None):
        self.check(layer, k, v, q, config)
        held = self.layers[layer] or (k[:, :, :0], v[:, :, :0])
        k, v = (torch.cat(pair, 2).detach() for pair in zip(held, (k, v), strict=True))
        self.layers[layer] = (k, v)
        tile = KVTile(0, k.shape[2], k, v, None)
        return DequantResult(lambda: iter([tile]), k.shape[2])

    def decode(self, layer, k, v, q, config=None):
        if isinstance(k, torch.Tensor) and k.dim() == 4 and k.shape[2] != 1:
            raise errors.GeometryError("decode takes one token")
        return Dequantized(self.prefill(layer, k, v, q, config))

    def seq_len(self, layer):
        check_layer(layer, len(self.layers))
        return 0 if self.layers[layer] is None else self.layers[layer][0].shape[2]

    @property
    def batch_size(self):
        return next((held[0].shape[0] for held in self.layers if held is not None), None)

    def memory_usage(self):
        return sum(x.nbytes for held in self.layers if held is not None for x in held)

    def truncate(self, length):
        if type(length) is not int or length < 0:
            raise errors.GeometryError("truncate to a number of tokens from 0 on")
        for layer, held in enumerate(self.layers):
            if held is not None:
                self.layers[layer] = tuple(x[:, :, :length].clone() for x in held)

    def fork(self):
        return copy.copy(self)._with_own_list()

    def _with_own_list(self):
        self.layers = list(self.layers)
        return self


class SharingFork(ListCache):
    """A fork and its original are one."""

    def fork(self):
        return copy.copy(self)


class Undercounting(ListCache):
    """Slices keep the memory of what was truncated."""

    def truncate(self, length):
        super().truncate(length)
        for layer, held in enumerate(self.layers):
            if held is not None:
                self.layers[layer] = tuple(
                    torch.cat([x, torch.zeros_like(x[:, :, :1])], 2)[:, :, : x.shape[2]]
                    for x in held
                )


class HalfStoring(ListCache):
    """Looks at V after it has stored K."""

    def prefill(self, layer, k, v, q=None, config=None):
        check_layer(layer, len(self.layers))
        if self.layers[layer] is not None and k.dim() == 4:
            held_k, held_v = self.layers[layer]
            self.layers[layer] = (held_k + 0, held_v)
            held_k[..., -1] = 0
        return super().prefill(layer, k, v, q, config)
