"""The material of tasks: a text's sentences and words, and draws from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from kvpact.evaluate.base import EvaluationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

APART = 3  # sentences between two inserts of a group

CountTokens = Callable[[str], int]


def token_counter(tokenizer: PreTrainedTokenizerBase) -> CountTokens:
    """Return a function that counts the tokens of a part of a text."""
    return lambda part: len(tokenizer(part, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Question:
    """A question asked after a context."""

    depth: float  # where it is to be found, from 0 at the beginning of the context to 1
    prompt: str
    answer: str  # that has to follow `prompt`


Made = tuple[str, list[Question]]  # a context, and what is asked after it


@dataclass
class TaskSource:
    """A text's sentences and words, and draws from them."""

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
        """Return one of five digits."""
        return str(self.random.randrange(10_000, 100_000))

    def draw(self, count: int) -> list[str]:
        """Return different words of the text."""
        return self.random.sample(self.words, count)


def woven(source: TaskSource, depths: list[float], groups: list[list[str]]) -> str:
    """Return a context: sentences, and at each depth a group of inserts, some sentences apart."""
    filler, before = source.filler([f"{text} " for group in groups for text in group])
    if len(filler) < len(depths):
        raise too_short(source)
    places: dict[int, list[str]] = {}
    for depth, group in zip(depths, groups, strict=True):
        # A group ends at the end of the context at the latest.
        near = min(range(len(before)), key=lambda i: abs(before[i] - depth * before[-1]))
        start = min(near, max(len(filler) - APART * (len(group) - 1), 0))
        for i, text in enumerate(group):
            places.setdefault(min(start + APART * i, len(filler)), []).append(text)
    parts = []
    for i, sentence in enumerate([*filler, ""]):
        parts += [*places.get(i, []), sentence]
    return " ".join(parts).rstrip()


def too_short(source: TaskSource) -> EvaluationError:
    """Return the error of a context that is too short for a task's sentences."""
    return EvaluationError(
        f"{source.tokens} tokens are too few for what tasks put into them; take more"
    )
