"""turboquant-torch: a lossy round trip into dense tensors."""

from kvpact.evaluate import Contender


def make(model):
    """Return an empty cache that passes each layer's new tokens through the package's codec."""
    from transformers import DynamicCache
    from turboquant.kv_cache import TurboQuantKVCache

    config = model.config.get_text_config(decoder=True)
    codec = TurboQuantKVCache(head_dim=config.head_dim, bit_width=4)

    class RoundTrip(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            packed = codec.compress(key_states.float(), value_states.float())
            k = codec.decompress_keys(packed).to(key_states.dtype)
            v = codec.decompress_values(packed).to(value_states.dtype)
            return super().update(k, v, layer_idx, *args, **kwargs)

    return RoundTrip()


CONTENDER = Contender(
    package="turboquant-torch",
    requires=("turboquant-torch==0.4.0",),
    caches={"TurboQuantKVCache, 4 bits": make},
    changed="its own cache codes all tokens anew at each compress_all(), called by hand: here its "
    "codec takes each token once, when it comes",
    note="Dense K and V are held: nothing is saved. New tokens are coded before they are attended.",
)
