"""Retrieval tasks made out of a text, with a fixed seed.

Something to be found is put at several depths of a context, and then asked for. All depths of one
context are asked for separately, after the same context.

- ``needle``: sentences with a secret number, among the text's sentences.
- ``variables``: chains of three assignments (``VAR B = VAR A.``), asked for at their ends.
- ``common words``: lists of words, among the text's sentences; which word is the most common one?
- ``key-value``: nothing but lines of keys (words of the text) and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kvpact.evaluate.base import EvaluationError

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CHAIN = 3  # variables of a chain
APART = 3  # sentences between two of them
COMMON, OTHERS = 8, 10  # how often the common word stands in a list, and words that stand once

# After a stop, with or without a closing quotation mark; not after a title.
_SENTENCE_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"\u201d\u2019]))(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)\s+"
)

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Question:
    """What is asked after a context: `prompt`, and the `answer` that has to follow it.

    `depth` is where it is to be found, 0 at the beginning of the context and 1 at its end.
    """

    depth: float
    prompt: str
    answer: str


@dataclass(frozen=True)
class TaskCase:
    """A context, and questions that are each asked right after it."""

    task: str
    sample: int
    context: str
    questions: tuple[Question, ...]


@dataclass
class _TaskSource:
    """A text's sentences and words, and what is drawn from them."""

    sentences: list[str]
    words: list[str]
    count: CountTokens
    tokens: int
    random: Random

    def filler(self, inserted: Sequence[str]) -> tuple[list[str], list[int]]:
        """Return sentences that fill the context up, and the tokens before each and after all."""
        room = self.tokens - sum(self.count(text) for text in inserted)
        start = self.random.randrange(len(self.sentences))
        found: list[str] = []
        before = [0]
        for i in range(len(self.sentences)):
            sentence = self.sentences[(start + i) % len(self.sentences)]
            end = before[-1] + self.count(sentence + " ")
            if end > room:
                return found, before
            found.append(sentence)
            before.append(end)
        raise EvaluationError(
            f"the text is too short for tasks of {self.tokens} tokens; give a longer one, or fewer "
            "tokens"
        )

    def number(self) -> str:
        return str(self.random.randrange(10_000, 100_000))

    def draw(self, count: int) -> list[str]:
        """Return different words of the text."""
        return self.random.sample(self.words, count)


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
        Names of tasks; all of them if empty.

    Raises
    ------
    EvaluationError
        The text has too few sentences or words, the context no room for its parts; wrong numbers.
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
    for task in tasks or TASKS:
        make = TASKS[task]
        for sample in range(samples):
            source = _TaskSource(
                sentences, words, count_tokens, tokens, Random(f"{seed}/{task}/{sample}")
            )
            context, questions = make(source, sorted(depths))
            cases.append(TaskCase(task, sample, context, tuple(questions)))
    return cases


Made = tuple[str, list[Question]]


def _question(depth: float, asked: str, begin: str, answer: str, gap: str = "\n\n") -> Question:
    return Question(depth, f"{gap}Question: {asked}\nAnswer: {begin}", f" {answer}")


def _needles(source: _TaskSource, depths: list[float]) -> Made:
    names, numbers = source.draw(len(depths)), [source.number() for _ in depths]
    needles, questions = [], []
    for depth, name, number in zip(depths, names, numbers, strict=True):
        what = f"secret number of the {name}"
        needles.append([f"The {what} is {number}."])
        questions.append(_question(depth, f"What is the {what}?", f"The {what} is", number))
    return _woven(source, depths, needles), questions


def _variables(source: _TaskSource, depths: list[float]) -> Made:
    letters = [a + b for a in "ABCDEFGHJK" for b in "LMNPQRSTUV"]
    names = source.random.sample(letters, CHAIN * len(depths))
    chains, questions = [], []
    for i, depth in enumerate(depths):
        chain, number = names[CHAIN * i : CHAIN * (i + 1)], source.number()
        steps = zip(chain[1:], chain, strict=False)
        chains.append([f"VAR {chain[0]} = {number}.", *(f"VAR {b} = VAR {a}." for b, a in steps)])
        last = f"VAR {chain[-1]}"
        questions.append(_question(depth, f"What is the value of {last}?", f"{last} =", number))
    return _woven(source, depths, chains), questions


def _common_words(source: _TaskSource, depths: list[float]) -> Made:
    lists, questions = [], []
    for i, depth in enumerate(depths):
        common, *others = source.draw(OTHERS + 1)
        words = [common] * COMMON + others
        source.random.shuffle(words)
        lists.append([f"List {i + 1}: {' '.join(words)}."])
        asked = f"Which word is the most common one in list {i + 1}?"
        begin = f"The most common word in list {i + 1} is"
        questions.append(_question(depth, asked, begin, common))
    return _woven(source, depths, lists), questions


def _key_value(source: _TaskSource, depths: list[float]) -> Made:
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
        raise _too_short(source, depths)
    keys = list(lines)
    questions = []
    for depth in depths:
        key = keys[round(depth * (len(keys) - 1))]
        what = f"number of {key}"
        asked, begin = f"What is the {what}?", f"The {what} is"
        questions.append(_question(depth, asked, begin, lines[key], gap="\n"))
    return "".join(f"{key}: {number}\n" for key, number in lines.items()), questions


TASKS: dict[str, Callable[[_TaskSource, list[float]], Made]] = {
    "needle": _needles,
    "variables": _variables,
    "common words": _common_words,
    "key-value": _key_value,
}


def _woven(source: _TaskSource, depths: list[float], groups: list[list[str]]) -> str:
    """Return a context: sentences, and at each depth a group of inserts, some sentences apart."""
    filler, before = source.filler([f"{text} " for group in groups for text in group])
    if len(filler) < len(depths):
        raise _too_short(source, depths)
    places: dict[int, list[str]] = {}
    for depth, group in zip(depths, groups, strict=True):
        # A group ends at the end of the context at the latest.
        near = min(range(len(before)), key=lambda i: abs(before[i] - depth * before[-1]))
        start = min(near, max(len(filler) - APART * (len(group) - 1), 0))
        for i, text in enumerate(group):
            places.setdefault(min(start + APART * i, len(filler)), []).append(text)
    woven = []
    for i, sentence in enumerate([*filler, ""]):
        woven += [*places.get(i, []), sentence]
    return " ".join(woven).rstrip()


def _too_short(source: _TaskSource, depths: list[float]) -> EvaluationError:
    return EvaluationError(
        f"{source.tokens} tokens are too few for tasks at {len(depths)} depths; take more"
    )
