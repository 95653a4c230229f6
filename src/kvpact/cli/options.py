"""Options that commands share, and the shell's completion of them; torch is not imported."""

from collections.abc import Callable, Sequence
from typing import Any

import typer

from kvpact.data import model_table, recipe_names
from kvpact.geometry import DTYPES
from kvpact.registry import known_names
from kvpact.spec import DEFAULT_SPEC, RECIPE_PREFIX

PACKAGED = ("smollm2", "gemma3")


def complete_spec(incomplete: str) -> list[str]:
    """Return specs that begin so: a method's name, one for V after a slash, or a recipe."""
    key, slash, value = incomplete.rpartition("/")
    found = [f"{key}{slash}{name}" for name in known_names() if name.startswith(value)]
    recipes = (RECIPE_PREFIX + name for name in recipe_names())
    return found + [name for name in recipes if name.startswith(incomplete)]


def _completion(names: Sequence[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


complete_recipe, complete_dtype = _completion(recipe_names()), _completion(DTYPES)
complete_model = _completion(PACKAGED)  # for all else the shell offers files


def complete_size(incomplete: str) -> list[str]:
    """Return models whose sizes are known, and specs, that begin so."""
    known = [name for name in model_table()["models"] if name.startswith(incomplete)]
    return known + complete_spec(incomplete)


def optional(help: str, **more: Any) -> Any:
    """Return an option that is None where it is left out."""
    return typer.Option(None, help=help, show_default=False, **more)


OUT = "--out", "-o"
FORCE = typer.Option(False, "--force", help="Replace a file that kvpact did not write, too.")

WHICH_MODEL = "smollm2, gemma3, a hub id, or the folder of a model."

MODEL = typer.Option("smollm2", help=WHICH_MODEL, autocompletion=complete_model)
MODELS = typer.Option(
    ["smollm2"], help=f"{WHICH_MODEL} Several may be given.", autocompletion=complete_model
)
MODEL_ARGUMENT = typer.Argument(
    ..., metavar="MODEL", help=WHICH_MODEL, autocompletion=complete_model
)
DTYPE = typer.Option("float32", help="float32, bfloat16 or float16.", autocompletion=complete_dtype)
THREADS = optional("CPU threads; torch's default if omitted.")
SPEC = optional(
    metavar="SPEC",
    help=f"Spec or recipe of the cache; {DEFAULT_SPEC} if omitted.",
    autocompletion=complete_spec,
)
SLIDING = optional(
    metavar="SPEC",
    help="Pack layers with sliding attention, too, by this spec; they stay exact if omitted.",
    autocompletion=complete_spec,
)
BUDGET = optional(
    metavar="BYTES",
    help="Never hold more bytes than this, such as 200MB: exact at first, or --spec, then fewer "
    "bits.",
)
STORAGE_SPEC = optional(
    metavar="SPEC",
    help="Store by this spec instead, such as pca:bits=1.5 (with --calibration).",
    autocompletion=complete_spec,
)
CALIBRATION = optional(
    exists=True, dir_okay=False, help="File written by `kvpact calibrate`, for methods that learn."
)
TEXTS = typer.Option(
    [],
    help="UTF-8 text file; the shipped excerpt of a book (@book) if omitted. Several may be given.",
    show_default=False,
)
FILE = optional(
    "UTF-8 text file (- for stdin, @book for the shipped excerpt of a book), placed before the "
    "prompt."
)
PROMPT_TOKENS = optional("Use the last tokens of --file and prompt alone, so many.", min=1)
TEMPERATURE = typer.Option(0.0, min=0.0, help="Sampling temperature; 0 is greedy.")
SAMPLING_SEED = typer.Option(0, help="Seed for sampling.")
NEW_TOKENS = typer.Option(128, min=1, help="Maximum number of tokens to generate.")
PASSWORD = optional(envvar="KVPACT_STORE_PASSWORD", help="Password of a Redis server.")
VERBOSE = typer.Option(False, "--verbose", help="Print how it was measured, too.")
JSON = typer.Option(False, "--json", help="Print the result as one JSON document instead.")
