"""transformers' QuantizedCache for models that have layers with a sliding window, too."""

CHANGED = (
    "QuantizedCache refuses models with sliding windows: on Gemma 3 its layers stand in those with "
    "full attention, and the others keep transformers' own, which are exact"
)


def quantized(backend, kind, model, **options):
    """Return QuantizedCache; where a model has sliding windows, its layers beside exact ones.

    `kind` is the name of the class of a layer that `backend` stands for.
    """
    from transformers import Cache, DynamicCache, QuantizedCache, cache_utils

    exact = DynamicCache(config=model.config)
    if not any(exact.is_sliding):
        return QuantizedCache(backend, model.config, **options)
    make = getattr(cache_utils, kind)
    pairs = zip(exact.layers, exact.is_sliding, strict=True)
    return Cache(layers=[layer if sliding else make(**options) for layer, sliding in pairs])
