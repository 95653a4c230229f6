"""``python -m kvpact.integrations.lmcache server …``: see docs/serving.md."""

from kvpact.integrations.lmcache.server import main

main()
