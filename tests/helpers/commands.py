"""Commands of kvpact run in this process."""

from typer.testing import CliRunner

from kvpact.cli.app import app


def invoke(*args, **options):
    return CliRunner().invoke(app, [str(arg) for arg in args], **options)


def passed(*args):
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result


def good(*args):
    return passed(*args).stdout


def bad(*args):
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("error:") == 1 and "Traceback" not in result.output
    return result.stderr
