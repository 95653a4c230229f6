"""Attention over views of packed slots, in tiles, with an online softmax."""

from kvpact.attention.attend import attend, check_queries
from kvpact.attention.batch import Row, attend_rows
from kvpact.attention.dequant import dequant_result
from kvpact.attention.latent import (
    absorb_query,
    attend_latent,
    check_latent_config,
    expand_output,
)
from kvpact.attention.rows import query_groups
from kvpact.attention.slots import SegmentSource
from kvpact.attention.views import CHUNK, LayerView, StreamView

__all__ = [
    "CHUNK",
    "LayerView",
    "Row",
    "SegmentSource",
    "StreamView",
    "absorb_query",
    "attend",
    "attend_latent",
    "attend_rows",
    "check_latent_config",
    "check_queries",
    "dequant_result",
    "expand_output",
    "query_groups",
]
