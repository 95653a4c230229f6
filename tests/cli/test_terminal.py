"""On a terminal and in a pipe: colours, progress and widths."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
from commands import invoke

from kvpact.cli.console import progress

COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|4[0-7]|9[0-7]|38;[0-9;]+)m")


def on_terminal(code, *args, columns=80, **env):
    """Return what a program writes on a terminal of its own."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    with subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdin=side, stdout=side, stderr=side, env={**kept, "TERM": "xterm-256color", **env},
    ):  # fmt: skip
        os.close(side)
        seen = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # how a terminal says that nobody is left
                break
            if not part:
                break
            seen += part
    os.close(main)
    return seen.decode()


CONSOLE = """
import sys
from kvpact.cli.console import error_console, output_console, print_table, progress
from kvpact.cli.size import _show_bars
row = {"spec": "int:bits=4", "tokens": 64, "sinks": 100, "window": 100, "own": 100, "total": 400,
       "exact": 500}
_show_bars(output_console(), [row], 1)
error_console().print("[bold red]error:[/bold red] a")
with progress("counting") as report:
    report(1, 2, "first")
    report(2, 2, "second")
columns = ("spec", *(f"number {i}" for i in range(12)))
print_table(columns, [("a" * 150, *(str(10**9 + i) for i in range(12)))])
"""


def test_a_terminal_sees_colours_and_progress():
    seen = on_terminal(CONSOLE)
    assert COLOUR.search(seen) and "\x1b[1;31merror:" in seen
    assert "counting" in seen and "100%" in seen
    # The bar is wiped when it is done: the cursor goes up, and the line is cleared.
    assert "\x1b[2K" in seen[seen.rindex("100%") :]


def test_no_color_leaves_them_out():
    seen = on_terminal(CONSOLE, NO_COLOR="1")
    assert "error:" in seen and "\x1b" not in seen


FITS = """
from kvpact.cli.app import app
from kvpact.cli.size import show
for words in (["--help"], ["size", "--help"], ["store", "gc", "--help"]):
    try: app(words, prog_name="kvpact")
    except SystemExit: pass
layer = {"count": 30, "kind": "full_attention", "compressed": True, "heads": 3, "key_dim": 64,
         "value_dim": 64, "latent": False, "limit": None, "index_width": 0, "state_bytes": 0,
         "rate": 1, "window_width": 0, "buffer_width": 0, "sliding": None}
row = {"spec": "turboquant:bits=3,center=64", "tokens": 4096, "slots": 123456789, "factors": 0,
       "sinks": 123456, "window": 987654, "unused": 123456, "compressed": 124, "own": 222333444,
       "total": 346913687, "exact": 999888777, "bits_per_value": 3.1234}
told = {"model": "a", "positions": 512, "dtype": "float16", "batch": 1, "layers": [layer],
        "unplanned": []}
show({**told, "rows": [row]})
show({**told, "rows": [{**row, "tokens": tokens} for tokens in (4096, 32768, 131072)]})
"""


@pytest.mark.parametrize("columns", [80, 120])
def test_help_and_tables_fit_a_terminal(columns):
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal(FITS, columns=columns))
    lines = seen.replace("\r", "").split("\n")
    assert max(map(len, lines)) <= columns and "…" not in seen[seen.index(" spec ") :]
    assert seen.count("346.91 MB") == 2 + 4 and seen.count("34.7 %") == 2


NARROW = """
from kvpact.cli.console import print_table
columns = ("spec", *(f"number {i}" for i in range(9)))
print_table(columns, [("turboquant:bits=3", *(str(10**8 + i) for i in range(9)))])
print_table(("spec", "b", "c"), [("x" * 50, "1" * 20, "2" * 20)], spare=("c", "b"))
"""


def test_no_column_is_lost_on_a_narrow_terminal():
    """Text gives way to the numbers, but not wholly; what has no room goes on below."""
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal(NARROW))
    assert all(str(10**8 + i) in seen for i in range(9)) and "turboquant:b" in seen
    assert "…" not in seen and "A wider terminal has more columns: c." in seen
    assert "1" * 20 in seen and "2" * 20 not in seen and "x" * 50 in seen


def test_a_pipe_gets_whole_lines_without_colours_or_progress():
    done = subprocess.run([sys.executable, "-c", CONSOLE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr and done.stderr == "error: a\n"
    (row,) = (line for line in done.stdout.splitlines() if "a" * 150 in line)
    assert row.split() == ["a" * 150, *(str(10**9 + i) for i in range(12))]
    assert len(row) > 250


def test_a_log_gets_a_line_a_minute(monkeypatch, capsys):
    clock = SimpleNamespace(monotonic=iter([0, 10, 60, 90, 125]).__next__)
    monkeypatch.setattr("kvpact.cli.console.time", clock)
    with progress("counting") as report:
        for number in range(1, 5):
            report(number, 4, "eggs")
    assert capsys.readouterr().err == "counting: 50%, eggs, 1 min\ncounting: 100%, eggs, 2 min\n"


def test_short_work_tells_a_pipe_no_progress(model_folder, tmp_path):
    result = invoke("snapshot", "save", "Once", "--out", tmp_path / "a", "--model", model_folder)
    assert result.exit_code == 0 and result.stderr == f"loading model {model_folder}\n"


SIGNS = """
import json, sys
from kvpact.cli.app import app
from kvpact.cli.console import explain, print_document, print_table, progress, say
from kvpact.cli.size_budget import show_schedule
from kvpact.cli import commands
def work():
    if sys.argv[1] == "json":
        return print_document("size", name="caf\\u00e9 \\u2588")
    say("caf\\u00e9 \\u00b1 1 \\u2026")
    explain("\\u00b1 is an error")
    print_table(("spec", "\\u00b1"), [("\\u732b" * 9, "1")])
    row = {"tokens": 4096, "bits": 4.0, "bytes": 10**6}
    show_schedule({"rows": [row], "budget": 10**6, "max_tokens": 4096})
    with progress("counting") as report:
        report(1, 2, "first")
import kvpact.cli.doctor
kvpact.cli.doctor.doctor = work
app(["doctor"], prog_name="kvpact")
"""


@pytest.mark.parametrize("encoding", ["ascii", "cp932", "cp1252", "utf-8"])
def test_what_stdout_cannot_encode_is_spelled(encoding):
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", SIGNS]
    done = subprocess.run([*command, "text"], capture_output=True, env=env)
    assert done.returncode == 0, done.stderr.decode()
    said = done.stdout.decode(encoding)
    first = {"ascii": r"caf\xe9 +- 1 ...", "cp932": r"caf\xe9 ± 1 …"}
    assert said.splitlines()[0] == first.get(encoding, "café ± 1 …")
    cat = "猫" if encoding in ("cp932", "utf-8") else r"\u732b"
    assert cat * 9 in said and ("█" if encoding == "utf-8" else "#") * 9 in said
    done = subprocess.run([*command, "json"], capture_output=True, env=env)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout.decode(encoding))["name"] == "café █"
