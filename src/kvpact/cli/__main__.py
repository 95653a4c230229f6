"""``python -m kvpact.cli`` is ``kvpact``."""

from kvpact.cli.entry import main

main()
