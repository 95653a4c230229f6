"""The typer application: all commands, and one line for every error that a user can fix."""

import codecs
import io
import sys
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import kvpact
from kvpact.cli.commands import COMMANDS, ELSEWHERE, MEANT, NEEDLESS, CommandInfo
from kvpact.errors import KVPactError


class Deferred(TyperCommand):
    """A command whose module is imported when it is called, or asked for its help."""

    def __init__(self, name: str, entry: CommandInfo) -> None:
        super().__init__(name, short_help=entry.summary, help=entry.summary)
        self._entry = entry

    def load(self) -> Any:
        """Return the command itself, with those below it, of which there may be none."""
        one = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        if below := _below(str(self.name)):
            one.callback(invoke_without_command=True, epilog=_end(self._entry))(_body(self._entry))
        for word, entry in (below or {str(self.name): self._entry}).items():
            one.command(word, short_help=entry.summary, epilog=_end(entry))(_body(entry))
        return typer.main.get_command(one)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Parse the arguments of the command; see `make_context` of click's commands."""
        return self.load().make_context(*args, **extra)


def _body(entry: CommandInfo) -> Any:
    module, _, function = entry.target.partition(":")
    return getattr(import_module(f"kvpact.cli.{module}"), function)


def _end(entry: CommandInfo) -> str:
    """Return the end of a command's help: its examples."""
    title = "Example" if len(entry.examples) == 1 else "Examples"
    return f"\b\n{title}:" + "".join(f"\n  {line}" for line in entry.examples)


def _below(name: str) -> dict[str, CommandInfo]:
    """Return the commands below one, by their last words."""
    return {words.split()[-1]: x for words, x in COMMANDS.items() if words.startswith(f"{name} ")}


def _group(name: str) -> TyperGroup:
    """Return a group with its commands."""
    return TyperGroup(
        name=name,
        help=COMMANDS[name].summary,
        commands={word: Deferred(word, entry) for word, entry in _below(name).items()},
        no_args_is_help=True,
        rich_markup_mode=None,
    )


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement of signs that stdout can't encode, and where they end."""
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end]
    plain = {"±": "+-", "…": "...", "█": "#"}
    escaped = (plain.get(x) or x.encode("ascii", "backslashreplace").decode() for x in signs)
    return "".join(escaped), error.end


codecs.register_error("kvpact.spelled", _spelled)


class Commands(TyperGroup):
    """All commands; every expected error is one line on stderr and exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, entry in COMMANDS.items():
            if " " not in name:
                self.add_command(Deferred(name, entry) if entry.target else _group(name), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; for a name that other tools use, say where kvpact has it."""
        place = ELSEWHERE.get("smollm2" if ":" in args[0] else args[0])
        if place and not ctx.resilient_parsing:
            ctx.fail(f"there is no command {args[0]!r}: {place}")
        return super().resolve_command(ctx, args)

    def main(self, args: Any = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        """Run a command; see `typer.core.TyperGroup.main`."""
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="kvpact.spelled")
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
            _fail(_usage(error, sys.argv[1:] if args is None else args))
        if not standalone_mode:
            return result
        raise SystemExit(result if isinstance(result, int) else 0)


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; pip install 'kvpact[eval]'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or ''}: {error.strerror}".removeprefix(": ")
    return str(error)


def _usage(error: Any, typed: list[str]) -> str:
    """Return the remedy of a usage error; of ``-ngl``, say, typer names ``-n`` alone."""
    text = str(error.format_message()).rstrip(".")
    context: Any = getattr(error, "ctx", None)
    option = str(getattr(error, "option_name", ""))
    params = [] if context is None else context.command.params
    arguments = [x for x in params if x.param_type_name == "argument"]
    names = {y.strip(".") for x in arguments for y in str(x.metavar or x.name).upper().split()}
    names |= {word for x in params if x not in arguments for word in x.opts}
    if len(option) == 2:
        option = next((x for x in typed if x[:2] == option and x in {*MEANT, *NEEDLESS}), option)
    plain = option.replace("_", "-")
    if meant := next((name for name in (plain, *MEANT.get(plain, ())) if name in names), ""):
        value = f"{meant} VALUE" if meant.startswith("-") else meant
        return f"No such option: {option}; write: {context.command_path} … {value}"
    if plain in NEEDLESS:
        return f"No such option: {option}; leave it out: {NEEDLESS[plain]}"
    if text.startswith("No such") and context.command_path.endswith(" llama-cpp"):
        return f'{text}; write: eval "$(kvpact llama-cpp)", then the program by itself'
    if "unexpected extra argument" in text and (named := names & {"--model", "--spec"}):
        return f"{text}; a text stands in quotes, all else by name: {' and '.join(sorted(named))}"
    if context is None:
        return text
    if "unexpected extra argument" in text or text.startswith("Missing argument"):
        words = " ".join(context.command.collect_usage_pieces(context))
        return f"{text}; write: {context.command_path} {words.replace('{', '').replace('}', '')}"
    known = [*getattr(context.command, "commands", {x for x in names if x.startswith("--")})]
    if text.startswith("No such") and "Did you" not in text:
        return f"{text.partition(' (P')[0]}; {context.command_path} has {', '.join(sorted(known))}"
    return f"{text}; see {context.command_path} --help"


def _fail(message: str, code: int = 2) -> NoReturn:
    from kvpact.cli.console import error_console, printable

    console = error_console()
    console.print("[bold red]error:[/bold red] ", end="")
    line = printable(" ".join(message.split()))
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


app = typer.Typer(
    name="kvpact",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Compress KV caches, and measure what that costs in quality and saves in memory.",
    epilog="\b\nTo begin with:\n  kvpact size qwen3-8b\n  kvpact COMMAND --help",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpact {kvpact.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    wanted: bool = typer.Option(
        False, "-V", "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass
