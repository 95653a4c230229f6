"""Options that commands have in common."""

import typer

MODEL = typer.Option("smollm2", help="smollm2, gemma3, a hub id, or the folder of a model.")
MODELS = typer.Option(
    ["smollm2"], help="smollm2, gemma3, a hub id, or the folder of a model. Several may be given."
)
DTYPE = typer.Option("float32", help="float32, bfloat16 or float16.")
THREADS = typer.Option(None, help="CPU threads.", show_default=False)
SPEC = typer.Option("turboquant:bits=4", help="Spec or recipe of the cache.")
CALIBRATION = typer.Option(
    None,
    exists=True,
    dir_okay=False,
    help="File of `kvpact calibrate`, for methods that learn.",
    show_default=False,
)
FILE = typer.Option(
    None, help="UTF-8 text file (- for stdin), placed before the prompt.", show_default=False
)
NEW_TOKENS = typer.Option(128, min=1, help="Tokens to generate at most.")
