"""A draft model with a given cache, for transformers' assisted generation."""

from copy import copy
from typing import Any

from transformers import Cache

from kvpact.errors import GeometryError
from kvpact.integrations.transformers.versions import CACHE, DRAFTS_CACHE, given_cache


class CachedDraft:
    """A draft model that keeps its tokens in a given cache.

    transformers' assisted generation makes the draft's cache itself; with
    `model.generate(…, cache=one, assistant_model=CachedDraft(draft, two, target=one))` it
    uses this one. Both caches are rolled back when tokens are rejected.

    Both caches have to be empty: transformers (5.23) passes the whole prompt again in the first
    step of assisted generation, whatever the target's cache holds, so that its tokens would stand
    twice. Other caches are refused when the draft is first asked; for ``max_new_tokens=1`` it never
    is, and nothing is checked.

    Parameters
    ----------
    model : PreTrainedModel
        The draft model; everything but `generate` is its own.
    cache : Cache
        A `CompressedCache` of the draft's config.
    target : Cache
        The cache that the target's `generate` is given, to tell that it is empty.
    """

    def __init__(self, model: Any, cache: Cache, *, target: Cache) -> None:
        self.model, self.cache, self.target = model, cache, target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate candidates, with the cache if the call brings none.

        Raises
        ------
        GeometryError
            A text begins and one of the caches holds tokens; nothing was computed.
        """
        if given_cache(kwargs) is None:  # a text's first step: later ones bring it along
            for name, cache in (("draft", self.cache), ("target", self.target)):
                if held := cache.get_seq_length():
                    raise GeometryError(
                        f"the {name}'s cache holds {held} tokens, but assisted generation passes "
                        "the whole prompt: begin with empty caches, or generate without a draft"
                    )
            kwargs[CACHE] = self.cache
        asked = kwargs.get("generation_config")
        if asked is not None and asked.cache_implementation == DRAFTS_CACHE:
            kwargs["generation_config"] = asked = copy(asked)
            asked.cache_implementation = None
        return self.model.generate(*args, **kwargs)
