"""Families of models that not every version of transformers has."""

from importlib import import_module
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from kvpact.integrations.transformers import versions


class Family:
    """A class of transformers, by name, perhaps in a module below ``models``.

    Called, it makes one; a test that does is skipped where this transformers has no such class.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def known(self) -> Any:
        """The class; None where there is none."""
        module, _, name = self.name.rpartition(".")
        try:
            place = import_module(f"transformers.models.{module}") if module else transformers
            return getattr(place, name)
        except (ImportError, AttributeError):
            return None

    def __call__(self, **options: Any) -> Any:
        """Return one of the class."""
        if self.known is None:
            pytest.skip(f"transformers {transformers.__version__} has no {self.name}")
        try:
            return self.known(**options)
        except StrictDataclassError as refused:
            if "indexed_attention" in versions.LAYER_CLASSES:
                raise
            pytest.skip(f"layers of {self.name} are named otherwise: {refused}")


def rope(**parameters: Any) -> dict[str, Any]:
    """Return options of a config for its rotations, as this transformers names them."""
    if hasattr(transformers, "PreTrainedConfig"):
        return {"rope_parameters": parameters}
    return {"rope_theta": parameters.pop("rope_theta", 1e4), "rope_scaling": parameters}


def rotary_share(config: Any) -> float:
    """Return the share of a head's channels that are rotated."""
    told = getattr(config, "rope_parameters", None) or vars(config)
    return float(told.get("partial_rotary_factor", 1.0))


def crop_nothing(cache: Any) -> None:
    """Crop no token of a cache."""
    cache.crop(cache.get_seq_length() if versions.crops_to_length() else 0)


def skip_without_chunks(error: ValueError) -> None:
    """Skip a test where transformers (5.0) knows chunks of a prompt with a given cache alone."""
    if "Cannot use prefill chunking without a cache" in str(error):
        pytest.skip(str(error))
