"""LMCache: chunks stored as kvpact's packed slots, under a checksum.

`main` runs LMCache's command line with the serde ``kvpact``; `register` makes the serde known in a
process that starts LMCache otherwise. Nothing of LMCache is imported before.
"""

from kvpact.integrations.lmcache.server import main, register

__all__ = ["main", "register"]
