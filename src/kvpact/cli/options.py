"""Options that commands have in common."""

import typer

from kvpact.cli.complete import complete_dtype, complete_model, complete_spec
from kvpact.spec import DEFAULT_SPEC

SPECS = (
    "none",
    "fp8",
    "int:bits=8",
    "int:bits=4",
    "turboquant:bits=4",
    DEFAULT_SPEC,
    "trellis:bits=2",
    "kivi:bits=2",
)
"""What is shown to whoever names no specs: from the most bytes to the fewest."""

WHICH_MODEL = "smollm2, gemma3, a hub id, or the folder of a model."

MODEL = typer.Option("smollm2", help=WHICH_MODEL, autocompletion=complete_model)
MODELS = typer.Option(
    ["smollm2"],
    help=f"{WHICH_MODEL} Several may be given.",
    autocompletion=complete_model,
)
MODEL_ARGUMENT = typer.Argument(
    ..., metavar="MODEL", help=WHICH_MODEL, autocompletion=complete_model
)
DTYPE = typer.Option("float32", help="float32, bfloat16 or float16.", autocompletion=complete_dtype)
THREADS = typer.Option(None, help="CPU threads; torch's default if omitted.", show_default=False)
SPEC = typer.Option(
    "turboquant:bits=4", help="Spec or recipe of the cache.", autocompletion=complete_spec
)
STORAGE_SPEC = typer.Option(
    None,
    metavar="SPEC",
    help="Store by this spec instead, such as pca:bits=1.5 (with --calibration).",
    show_default=False,
    autocompletion=complete_spec,
)
CALIBRATION = typer.Option(
    None,
    exists=True,
    dir_okay=False,
    help="File written by `kvpact calibrate`, for methods that learn.",
    show_default=False,
)
FILE = typer.Option(
    None, help="UTF-8 text file (- for stdin), placed before the prompt.", show_default=False
)
NEW_TOKENS = typer.Option(128, min=1, help="Maximum number of tokens to generate.")
PASSWORD = typer.Option(
    None, envvar="KVPACT_STORE_PASSWORD", help="Password of a Redis server.", show_default=False
)
JSON = typer.Option(False, "--json", help="Print the result as one JSON document instead.")
