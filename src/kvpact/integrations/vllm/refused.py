"""What refuses a model: by name, and, in the places of vLLM's other attention over latents, all."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.v1.attention.backend import AttentionBackend

from kvpact.errors import BackendUnavailable
from kvpact.integrations.vllm.setting import SETTING


class OtherLatentBackend(AttentionBackend):
    """Refuses models with multi-head latent attention but on AMX, which are those of `latents`."""

    @staticmethod
    def get_name() -> NoReturn:
        """Refuse."""
        refuse("multi-head latent attention (MLA) but in the place of AMX_MLA, on CPUs with AMX")

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
