"""Everything that computes over packed slots: attention, encoding, decoding, by backend."""

from kvpact.kernels.batch import Row, attend_rows
from kvpact.kernels.cpu.slots import SegmentSource
from kvpact.kernels.plan import Kernel
from kvpact.kernels.queries import query_groups
from kvpact.kernels.torch.attend import attend, check_queries
from kvpact.kernels.torch.latent import (
    absorb_query,
    attend_latent,
    check_latent_config,
    expand_output,
)
from kvpact.kernels.views import CHUNK, LayerView, StreamView

__all__ = [
    "CHUNK",
    "Kernel",
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
    "expand_output",
    "query_groups",
]
