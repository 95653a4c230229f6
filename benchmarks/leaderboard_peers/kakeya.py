"""kakeyalattice: a round trip through a lattice into dense tensors."""

from kvpact.evaluate import Contender


def make(model):
    """Return an empty cache."""
    from kakeyalattice.hf.cache import KakeyaLatticeCache

    config = model.config.get_text_config(decoder=True)
    return KakeyaLatticeCache(
        q_range=38,
        num_hidden_layers=config.num_hidden_layers,
        head_dim=config.head_dim,
        device="cpu",
    )


CONTENDER = Contender(
    package="kakeyalattice",
    requires=("kakeyalattice==1.5.0",),
    caches={"KakeyaLatticeCache, E8, range 38": make},
    note="Dense K and V are held: nothing is saved. New tokens are coded before they are attended. "
    "On Gemma 3 "
    "layers with sliding windows keep all tokens, coded, and not exact ones of the window.",
)
