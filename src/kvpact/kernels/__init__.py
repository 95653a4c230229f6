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
from kvpact.kernels.choose import check_covered, choose, coverage, devices, report
from kvpact.kernels.cpu.heap import Hold, giving_back, malloc_here
from kvpact.kernels.cpu.library import native_threads
from kvpact.kernels.finite import all_finite, check_arrival, largest, surely_stored
from kvpact.kernels.index import index_scores
from kvpact.kernels.offset import KnownByPosition, RowOffset, RowRotation, known_by_position
from kvpact.kernels.plan import BACKENDS, Compute, Plan, StreamPlan, attend_exact, covering_new
from kvpact.kernels.prompt import PromptPlace, PromptRunner, PromptSide
from kvpact.kernels.sources import ListSource, Segment, SegmentSource, Table, Where, WritableSource
from kvpact.kernels.torch.latent import absorb_query, expand_output
from kvpact.kernels.torch.logits import check_latent_config, check_queries, query_groups
from kvpact.kernels.views import CHUNK, WAITING, LayerView, StreamView, exact_from
