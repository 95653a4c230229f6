"""Attention over views of packed slots, in tiles, with an online softmax."""

from kvpact.attention.attend import attend, check_queries
from kvpact.attention.dequant import dequant_result
from kvpact.attention.views import CHUNK, LayerView, SegmentSource, StreamView

__all__ = [
    "CHUNK",
    "LayerView",
    "SegmentSource",
    "StreamView",
    "attend",
    "check_queries",
    "dequant_result",
]
