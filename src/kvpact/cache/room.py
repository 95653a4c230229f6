"""Room for steps of a layer that allocate nothing, and steps that are taken back."""

from __future__ import annotations

from kvpact.cache.held import Held
from kvpact.cache.layer import CacheLayer
from kvpact.cache.stream import Stream
from kvpact.kernels import TokenMemory


def reserve(layer: CacheLayer, tokens: int) -> None:
    """Make room for so many more tokens in a layer, so that steps of a few allocate nothing."""
    with layer.lock:
        held = layer._held
        if held.k is None or held.v is None:
            return
        if not layer.clean:
            layer.settle()
        k, v = _reserved(held.k, tokens), _reserved(held.v, tokens)
        layer._held = held._replace(k=k, v=v, runner=None)


def rewind(layer: CacheLayer, held: Held) -> None:
    """Let a layer hold again what it held before steps that made nothing lie elsewhere."""
    with layer.lock:
        layer._clean = False
        layer._held = held
        layer.settle()


def _reserved(stream: Stream, tokens: int) -> Stream:
    store = stream.store.grown(stream.length + tokens, stream.packed)
    if stream.tail_start == stream.length or stream.spare >= tokens:
        return stream._replace(store=store)
    like, count = stream.memory.tensor, stream.length - stream.tail_start
    tail = like.new_zeros(*like.shape[:2], count + tokens, like.shape[3])
    tail[:, :, :count] = stream.tail
    memory = TokenMemory(tail, stream.tail_start)
    return stream._replace(store=store, memory=memory, spare=tokens)
