"""What takes the place of vLLM's attention over latents, while kvpact's pages are asked for."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.v1.attention.backend import AttentionBackend

from kvpact.errors import BackendUnavailable
from kvpact.integrations.vllm.setting import SETTING


class LatentBackend(AttentionBackend):
    """Refuses models with multi-head latent attention when vLLM starts."""

    @staticmethod
    def get_name() -> NoReturn:
        """Refuse."""
        refuse("multi-head latent attention (MLA)")

    get_impl_cls = get_builder_cls = get_name

    @classmethod
    def validate_configuration(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        cls.get_name()


def refuse(what: str) -> NoReturn:
    """Raise `BackendUnavailable` for a model, or a way of running it, that is not covered."""
    raise BackendUnavailable(
        f"kvpact's vLLM plug-in does not cover {what}; unset {SETTING} to run with vLLM's own cache"
    )
