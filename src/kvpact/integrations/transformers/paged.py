"""`PagedBatch`: transformers' `Cache` over sequences of a paged cache, one batch of an engine."""

from collections.abc import Sequence

from kvpact.cache.paged.cache import PagedKVCache
from kvpact.cache.paged.view import PagedView
from kvpact.cache.stats import Summary
from kvpact.errors import GeometryError, KVPactError
from kvpact.integrations.transformers.engine_cache import TransformersCache, may_cross_attend
from kvpact.integrations.transformers.held.shared import SharedState
from kvpact.integrations.transformers.layers.full import CompressedLayer
from kvpact.integrations.transformers.model.facts import layer_facts
from kvpact.integrations.transformers.versions import PreTrainedConfig


class PagedBatch(TransformersCache):
    """Sequences of a paged cache as the batch of one call, `model(…, cache=batch)`.

    It holds nothing itself: an engine makes one for whichever sequences run next.

    Parameters
    ----------
    config : PreTrainedConfig
        `model.config`.
    cache : PagedKVCache
        Holds the sequences.
    seqs : sequence of int, optional
        Their ids, one per row. If omitted, sequences are allocated with the first tokens.
    attention, exact_new
        As in `CompressedCache`.

    Raises
    ------
    KVPactError
        A layer of the model has no full attention.
    GeometryError
        The paged cache has another number of layers.
    SequenceError
        An id is unknown, freed or named twice.

    Notes
    -----
    Rows may have unlike lengths. The model needs `position_ids` `[B, S]`, each row's own, and no
    attention mask: rows end together, and each attends to all of its own tokens.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        cache: PagedKVCache,
        seqs: Sequence[int] | None = None,
        *,
        attention: str = "auto",
        exact_new: bool = True,
    ) -> None:
        decoder = config.get_text_config(decoder=True)
        types = layer_facts(decoder).types
        others = sorted(set(types) - {"full_attention"})
        if others:
            raise KVPactError(
                f"a paged batch needs full attention in every layer, and this model has "
                f"{', '.join(others)}; use CompressedCache"
            )
        if len(types) != cache.geometry.num_layers:
            raise GeometryError(
                f"the model has {len(types)} layers, the paged cache {cache.geometry.num_layers}"
            )
        shared = SharedState(decoder, exact_new, [])
        shared.hold(PagedView(cache, seqs), len(types))
        layers = [CompressedLayer(shared, i) for i in range(len(types))]
        crosses = may_cross_attend(config, decoder)
        super().__init__(layers, shared, attention, crosses, sparse=False)
        self._called = True  # by way of others, perhaps

    @property
    def view(self) -> PagedView:
        """The rows."""
        view = self._shared.held[0]
        assert isinstance(view, PagedView)
        return view

    @property
    def seqs(self) -> list[int]:
        """The sequence of each row."""
        return list(self.view.seqs or ())

    def _summary(self) -> Summary:
        return self.view._summary()

    def _go_back(self, length: int) -> None:
        """Cut each row in all layers to its length in the last."""
        self._order.forget()
        self._shared.stored()
        cache = self.view.cache
        for seq in self.seqs:
            cache.truncate(seq, cache.seq_len(seq, self._last))

    def reset(self) -> None:
        """Forget all tokens (see `PagedView.reset`)."""
        self._order.forget()
        self._shared.hold(self.view, len(self.layers))
        self.view.reset()
