"""kvpact inside Hugging Face transformers: `CompressedCache` goes in as `cache=`.

Before transformers 5.24 that argument is called `past_key_values=`. `enable` lets a model's
`generate` make a cache by itself, and `PagedBatch` is for sequences of a `PagedKVCache`.
"""

from kvpact.callable_package import let_tell
from kvpact.errors import BackendUnavailable

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise BackendUnavailable(
        "transformers is not installed; run: pip install 'kvpact[transformers]'"
    ) from error

from kvpact.integrations.transformers.attention.calibrate import calibrate
from kvpact.integrations.transformers.attention.forward import ATTENTION, register_attention
from kvpact.integrations.transformers.attention.learnt import calibration_of
from kvpact.integrations.transformers.cache import CompressedCache
from kvpact.integrations.transformers.draft import CachedDraft
from kvpact.integrations.transformers.enabled.enable import Enabled, disable, enable
from kvpact.integrations.transformers.model.fallback import FallbackWarning
from kvpact.integrations.transformers.model.offsets import key_offsets
from kvpact.integrations.transformers.paged import PagedBatch
from kvpact.integrations.transformers.prefix import prefix_cache
from kvpact.integrations.transformers.scored import pressed

__all__ = [
    "ATTENTION",
    "CachedDraft",
    "CompressedCache",
    "Enabled",
    "FallbackWarning",
    "PagedBatch",
    "calibrate",
    "calibration_of",
    "disable",
    "enable",
    "key_offsets",
    "prefix_cache",
    "pressed",
    "register_attention",
]

register_attention()  # so that attn_implementation="kvpact" can be named before a cache is made
let_tell(__name__)
