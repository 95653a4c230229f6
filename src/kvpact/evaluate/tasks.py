"""Retrieval tasks made out of a text, with a fixed seed.

Something to be found is put at several depths of a context, and then asked for. All depths of one
context are asked for separately, after the same context.

- ``needle``: sentences with a secret number, among the text's sentences.
- ``variables``: chains of three assignments (``VAR B = VAR A.``), asked for at their ends.
- ``common words``: lists of words, among the text's sentences; which word is the most common one?
- ``key-value``: nothing but lines of keys (words of the text) and numbers.
- ``tools``: calls of tools, whose arguments stand in what tools returned long before. A context is
  an agent's conversation: the schemas of its tools, then at each depth what ``list_files`` returned
  (files with an id, a path and a number of bytes), and sentences of the text in between. The last
  quarter is sentences alone; after it calls show the form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kvpact.evaluate.base import EvaluationError
from kvpact.evaluate.task_source import CountTokens, Made, Question, TaskSource, too_short, woven

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


DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CHAIN = 3  # variables of a chain
COMMON, OTHERS = 8, 10  # how often the common word stands in a list, and words that stand once

# After a stop, with or without a closing quotation mark; not after a title.
_SENTENCE_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"\u201d\u2019]))(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)\s+"
)


@dataclass(frozen=True)
class TaskCase:
    """A context, and questions that are each asked right after it."""

    task: str
    sample: int
    context: str
    questions: tuple[Question, ...]


def make_cases(
    text: str,
    count_tokens: CountTokens,
    *,
    tokens: int = 2048,
    depths: Sequence[float] = DEPTHS,
    samples: int = 2,
    seed: int = 0,
    tasks: Sequence[str] = (),
) -> list[TaskCase]:
    """Make contexts and questions, task by task.

    Parameters
    ----------
    text : str
        Where sentences and words come from.
    count_tokens : callable
        Returns how many tokens a text has.
    tokens : int
        About how many tokens a context has, never more by its parts' count.
    depths : sequence of float
        From 0 to 1; one question each.
    samples : int
        Contexts of each task.
    seed : int
        Same seed, text and tokenizer, same cases.
    tasks : sequence of str
        See `task_names`.

    Raises
    ------
    EvaluationError
        The text has too few sentences or words, the context no room for its parts; wrong numbers
        or names.
    """
    if samples < 1 or not depths or not all(0 <= depth <= 1 for depth in depths):
        raise EvaluationError("tasks need 1 or more samples, and depths from 0 to 1")
    sentences = [s for s in _SENTENCE_END.split(" ".join(text.split())) if s]
    words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", text)))
    needed = max(len(depths), OTHERS + 1)
    if len(words) < needed or not sentences:
        raise EvaluationError(
            f"the text has {len(words)} different words of 4 to 9 small letters, tasks need "
            f"{needed}; give a longer text"
        )
    cases = []
    for task in task_names(tasks):
        make = TASKS[task]
        for sample in range(samples):
            source = TaskSource(
                sentences, words, count_tokens, tokens, Random(f"{seed}/{task}/{sample}")
            )
            context, questions = make(source, sorted(depths))
            cases.append(TaskCase(task, sample, context, tuple(questions)))
    return cases


def _question(depth: float, asked: str, begin: str, answer: str, gap: str = "\n\n") -> Question:
    return Question(depth, f"{gap}Question: {asked}\nAnswer: {begin}", f" {answer}")


def _needles(source: TaskSource, depths: list[float]) -> Made:
    names, numbers = source.draw(len(depths)), [source.number() for _ in depths]
    needles, questions = [], []
    for depth, name, number in zip(depths, names, numbers, strict=True):
        what = f"secret number of the {name}"
        needles.append([f"The {what} is {number}."])
        questions.append(_question(depth, f"What is the {what}?", f"The {what} is", number))
    return woven(source, depths, needles), questions


def _variables(source: TaskSource, depths: list[float]) -> Made:
    letters = [a + b for a in "ABCDEFGHJK" for b in "LMNPQRSTUV"]
    names = source.random.sample(letters, CHAIN * len(depths))
    chains, questions = [], []
    for i, depth in enumerate(depths):
        chain, number = names[CHAIN * i : CHAIN * (i + 1)], source.number()
        steps = zip(chain[1:], chain, strict=False)
        chains.append([f"VAR {chain[0]} = {number}.", *(f"VAR {b} = VAR {a}." for b, a in steps)])
        last = f"VAR {chain[-1]}"
        questions.append(_question(depth, f"What is the value of {last}?", f"{last} =", number))
    return woven(source, depths, chains), questions


def _common_words(source: TaskSource, depths: list[float]) -> Made:
    lists, questions = [], []
    for i, depth in enumerate(depths):
        common, *others = source.draw(OTHERS + 1)
        words = [common] * COMMON + others
        source.random.shuffle(words)
        lists.append([f"List {i + 1}: {' '.join(words)}."])
        asked = f"Which word is the most common one in list {i + 1}?"
        begin = f"The most common word in list {i + 1} is"
        questions.append(_question(depth, asked, begin, common))
    return woven(source, depths, lists), questions


def _key_value(source: TaskSource, depths: list[float]) -> Made:
    lines: dict[str, str] = {}
    room = source.tokens
    while True:
        key = "-".join(source.draw(2))
        line = f"{key}: {(number := source.number())}\n"
        room -= source.count(line)
        if room < 0:
            break
        lines.setdefault(key, number)
    if len(lines) < len(depths):
        raise too_short(source)
    keys = list(lines)
    questions = []
    for depth in depths:
        key = keys[round(depth * (len(keys) - 1))]
        what = f"number of {key}"
        asked, begin = f"What is the {what}?", f"The {what} is"
        questions.append(_question(depth, asked, begin, lines[key], gap="\n"))
    return "".join(f"{key}: {number}\n" for key, number in lines.items()), questions


TASKS: dict[str, Callable[[TaskSource, list[float]], Made]] = {
    "needle": _needles,
    "variables": _variables,
    "common words": _common_words,
    "key-value": _key_value,
    "tools": tool_calls,
}


def task_names(names: Sequence[str] = ()) -> list[str]:
    """Return names of tasks as they are, and all for none or ``all``; another one is refused."""
    if unknown := [name for name in names if name not in (*TASKS, "all")]:
        known = f"take all, {', '.join(TASKS)}; lm_eval's stand in docs/guides/lm-eval.md"
        raise EvaluationError(f"{', '.join(unknown)} is no task; {known}")
    return list(TASKS) if not names or "all" in names else list(dict.fromkeys(names))
