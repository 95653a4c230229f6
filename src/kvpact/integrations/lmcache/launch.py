"""The command that runs LMCache with kvpact's serde: LMCache looks for none by itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from kvpact.errors import BackendUnavailable
from kvpact.integrations.lmcache import serde, server


def register() -> None:
    """Make the serde ``kvpact`` known to LMCache in this process.

    Raises
    ------
    BackendUnavailable
        LMCache is not installed.
    """
    try:
        from lmcache.v1.distributed.serde import get_registered_serde_types, register_serde_factory
    except ImportError as error:
        raise BackendUnavailable(
            f"LMCache can't be imported ({error}): pip install 'kvpact[lmcache]'"
        ) from error
    if server.SERDE not in get_registered_serde_types():
        register_serde_factory(server.SERDE, server.create_serde)


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``lmcache`` with these arguments, with the serde and, for ``server``, its module.

    Parameters
    ----------
    argv : sequence of str, optional
        What stands behind ``lmcache``; the process's own arguments if omitted.

    Raises
    ------
    BackendUnavailable
        LMCache is not installed.
    """
    register()
    from lmcache.cli.main import main as lmcache
    from lmcache.logging import init_logger

    # LMCache makes a handler for each logger of its own, and none for others.
    for module in (serde, server):
        init_logger(module.__name__)
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["server"]:
        given += ["--server-module", json.dumps({"module_path": server.__name__})]
    lmcache(given)
