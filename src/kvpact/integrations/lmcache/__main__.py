"""``python -m kvpact.integrations.lmcache server …``: see docs/lmcache.md."""

from kvpact.integrations.lmcache.server import main

main()
