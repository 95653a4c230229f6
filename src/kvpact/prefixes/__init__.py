"""Prefixes of prompts in a store, chunk by chunk: computed once, shared by all that extend them."""

from kvpact.prefixes.ids import Tokens, token_ids
from kvpact.prefixes.prefix_cache import PrefixCache
from kvpact.prefixes.sources import PrefixSource

__all__ = ["PrefixCache", "PrefixSource", "Tokens", "token_ids"]
