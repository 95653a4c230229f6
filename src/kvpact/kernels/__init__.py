"""Everything that computes over packed slots: attention, encoding and decoding, by backend."""

from kvpact.kernels.base import (
    OPERATIONS,
    AttendCall,
    Backend,
    Encoder,
    StepRow,
    StepRunner,
    StepTokens,
    TokenMemory,
)
from kvpact.kernels.choose import check_covered, choose
from kvpact.kernels.finite import all_finite
from kvpact.kernels.offset import KnownByPosition, RowOffset, RowRotation, known_by_position
from kvpact.kernels.plan import (
    BACKENDS,
    Compute,
    Plan,
    StreamPlan,
    coverage,
    devices,
    report,
)
from kvpact.kernels.sources import PlacedSegments, Segment, SegmentSource, Where
from kvpact.kernels.torch.attend import attend_exact
from kvpact.kernels.torch.latent import absorb_query, expand_output
from kvpact.kernels.torch.queries import check_latent_config, check_queries, query_groups
from kvpact.kernels.views import CHUNK, LayerView, StreamView

__all__ = [
    "BACKENDS",
    "CHUNK",
    "OPERATIONS",
    "AttendCall",
    "Backend",
    "Compute",
    "Encoder",
    "KnownByPosition",
    "LayerView",
    "PlacedSegments",
    "Plan",
    "RowOffset",
    "RowRotation",
    "Segment",
    "SegmentSource",
    "StepRow",
    "StepRunner",
    "StepTokens",
    "StreamPlan",
    "StreamView",
    "TokenMemory",
    "Where",
    "absorb_query",
    "all_finite",
    "attend_exact",
    "check_covered",
    "check_latent_config",
    "check_queries",
    "choose",
    "coverage",
    "devices",
    "expand_output",
    "known_by_position",
    "query_groups",
    "report",
]
