"""The typer application: all commands, and one line for every error that a user can mend."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from kvpact.cli.calibrate import calibrate_command
from kvpact.cli.console import error_console, printable
from kvpact.cli.demo import demo
from kvpact.cli.doctor import doctor
from kvpact.cli.eval import evaluate_command
from kvpact.cli.generate import generate
from kvpact.cli.methods import methods
from kvpact.cli.recipes import recipes
from kvpact.cli.recommend import recommend_command
from kvpact.cli.size import size
from kvpact.cli.snapshot import snapshot
from kvpact.cli.store import store
from kvpact.errors import KVPactError
from kvpact.evaluate.runner import installed


class OneLineErrors(TyperGroup):
    """Turns every expected error into one line on stderr and exit code 2."""

    def main(self, args: Any = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        """Run a command; see `typer.core.TyperGroup.main`."""
        try:
            result = super().main(args, standalone_mode=False, **extra)
        except (KVPactError, OSError, UnicodeDecodeError, ModuleNotFoundError) as error:
            _fail(_message(error))
        except typer.Abort:
            _fail("aborted", code=1)
        except Exception as error:
            # Usage errors; their class moved from click into typer, their interface did not.
            if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                typer.echo(error.format_message())
                raise SystemExit(0) from None
            _fail(_usage(error))
        if not standalone_mode:
            return result
        raise SystemExit(result if isinstance(result, int) else 0)


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; pip install 'kvpact[eval]'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or ''}: {error.strerror}".removeprefix(": ")
    return str(error)


def _usage(error: Any) -> str:
    text = str(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    return text + (f"; see {context.command_path} --help" if context is not None else "")


def _fail(message: str, code: int = 2) -> NoReturn:
    console = error_console()
    console.print("[bold red]error:[/bold red] ", end="")
    line = printable(" ".join(message.split()))
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


app = typer.Typer(
    name="kvpact",
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Compress KV caches, and measure what that costs in quality and saves in memory.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpact {installed('kvpact') or '(not installed as a distribution)'}")
        raise typer.Exit


@app.callback()
def _options(
    wanted: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


app.command("eval")(evaluate_command)
app.command("recommend")(recommend_command)
app.command("calibrate")(calibrate_command)
app.command()(recipes)
app.command()(generate)
app.command()(size)
app.command()(methods)
app.command()(doctor)
app.command()(demo)
app.add_typer(snapshot, name="snapshot")
app.add_typer(store, name="store")
