"""``transformers serve`` with compressed caches and, batching continuously, with packed pages.

    python -m kvpact.integrations.transformers.serve [--spec SPEC] MODEL --continuous-batching …

All but ``--spec`` goes to ``transformers serve``.
"""

import argparse
from typing import Any

from kvpact.integrations.transformers.enabled.enable import enable
from kvpact.integrations.transformers.versions import VersionError
from kvpact.spec import DEFAULT_SPEC


def enable_loaded(spec: str, manager: type) -> None:
    """Let a class of transformers' servers enable each model that it loads."""
    load: Any = vars(manager)["_load_model"]

    def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        return enable(load(self, *args, **kwargs), spec).model

    manager._load_model = loaded  # type: ignore[attr-defined]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--spec", default=DEFAULT_SPEC)
    own, others = parser.parse_known_args()
    try:
        from transformers.cli.serving.model_manager import ModelManager
        from transformers.cli.transformers import app
    except ImportError as error:
        raise VersionError("kvpact enables the models that transformers serves", "5.10") from error
    enable_loaded(own.spec, ModelManager)
    app(["serve", *others])
