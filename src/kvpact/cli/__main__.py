"""``python -m kvpact.cli`` is ``kvpact``."""

from kvpact.cli import main

main()
