"""tqai: codes, and a dense copy that grows."""

from kvpact.evaluate import Contender


def make(model):
    """Return an empty cache that tells transformers how many tokens it holds."""
    from tqai.cache.hf import TurboQuantDynamicCache
    from tqai.config import TurboQuantConfig

    class Counting(TurboQuantDynamicCache):
        def get_mask_sizes(self, query_length, layer_idx):
            return self.get_seq_length(layer_idx) + query_length, 0

    return Counting(TurboQuantConfig(bits_k=4, bits_v=2, backend="torch", device="cpu"))


CONTENDER = Contender(
    package="tqai",
    requires=("tqai==0.6.1",),
    caches={"TurboQuantDynamicCache, K 4, V 2 bits": make},
    changed="get_mask_sizes, by which transformers 5 makes masks, is written for it: as it comes, "
    "chunks see no earlier token",
    note="Dense K and V are held: nothing is saved. New tokens are coded before they are attended.",
)
