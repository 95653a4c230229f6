"""``transformers serve`` with compressed caches and, batching continuously, with packed pages.

    python -m kvpact.integrations.transformers.serve [--spec SPEC] MODEL --continuous-batching …

All but ``--spec`` goes to ``transformers serve``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import wraps
from typing import Any

from kvpact.integrations.transformers.enable import enable
from kvpact.integrations.transformers.versions import serving_models
from kvpact.spec import DEFAULT_SPEC


def enable_loaded(spec: str, manager: type) -> None:
    """Let a class of transformers' servers enable each model that it loads."""
    load = vars(manager)["_load_model"]

    @wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        enable(model, spec)
        return model

    manager._load_model = loaded  # type: ignore[attr-defined]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--spec", default=DEFAULT_SPEC)
    own, others = parser.parse_known_args(arguments)
    enable_loaded(own.spec, serving_models())
    from transformers.cli.transformers import app

    sys.argv[0] = "transformers"
    app(["serve", *others])


if __name__ == "__main__":
    main()
