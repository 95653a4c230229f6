"""The task ``tools``: calls of a tool whose arguments stand in what tools returned long before.

A context is an agent's conversation: the schemas of its tools, then at each depth what
``list_files`` returned, files with an id, a path and a number of bytes, and between these what
``read_page`` returned, sentences of the text. The last quarter is sentences alone; after it calls
show the form. So in a context of 8,192 tokens arguments are copied from 2,000 to 8,000 tokens back.
"""

from __future__ import annotations

import json

from kvpact.evaluate.task_source import Made, Question, TaskSource, woven

REACH = 0.75  # the part of the context that has something to be asked for
SHOWN, ASKED = 1, 3  # files of each list that are in the calls at the end, and that are asked for
ARGUMENTS = ("id", "path", "bytes")

_SYSTEM = """\
System: You answer by calling tools. Copy ids, paths and numbers exactly as the tools returned them.
{"name": "list_files", "arguments": {"page": "integer"}}
{"name": "read_page", "arguments": {"page": "integer"}}
{"name": "archive_file", "arguments": {"file": "string", "id": "string", "path": "string", \
"bytes": "integer"}}
"""
_PAGE = "\nTool read_page:\n"


def tool_calls(source: TaskSource, depths: list[float]) -> Made:
    """Return a conversation, and a question for each argument of the calls that are asked for."""
    names = source.draw(3 * (SHOWN + ASKED) * len(depths))
    drawn = [_file(source, *names[i : i + 3]) for i in range(0, len(names), 3)]
    lists = [drawn[i :: len(depths)] for i in range(len(depths))]
    groups, shown, questions = [[_SYSTEM + _PAGE]], [], []
    for depth, files in zip(depths, lists, strict=True):
        lines = "\n".join(json.dumps(file) for file in files)
        groups.append([f"\n\nTool list_files:\n{lines}\n{_PAGE}"])
        shown += [_call(file) for file in files[:SHOWN]]
        questions += [question for file in files[SHOWN:] for question in _asked(depth, file)]
    groups.append(["\n" + "".join(shown)])
    at = [0.0, *(REACH * depth for depth in depths), 1.0]
    return woven(source, at, groups) + "\n", questions


def _file(source: TaskSource, name: str, folder: str, stem: str) -> dict[str, str | int]:
    return {
        "file": name,
        "id": f"{source.random.getrandbits(32):08x}",
        "path": f"/{folder}/{stem}_{source.random.randrange(1000)}.csv",
        "bytes": source.random.randrange(10_000, 1_000_000),
    }


def _call(file: dict[str, str | int]) -> str:
    called = json.dumps({"name": "archive_file", "arguments": file})
    return f"\nUser: Archive the file {file['file']}.\nAssistant: {called}\n"


def _asked(depth: float, file: dict[str, str | int]) -> list[Question]:
    """Return a question for each argument, asked after those before it."""
    found = []
    for name in ARGUMENTS:
        begin, key, _ = _call(file).partition(f'"{name}":')
        # Tokenizers join the closing quotation mark with what follows.
        found.append(Question(depth, begin + key, " " + json.dumps(file[name]).rstrip('"')))
    return found
