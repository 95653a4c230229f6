"""`generate` on a compressed KV cache (kvpact), as a custom generation method of transformers."""

from transformers import DynamicCache, EncoderDecoderCache

from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import CACHE, given_cache
from kvpact.spec import DEFAULT_SPEC


def generate(inputs=None, generation_config=None, *, model, spec=DEFAULT_SPEC, **kwargs):
    """Do what `model.generate` does, with a `CompressedCache` where the caller passes no cache.

    Parameters
    ----------
    inputs, generation_config, **kwargs
        As of `model.generate`.
    model : PreTrainedModel
        Given by transformers.
    spec : str or path
        How K and V are stored: a spec or a recipe of kvpact.
    """
    if given_cache(kwargs) is None and kwargs.get("use_cache") is not False:
        cache = CompressedCache(model, spec)
        if model.config.is_encoder_decoder:
            decoder = model.config.get_text_config(decoder=True)
            cache = EncoderDecoderCache(cache, DynamicCache(config=decoder))
        kwargs[CACHE] = cache
    # Not model.generate: of a model from a repository with this file, that is this function.
    return type(model).generate(model, inputs, generation_config, **kwargs)
