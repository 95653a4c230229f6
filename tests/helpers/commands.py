"""Commands of kvpact run in this process."""

from typer.testing import CliRunner

from kvpact.cli.app import app


def invoke(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def good(*args):
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.stdout
