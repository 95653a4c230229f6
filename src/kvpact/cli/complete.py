"""What the shell completes: names of specs, methods, models and dtypes; nothing is imported."""

from __future__ import annotations

from kvpact.data import recipe_names
from kvpact.registry import known_names
from kvpact.spec import RECIPE_PREFIX

DTYPES = ("float32", "bfloat16", "float16")
MODELS = ("smollm2", "gemma3")


def complete_spec(incomplete: str) -> list[str]:
    """Return specs that begin so: a method's name, one for V behind a slash, or a recipe."""
    key, slash, value = incomplete.rpartition("/")
    found = [f"{key}{slash}{name}" for name in known_names() if name.startswith(value)]
    recipes = (RECIPE_PREFIX + name for name in recipe_names())
    return found + [name for name in recipes if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Return shipped recipes that begin so."""
    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Return names of packaged models that begin so; for all else the shell offers files."""
    return [name for name in MODELS if name.startswith(incomplete)]


def complete_size(incomplete: str) -> list[str]:
    """Return models and specs that begin so."""
    return complete_model(incomplete) + complete_spec(incomplete)


def complete_dtype(incomplete: str) -> list[str]:
    """Return the dtypes that begin so."""
    return [name for name in DTYPES if name.startswith(incomplete)]
