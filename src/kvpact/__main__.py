"""``python -m kvpact`` is ``kvpact``."""

from kvpact.cli import main

main()
