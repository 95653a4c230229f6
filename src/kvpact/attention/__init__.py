"""Attention over views of packed slots, in tiles, with an online softmax."""

from kvpact.attention.attend import attend
from kvpact.attention.dequant import dequant_result
from kvpact.attention.views import CHUNK, LayerView, StreamView

__all__ = ["CHUNK", "LayerView", "StreamView", "attend", "dequant_result"]
